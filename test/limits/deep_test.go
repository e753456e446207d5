package limits

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// deepest is the greatest number of nested chains on nf_tables, the built-in chain included
// (NFT_JUMP_STACK_SIZE of include/net/netfilter/nf_tables.h). x_tables allows any number.
const deepest = 16

// nest returns n of the attacker's chains, each with a jump to the next.
func nest(n int) string {
	var chains, jumps strings.Builder
	for i := range n {
		fmt.Fprintf(&chains, ":%s - [0:0]\n", attacker(i))
		if i+1 < n {
			fmt.Fprintf(&jumps, "-A %s -j %s\n", attacker(i), attacker(i+1))
		}
	}
	return chains.String() + jumps.String()
}

// TestLoopsAndDeepNests: the kernel refuses loops, and on nf_tables deep nests. It takes a nest
// without a jump to it, and canaryd learns that. An attacker's file then makes the nest too
// deep. The kernel refuses only the rule that would complete it, and canaryd restores the
// others.
func TestLoopsAndDeepNests(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		want := protected(n, rules.IPv4, rules.Nat)
		d := n.Start()
		if err := write(n, "*nat\n"+nest(3)+"-A "+attacker(2)+" -j "+attacker(0)+"\n-A OUTPUT -j "+attacker(0)+"\nCOMMIT\n"); err == nil {
			n.Error("the kernel takes a loop")
		}
		for chains, refused := range map[int]bool{deepest - 1: false, deepest: onNFT(n)} {
			err := write(n, "*nat\n"+nest(chains)+"-A OUTPUT -j "+attacker(0)+"\nCOMMIT\n")
			if refused != (err != nil) {
				n.Errorf("a nest of %d chains below a built-in one: %v, want refused %t", chains, err, refused)
			}
			if !refused {
				clear := "*nat\n"
				for i := range chains {
					clear += "-F " + attacker(i) + "\n"
				}
				clear += "-D OUTPUT -j " + attacker(0) + "\n"
				for i := range chains {
					clear += "-X " + attacker(i) + "\n"
				}
				n.Must(write(n, clear+"COMMIT\n"))
			}
		}
		const rest = 12
		n.Must(write(n, "*nat\n"+nest(rest)+"COMMIT\n"))
		n.Until("the nest in the generation", func() error {
			if text, _ := n.Want(0, "render", "--ip-family=ipv4"); !strings.Contains(text, attacker(rest-2)+" -j "+attacker(rest-1)) {
				return errors.New("it is not in it")
			}
			return nil
		})
		// Six unprotected chains lead to it, in a file that replaces the table.
		file := "*nat\n:OUTPUT ACCEPT [0:0]\n:" + attacker(0) + " - [0:0]\n"
		for i := range 6 {
			file += fmt.Sprintf(":LEAD-%d - [0:0]\n", i)
		}
		for i := range 5 {
			file += fmt.Sprintf("-A LEAD-%d -j LEAD-%d\n", i, i+1)
		}
		file += "-A LEAD-5 -j " + attacker(0) + "\n-A OUTPUT -j LEAD-0\nCOMMIT\n"
		n.Must(n.Programs.Restore(n.Context(), rules.IPv4, file))
		n.Until("the rules of others in the same table", func() error {
			if got := protected(n, rules.IPv4, rules.Nat); strings.Join(got, "\n") != strings.Join(want, "\n") {
				return fmt.Errorf("%d lines, want %d", len(got), len(want))
			}
			return nil
		})
		n.Logf("ipv6 nat was back %s after its flush", othersAreRepaired(n).Round(time.Millisecond))
		n.Logf("ipv4 filter was back %s after its flush", repaired(n, rules.IPv4, rules.Filter).Round(time.Millisecond))
		const reason = "(more than 15 jumps would follow one another"
		code, text, _ := n.Canaryd("status")
		if onNFT(n) != strings.Contains(text, reason) || onNFT(n) != (code == 1) {
			n.Errorf("whether a jump is too deep: want %t, exit code %d:\n%s", onNFT(n), code, text)
		}
		d.Stop()
	})
}

// loops are generations whose rules the kernel refuses, as fragments.
func loops(n *nodetest.Node) map[string]string {
	all := map[string]string{"a loop": "*nat\n" + nest(3) + "-A " + attacker(2) + " -j " + attacker(0) + "\n-A OUTPUT -j " + attacker(0) + "\nCOMMIT\n"}
	if onNFT(n) {
		all["a deep nest"] = "*nat\n" + nest(deepest+2) + "-A OUTPUT -j " + attacker(0) + "\nCOMMIT\n"
	}
	return all
}

// TestDeclaredLoops: a fragment declares a loop or a nest that is too deep. canaryd refuses its
// table, and heals other tables.
func TestDeclaredLoops(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		n.Must(os.Mkdir("/run/rules.d", 0o700))
		for name, text := range loops(n) {
			n.Must(os.WriteFile("/run/rules.d/loop.v4", []byte(strings.ReplaceAll(text, attack, "CORP")), 0o600))
			d := n.Launch("--rules-dir=/run/rules.d")
			n.Until(name+" to be refused", func() error {
				err := nodetest.Ready()
				if err == nil || !strings.Contains(err.Error(), "/run/rules.d/loop.v4:") {
					return fmt.Errorf("ready: %w", err)
				}
				return nil
			})
			n.Logf("%s: ipv6 nat was back %s after its flush", name, othersAreRepaired(n).Round(time.Millisecond))
			repaired(n, rules.IPv4, rules.Filter)
			d.Stop()
		}
	})
}

// TestStoredLoops: a stored generation has a loop, or a nest that is too deep. canaryd replays
// it without its table, or without the rule that completes the loop.
func TestStoredLoops(t *testing.T) {
	for _, test := range []struct {
		name    string
		backend iptables.Backend
	}{{"a loop", iptables.NFT}, {"a loop", iptables.Legacy}, {"a deep nest", iptables.NFT}} {
		t.Run(test.name+"/"+string(test.backend), func(t *testing.T) {
			nodetest.On(t, test.backend, func(n *nodetest.Node) { storedLoop(n, loops(n)[test.name]) })
		})
	}
}

func storedLoop(n *nodetest.Node, text string) {
	n.Load()
	n.Start().Stop()
	store(n, func(g rules.Generation) {
		section := g[rules.IPv4.Table(rules.Nat)]
		for line := range strings.Lines(text) {
			switch words := strings.Fields(line); words[0][0] {
			case ':':
				section.Chains = append(section.Chains, rules.Chain{Name: words[0][1:]})
			case '-':
				rule, err := rules.ParseRule(strings.Join(words[2:], " "))
				if err != nil {
					n.Fatal(err)
				}
				at := slices.IndexFunc(section.Chains, func(c rules.Chain) bool { return c.Name == words[1] })
				if at < 0 {
					section.Jumps = append(section.Jumps, rules.Jump{Chain: words[1], Rule: rule, Anchor: rules.Anchor{Position: rules.Top}})
					continue
				}
				section.Chains[at].Rules = append(section.Chains[at].Rules, rule)
			}
		}
		g[rules.IPv4.Table(rules.Nat)] = section
	})
	want := [3][]string{protected(n, rules.IPv4, rules.Nat), protected(n, rules.IPv4, rules.Filter), protected(n, rules.IPv6, rules.Nat)}
	n.Must(scenario.Wipe(n.Context(), n.Programs, rules.Families()...))
	d := n.Launch()
	n.Until("all tables", func() error {
		now := [3][]string{protected(n, rules.IPv4, rules.Nat), protected(n, rules.IPv4, rules.Filter), protected(n, rules.IPv6, rules.Nat)}
		if diff := cmp.Diff(want, now); diff != "" {
			return fmt.Errorf("protected rules (-want +got):\n%s", diff)
		}
		return nil
	})
	n.Until("the jump in quarantine", func() error {
		if _, text, _ := n.Canaryd("status"); !strings.Contains(text, "quarantined: ipv4 nat: rule "+attack) {
			return fmt.Errorf("status says\n%s", text)
		}
		return nil
	})
	d.Stop()
}

// store changes the generation of the stored state.
func store(n *nodetest.Node, change func(rules.Generation)) {
	n.Helper()
	var about struct{ Identity reload.Identity }
	text, err := os.ReadFile("/run/state/state.json")
	n.Must(err)
	n.Must(json.Unmarshal(text, &about))
	s, err := reload.OpenStore("/run/state", about.Identity)
	n.Must(err)
	state, stored, err := s.LoadState()
	n.Must(err)
	change(stored.Generation)
	n.Must(s.Save(stored))
	n.Must(s.SaveState(state))
}
