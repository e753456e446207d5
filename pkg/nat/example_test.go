package nat_test

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Take two flows through the nat rules of a generation. Rules of native tables would be one more
// argument of New.
func ExampleNew() {
	declared, err := rules.ParseFragment(strings.NewReader(`*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m udp --dport 53 -j KUBE-SVC-A
-A KUBE-SVC-A -m statistic --mode random --probability 0.5 -j DNAT --to-destination 10.244.1.2:53
-A KUBE-SVC-A -p udp -j DNAT --to-destination 10.244.1.3:53
COMMIT
`), rules.IPv4, rules.Nat)
	if err != nil {
		panic(err)
	}
	generation := rules.Generation{rules.IPv4.Table(rules.Nat): declared.Sections[rules.Nat]}
	translations := nat.New(someSite{}, generation.NatHooks(rules.IPv4))
	for _, to := range []string{"10.96.0.10:53", "10.96.0.10:54"} {
		flow := nat.Flow{Protocol: nat.UDP, Source: netip.MustParseAddrPort("10.244.1.9:4000"), Destination: netip.MustParseAddrPort(to)}
		fmt.Println(to, translations.Translates(flow))
	}
	// Output:
	// 10.96.0.10:53 true
	// 10.96.0.10:54 false
}
