package canary_test

import (
	"fmt"
	"strings"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// intact is a learned table with its marks: a canary and two witnesses with the same nonce.
const intact = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-CANARYD-CANARY - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A PREROUTING -m comment --comment "canaryd-witness:0123456789abcdef"
-A OUTPUT -j KUBE-SERVICES
-A OUTPUT -m comment --comment "canaryd-witness:0123456789abcdef"
-A KUBE-CANARYD-CANARY -m comment --comment "canaryd-canary:0123456789abcdef"
-A KUBE-SERVICES -d 10.96.0.1/32 -j DNAT --to-destination 10.1.0.1
-A KUBE-SERVICES -d 10.96.0.2/32 -j DNAT --to-destination 10.1.0.2
COMMIT
`

// Judge compares the wanted content of a table with the content that a read saw.
func ExampleJudge() {
	selector, err := protect.NewSelector([]string{"kube"})
	if err != nil {
		panic(err)
	}
	see := func(saved string) canary.Seen {
		tables, err := savefile.Parse(saved)
		if err != nil {
			return canary.Seen{Err: err}
		}
		nat := tables[rules.Nat]
		return canary.Seen{Table: nat, Section: selector.Protection().Extract(nat, canary.IsMark)}
	}
	section := see(intact).Section
	wanted := canary.Wanted{
		CanaryChain: canary.DefaultChain,
		Mark:        canary.Mark{Nonce: "0123456789abcdef", Witnessed: section.JumpChains(rules.Nat)},
		Section:     section,
	}
	without := func(part string) string { // intact without the lines that contain part
		var left strings.Builder
		for line := range strings.Lines(intact) {
			if !strings.Contains(line, part) {
				left.WriteString(line)
			}
		}
		return left.String()
	}
	for _, what := range []struct{ done, left string }{
		{"nothing", intact},
		{"iptables -t nat -F", without("-A ")},
		{"iptables -t nat -F OUTPUT", without("-A OUTPUT")},
		{"nft delete table ip nat", ""},
		{"a rule was deleted by its owner", without("10.96.0.2")},
		{"a torn read", "*nat\n"},
	} {
		finding := canary.Judge(wanted, see(what.left))
		fmt.Printf("%s: %s, a loss: %t\n", what.done, finding.Verdict, finding.Verdict.Loss())
	}
	// Output:
	// nothing: intact, a loss: false
	// iptables -t nat -F: emptied, a loss: true
	// iptables -t nat -F OUTPUT: jumps_missing, a loss: true
	// nft delete table ip nat: table_deleted, a loss: true
	// a rule was deleted by its owner: changed, a loss: false
	// a torn read: unknown, a loss: false
}
