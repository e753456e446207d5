package iptables

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestNativeTables: tables of nftables' own are named by family and name, and neither
// iptables' nor ours are among them, whichever backend is guarded.
func TestNativeTables(t *testing.T) {
	for _, backend := range []Backend{NFT, Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				kernel, err := Open(t.Context(), Config{Backend: backend})
				if err != nil {
					t.Fatal(err)
				}
				defer kernel.Close()
				want := func(names ...string) {
					t.Helper()
					got, err := kernel.NativeTables(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					if diff := cmp.Diff(names, got); diff != "" {
						t.Errorf("native tables (-want +got):\n%s", diff)
					}
				}
				want()
				mustKeep(t, kernel.Keeper(), rules.IPv4, rules.IPv6)
				nstest.Command(t, "iptables-nft", "-t", "nat", "-N", "KUBE-SERVICES")
				want()
				for _, name := range []string{"ip kube-proxy", "ip6 kube-proxy", "inet filter", "bridge nat"} {
					nstest.Command(t, "nft", "add table "+name)
				}
				want("bridge nat", "inet filter", "ip kube-proxy", "ip6 kube-proxy")
			})
		})
	}
}
