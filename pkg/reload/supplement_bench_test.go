package reload

import (
	"fmt"
	"testing"

	"github.com/canaryd/canaryd/pkg/rules"
)

// BenchmarkSupplement measures the time for one quarantined rule at each look. The tables have more
// and more chains, or one chain with more and more rules. The time grows little with their number.
func BenchmarkSupplement(b *testing.B) {
	supplement := func(b *testing.B, chains, each int) {
		var want, seen rules.Section
		var list []QuarantinedRule
		for i := range chains {
			c := rules.Chain{Name: fmt.Sprintf("KUBE-SVC-%016d", i)}
			for k := range each {
				r := rule(fmt.Sprintf("-s 10.%d.%d.%d/32 -j ACCEPT", i/256, k/256, k%256))
				if c.Rules = append(c.Rules, r); 4*k >= each {
					list = append(list, QuarantinedRule{Chain: c.Name, Rule: r, Waits: 4*k > each})
				}
			}
			want.Chains = append(want.Chains, c)
			seen.Chains = append(seen.Chains, rules.Chain{Name: c.Name, Rules: c.Rules[:(each+3)/4]})
		}
		q := Quarantine{v4.Table(rules.Nat): list}
		for b.Loop() {
			if _, still := q.Supplement(v4, rules.Nat, want, seen, nil); still.Count() != len(list) {
				b.Fatalf("%d of %d rules are still in quarantine", still.Count(), len(list))
			}
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(list)), "ns/rule")
	}
	for _, n := range []int{250, 1000, 4000, 16000} {
		b.Run(fmt.Sprintf("chains=%d", n), func(b *testing.B) { supplement(b, n, 4) })
		b.Run(fmt.Sprintf("rules=%d", n), func(b *testing.B) { supplement(b, 1, n) })
	}
}
