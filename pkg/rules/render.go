package rules

import (
	"fmt"
	"slices"
	"strings"
)

// Render returns one family's part of a generation as input for iptables-restore, to be loaded
// into empty tables.
//
// It declares no built-in chains, so that it sets no policy, and no chains that are left out,
// because that would empty them. It writes rules that cannot be loaded as comments: opaque
// rules, and rules that jump to another owner's chain.
func Render(g Generation, f Family) string {
	var b strings.Builder
	for _, t := range AllTables() {
		s, ok := g[f.Table(t)]
		if !ok || len(s.Chains) == 0 && len(s.Jumps) == 0 {
			continue
		}
		fmt.Fprintf(&b, "*%s\n", t)
		for _, c := range s.Chains {
			if !c.LeftOut() {
				fmt.Fprintf(&b, ":%s - [0:0]\n", c.Name)
			}
		}
		line := func(h Jump) {
			if slices.Contains(s.DependsOn, h.Into()) {
				fmt.Fprintf(&b, "# needs chain %s: ", h.Into())
			}
			if _, opaque := h.Rule.Opaque(); opaque {
				b.WriteString("# ")
			}
			b.WriteString(h.String() + "\n")
		}
		for _, h := range s.Jumps {
			line(h)
		}
		for _, c := range s.Chains {
			for _, r := range c.Rules {
				line(Jump{Chain: c.Name, Rule: r})
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}
