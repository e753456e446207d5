package iptables

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// No way of reading a family puts the rules of a chain that is too large into the
// Snapshot or into memory. Everything else is read.
func TestAReadWithoutTheLargestChains(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		fill := func(chain string, n int) {
			var script strings.Builder
			fmt.Fprintf(&script, "*nat\n:%s - [0:0]\n", chain)
			for i := range n {
				fmt.Fprintf(&script, "-A %s -p tcp -m tcp --dport %d -j ACCEPT\n", chain, i+1)
			}
			script.WriteString("COMMIT\n")
			nstest.CommandInput(t, script.String(), program(backend, family, "-restore"), "--noflush")
		}
		fill("KUBE-LARGE", 300)
		fill("OTHERS", 60)
		fill("KUBE-SMALL", 20)
		iptablesCommand(t, backend, family, "-t nat -A KUBE-SMALL -j KUBE-LARGE")
		protects := func(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }
		k := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}, MaxRules: 100, Protects: protects})
		sees := func(want map[string]int, left ...LeftOut) {
			t.Helper()
			got := map[string]int{}
			for _, c := range mustRead(t, k, family).Tables[rules.Nat].Chains {
				if got[c.Name] = len(c.Rules); c.LeftOut() {
					got[c.Name] = -1
				}
			}
			maps.DeleteFunc(got, func(name string, n int) bool { return rules.Builtin(rules.Nat, name) && n == 0 })
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("rules by chain, -1 is left out (-want +got)\n%s", diff)
			}
			if diff := cmp.Diff(left, k.LeftOut()); diff != "" {
				t.Errorf("left out (-want +got)\n%s", diff)
			}
		}
		large := LeftOut{family, rules.Nat, "KUBE-LARGE", 300}
		sees(map[string]int{"KUBE-LARGE": -1, "KUBE-SMALL": 21, "OTHERS": 60}, large)
		sees(map[string]int{"KUBE-LARGE": -1, "KUBE-SMALL": 21, "OTHERS": 60}, large)

		// canaryd sees that an empty chain is empty, although all others fill the
		// limit by more than three quarters. Otherwise its flush would stay
		// unseen.
		iptablesCommand(t, backend, family, "-t nat -F KUBE-LARGE")
		sees(map[string]int{"KUBE-LARGE": 0, "KUBE-SMALL": 21, "OTHERS": 60})
		fill("KUBE-LARGE", 300)
		sees(map[string]int{"KUBE-LARGE": -1, "KUBE-SMALL": 21, "OTHERS": 60}, large)

		// It grew above the limit: canaryd forgets its rules.
		fill("KUBE-SMALL", 90)
		sees(map[string]int{"KUBE-LARGE": -1, "KUBE-SMALL": 90, "OTHERS": -1}, large)
		if n := k.knownTexts(family); n > 2*100 {
			t.Errorf("the texts of %d rules are known, and 100 may be kept", n)
		}
		fill("KUBE-LARGE", 30)
		fill("KUBE-SMALL", 5)
		sees(map[string]int{"KUBE-LARGE": 30, "KUBE-SMALL": 5, "OTHERS": -1})
		fill("OTHERS", 3)
		sees(map[string]int{"KUBE-LARGE": 30, "KUBE-SMALL": 5, "OTHERS": 3})
		iptablesCommand(t, backend, family, "-t nat -F KUBE-LARGE")
		sees(map[string]int{"KUBE-LARGE": 0, "KUBE-SMALL": 5, "OTHERS": 3})
	})
}

// knownTexts returns the number of a family's rules in its lexicon.
func (k *Kernel) knownTexts(family rules.Family) int {
	return len(k.source[family].entries)
}
