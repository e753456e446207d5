package accepted_test

import (
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/accepted"
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An owner removes all rules of a chain. That is learned, and reported.
func ExampleList() {
	nat, now := rules.IPv4.Table(rules.Nat), time.Unix(1e9, 0)
	full := rules.Section{Chains: []rules.Chain{{Name: "KUBE-SERVICES"}}}
	for i := range 40 {
		spec := fmt.Sprintf("-d 10.0.0.%d/32 -j RETURN", i)
		full.Chains[0].Rules = append(full.Chains[0].Rules, rules.Rule{Spec: spec, Target: "RETURN"})
	}
	empty := rules.Section{Chains: []rules.Chain{{Name: "KUBE-SERVICES"}}}

	var list accepted.List
	list.Learn(nat, full, empty, culprit.Read{At: now}, reload.Learned{}, now)
	for _, removal := range list.Due(now) {
		fmt.Println(removal.Rules, "rules are gone")
	}
	// Output:
	// 40 rules are gone
}
