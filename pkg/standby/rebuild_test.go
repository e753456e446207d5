package standby_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/standby"
)

// affinityTable returns a native table with many chains, and a set to which packets add elements.
func affinityTable(priority string, clients int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "table ip kube-proxy\ndelete table ip kube-proxy\ntable ip kube-proxy {\n")
	var elements []string
	for n := range clients {
		elements = append(elements, fmt.Sprintf("10.9.%d.%d timeout 1h", n/250, n%250))
	}
	fmt.Fprintf(&b, "set affinity { type ipv4_addr; size 65535; flags dynamic,timeout; timeout 1h; elements = { %s } }\n", strings.Join(elements, ", "))
	for n := range 300 {
		fmt.Fprintf(&b, "chain service-%d { ip daddr 10.2.0.1 update @affinity { ip saddr } dnat to 10.3.0.1; }\n", n)
	}
	fmt.Fprintf(&b, "chain nat { type nat hook prerouting priority %s;\n", priority)
	for n := range 300 {
		fmt.Fprintf(&b, "ip daddr 10.2.%d.1 jump service-%d\n", n/250, n)
	}
	b.WriteString("}\n}\n")
	return b.String()
}

// TestClientsOfASetAreNoChange: packets add elements to a set. The set must keep its size in the
// copy, so that more clients do not cause a new copy.
func TestClientsOfASetAreNoChange(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn, s := dial(t), open(t, standby.Config{})
		for _, clients := range []int{10, 600, 2100, 10} {
			nstest.CommandInput(t, affinityTable("dstnat", clients), "nft", "-f", "-")
			table := captured(t, conn, kubeProxy)
			c, err := standby.TranslateNative(table, s.Held(kubeProxy))
			must(t, err)
			if s.Held(kubeProxy) != nil {
				if n := c.Outstanding(s.Held(kubeProxy)); n != 0 {
					t.Errorf("with %d clients %d parts are outstanding", clients, n)
				}
			}
			must(t, s.Put(c))
			if got := listed(t, kubeProxy); !strings.Contains(got, "size 1024") {
				t.Errorf("with %d clients the set has another room:\n%s", clients, got)
			}
		}
	})
}

// TestANativeTableIsBuiltAgainInSteps: a difference cannot be written. One step must remove the
// table, and the next steps must build it as before.
func TestANativeTableIsBuiltAgainInSteps(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn, s := dial(t), open(t, standby.Config{Piece: 4096})
		steps := func(priority string) (n int) {
			t.Helper()
			nstest.CommandInput(t, affinityTable(priority, 10), "nft", "-f", "-")
			table := captured(t, conn, kubeProxy)
			c, err := standby.TranslateNative(table, s.Held(kubeProxy))
			must(t, err)
			for more := true; more; n++ {
				more, err = s.PutPiece(c)
				must(t, err)
				if more == s.Status(kubeProxy).Built {
					t.Fatalf("step %d: more is to be done: %t, the table is built: %t", n, more, !more)
				}
			}
			return n
		}
		first := steps("dstnat")
		if first < 4 {
			t.Fatalf("it was built in %d steps", first)
		}
		if diff := cmp.Diff(first+1, steps("dstnat - 5")); diff != "" {
			t.Errorf("steps of building it again (-want +got):\n%s", diff)
		}
		if got := listed(t, kubeProxy); !strings.Contains(got, "dstnat - 4") {
			t.Errorf("the copy is not the last table:\n%s", got)
		}
	})
}
