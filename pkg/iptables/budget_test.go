package iptables

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// nat returns places in table nat and their weights: "KUBE-A=30" has 30 rules of
// usual length, "KUBE-A=30x4" rules four times as long.
func nat(chains ...string) map[Place]nft.Weight {
	all := map[Place]nft.Weight{}
	for _, text := range chains {
		name, rest, _ := strings.Cut(text, "=")
		var count int
		factor := 1
		if n, _ := fmt.Sscanf(rest, "%dx%d", &count, &factor); n == 0 {
			panic(text)
		}
		all[Place{Table: rules.Nat, Chain: name}] = nft.Weight{Rules: count, Bytes: count * factor * 768}
	}
	return all
}

func TestWhichChainsAreLeftOut(t *testing.T) {
	protects := func(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }
	for _, tc := range []struct {
		name  string
		steps [][]string // the weights of all chains, read by read
		want  []string   // the chains left out after each
	}{
		{"all fits", [][]string{{"KUBE-A=60", "KUBE-B=40"}}, []string{""}},
		{"the largest goes", [][]string{{"KUBE-A=60", "KUBE-B=41"}}, []string{"KUBE-A"}},
		{"of equal ones the first by name", [][]string{{"KUBE-B=51", "KUBE-A=51"}}, []string{"KUBE-A"}},
		{"one alone is too large", [][]string{{"KUBE-A=101", "KUBE-B=1", "OTHERS=1"}}, []string{"KUBE-A"}},
		{"rules of others go first", [][]string{{"KUBE-A=60", "OTHERS=41"}}, []string{"OTHERS"}},
		{"small ones of others do not cost a protected one", [][]string{{"KUBE-A=60", "OTHER-1=20", "OTHER-2=20", "OTHER-3=20"}}, []string{"OTHER-1"}},
		{"others come back if the large one was not theirs", [][]string{{"KUBE-A=200", "OTHER-1=20", "OTHER-2=20"}}, []string{"KUBE-A"}},
		{"nor if they fit only just", [][]string{{"KUBE-A=200", "OTHERS=90"}}, []string{"KUBE-A"}},
		{"our own chain is dear", [][]string{{"OURS=1", "OTHERS=50", "KUBE-A=60"}}, []string{"OTHERS"}},
		{"a built-in chain is dear", [][]string{{"OUTPUT=60", "OTHERS=41"}}, []string{"OTHERS"}},
		{"a built-in chain can be too large", [][]string{{"OUTPUT=101", "KUBE-A=41"}}, []string{"OUTPUT"}},
		{"long rules count for more", [][]string{{"KUBE-A=20x4", "KUBE-B=30"}}, []string{"KUBE-A"}},
		{"a small change makes nothing come or go",
			[][]string{{"KUBE-A=60", "KUBE-B=41"}, {"KUBE-A=59", "KUBE-B=41"}, {"KUBE-A=41", "KUBE-B=59"}, {"KUBE-A=40", "KUBE-B=36"}, {"KUBE-A=60", "KUBE-B=45"}},
			[]string{"KUBE-A", "KUBE-A", "KUBE-A", "KUBE-A", "KUBE-A"}},
		{"it comes back at three quarters", [][]string{{"KUBE-A=60", "KUBE-B=41"}, {"KUBE-A=34", "KUBE-B=41"}}, []string{"KUBE-A", ""}},
		{"of two the smaller comes back", [][]string{{"KUBE-A=90", "KUBE-B=80", "KUBE-C=30"}, {"KUBE-A=70", "KUBE-B=40", "KUBE-C=30"}},
			[]string{"KUBE-A KUBE-B", "KUBE-A"}},
		{"one that was emptied is not left out, however full it is", [][]string{{"KUBE-A=60", "KUBE-B=90"}, {"KUBE-A=99", "KUBE-B=0"}}, []string{"KUBE-B", ""}},
		{"one that is gone is not left out", [][]string{{"KUBE-A=101"}, {"KUBE-B=1"}}, []string{"KUBE-A", ""}},
		{"another grows", [][]string{{"KUBE-A=60", "KUBE-B=41"}, {"KUBE-A=60", "KUBE-B=101", "KUBE-C=5"}}, []string{"KUBE-A", "KUBE-B"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBudget(100, "OURS", protects)
			var got []string
			for _, step := range tc.steps {
				all := nat(step...)
				left, _ := b.Choose(all)
				var names []string
				kept := 0
				for p, w := range all {
					if _, is := left[p]; is {
						names = append(names, p.Chain)
					} else {
						kept += w.Units()
					}
				}
				if kept > 100 {
					t.Errorf("after %v %d units are kept", step, kept)
				}
				got = append(got, strings.Join(slices.Sorted(slices.Values(names)), " "))
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("left out (-want +got)\n%s", diff)
			}
		})
	}
}

func TestWithoutALimitNothingIsLeftOut(t *testing.T) {
	b := newBudget(0, "", nil)
	if out, _ := b.Choose(nat("KUBE-A=1000000")); out != nil || !b.Fits(1e6) {
		t.Errorf("left out: %v", out)
	}
}
