package rules_test

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// FuzzParseFragment checks that an accepted fragment can be restored, touches no chain of
// others, and has the same meaning when it is written again.
func FuzzParseFragment(f *testing.F) {
	f.Add(fragment)
	f.Add("*nat\n:A -\n-A A \"\"\nCOMMIT")
	f.Add("*mangle\n:A -\n:B -\n-A A -g B\n-I PREROUTING -s 10/8 -j A\nCOMMIT\n*filter\nCOMMIT")
	f.Add("*nat\n:A - [1:2]\n[3:4] -A A -m comment --comment \"-t \\\" nat\" -j DNAT --to-destination 10.0.0.1:80\nCOMMIT")
	f.Fuzz(func(t *testing.T, text string) {
		got, err := rules.ParseFragment(strings.NewReader(text), rules.IPv4, protect.Tables()...)
		if err != nil {
			return
		}
		g := rules.Generation{}
		tableid.Put(g, rules.IPv4, got.Sections)
		if err := rules.Validate(g); err != nil {
			t.Fatal(err)
		}
		for table, s := range got.Sections {
			for _, h := range s.Jumps {
				if _, found := s.Chain(h.Rule.Target); !found {
					t.Errorf("%s: a jump into a chain of others: %s", table, h)
				}
			}
			for _, c := range s.Chains {
				if got.Lines[table][c.Name] == 0 {
					t.Errorf("%s: chain %s stands on no line", table, c.Name)
				}
			}
			// Jumps at the top are in the order of the chain, so -I must write them in reverse
			// order.
			var lines []string
			lines = append(lines, "*"+string(table))
			for _, c := range s.Chains {
				lines = append(lines, ":"+c.Name+" -")
				for _, r := range c.Rules {
					lines = append(lines, "-A "+c.Name+" "+r.Spec)
				}
			}
			for i := range s.Jumps {
				if h := s.Jumps[len(s.Jumps)-1-i]; h.Anchor.Position == rules.Top {
					lines = append(lines, "-I "+h.Chain+" "+h.Rule.Spec)
				}
				if h := s.Jumps[i]; h.Anchor.Position == rules.Bottom {
					lines = append(lines, h.String())
				}
			}
			again, err := rules.ParseFragment(strings.NewReader(strings.Join(append(lines, "COMMIT"), "\n")), rules.IPv4, protect.Tables()...)
			if err != nil {
				t.Fatalf("what was taken is refused when it is written again: %v", err)
			}
			if !again.Sections[table].Equal(s) {
				t.Errorf("written again it says\n%v\nnot\n%v", again.Sections[table], s)
			}
		}
	})
}
