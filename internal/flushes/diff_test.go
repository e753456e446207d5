package flushes

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

func ruleList(specs ...string) []rules.Rule {
	var list []rules.Rule
	for _, s := range specs {
		r, err := rules.ParseRule(s)
		if err != nil {
			panic(err)
		}
		list = append(list, r)
	}
	return list
}

// TestDiff: a diff has the words of iptables-save, with the lost rules and the rules in their
// place.
func TestDiff(t *testing.T) {
	a, b := "-d 10.0.0.1/32 -j KUBE-MARK-MASQ", `-m comment --comment "two words" -j RETURN`
	for _, test := range []struct {
		name string
		lost reload.Lost
		want []string
	}{
		{"nothing", reload.Lost{}, []string{}},
		{"a jump", reload.Lost{Jumps: []rules.Jump{{Chain: "OUTPUT", Rule: ruleList("-j KUBE-SERVICES")[0]}}}, []string{"--A OUTPUT -j KUBE-SERVICES"}},
		{
			"a chain that was deleted", reload.Lost{Chains: []reload.LostChain{{Name: "KUBE-X", Was: ruleList(a, b)}}},
			[]string{"-:KUBE-X - [0:0]", "--A KUBE-X " + a, "--A KUBE-X " + b},
		},
		{"a chain that was emptied", reload.Lost{Chains: []reload.LostChain{{Name: "KUBE-X", Was: ruleList(a), Stands: true}}}, []string{"--A KUBE-X " + a}},
		{
			"a rule in the place of another", reload.Lost{Chains: []reload.LostChain{{Name: "KUBE-X", Was: ruleList(b, a, b), Is: ruleList(b, "-j DROP", b), Stands: true}}},
			[]string{"--A KUBE-X " + a, "+-A KUBE-X -j DROP"},
		},
		{
			"one of two alike", reload.Lost{Chains: []reload.LostChain{{Name: "KUBE-X", Was: ruleList(b, b), Is: ruleList(b), Stands: true}}},
			[]string{"--A KUBE-X " + b},
		},
		{
			"another spelling is no difference",
			reload.Lost{Chains: []reload.LostChain{{Name: "KUBE-X", Was: ruleList("-d 10.0.0.1 -j KUBE-MARK-MASQ", b), Is: ruleList(a), Stands: true}}},
			[]string{"--A KUBE-X " + b},
		},
		{
			"another order", reload.Lost{Chains: []reload.LostChain{{Name: "KUBE-X", Was: ruleList(a, b), Is: ruleList(b, a), Stands: true}}},
			[]string{"--A KUBE-X " + a, "--A KUBE-X " + b, "+-A KUBE-X " + b, "+-A KUBE-X " + a},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			left := DiffRoom()
			got := DiffOf(rules.IPv4.Table(rules.Nat), test.lost, &left)
			if diff := cmp.Diff(api.TableDiff{Family: rules.IPv4, Table: rules.Nat, Lines: test.want}, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestDiffIsBounded: six tables of 16,000 chains each fill at most the room, and the rest is
// counted.
func TestDiffIsBounded(t *testing.T) {
	const chains = 2000
	long := "-m comment --comment " + strings.Repeat("c", 250) + " -j RETURN"
	for name, spec := range map[string]string{"short": "-j RETURN", "long": long} {
		t.Run(name, func(t *testing.T) {
			var lost reload.Lost
			for i := range chains {
				lost.Chains = append(lost.Chains, reload.LostChain{Name: fmt.Sprintf("KUBE-%d", i), Was: ruleList(spec, spec)})
			}
			left := DiffRoom()
			lines, size, more := 0, 0, 0
			for i := range 6 {
				d := DiffOf(rules.IPv4.Table(rules.Nat), lost, &left)
				lines, more = lines+len(d.Lines), more+d.More
				for _, line := range d.Lines {
					size += len(line)
				}
				if i < 2 && len(d.Lines) == 0 {
					t.Errorf("table %d has nothing", i+1)
				}
			}
			if lines > 500 || size > 64<<10 || lines+more != 6*3*chains {
				t.Errorf("%d lines, %d bytes, %d more; want %d lines and more", lines, size, more, 6*3*chains)
			}
		})
	}
}
