package baseline_test

import (
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Rules that appeared since the operator confirmed the generation are reported.
func ExampleKnown() {
	nat := rules.IPv4.Table(rules.Nat)
	rule := func(spec string) rules.Rule { return rules.Rule{Spec: spec, Target: "RETURN"} }
	chain := func(list ...rules.Rule) rules.Generation {
		return rules.Generation{nat: {Chains: []rules.Chain{{Name: "KUBE-SERVICES", Rules: list}}}}
	}
	confirmed := chain(rule("-d 10.0.0.1/32 -j RETURN"))
	now := chain(rule("-d 10.0.0.1/32 -j RETURN"), rule("-d 10.0.0.2/32 -j RETURN"))

	known := baseline.Of(reload.Baseline{Generation: confirmed, Confirmed: time.Unix(1e9, 0)}, nil)
	known.Compare(1, &baseline.Content{Generation: now})
	public := known.Public()
	fmt.Println(public.AppearedRules, "rule appeared,", public.GoneRules, "are gone")
	// Output:
	// 1 rule appeared, 0 are gone
}
