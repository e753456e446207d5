package native_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestAllStanding: native tables are listed by family and name, without the tables of iptables and
// canaryd.
func TestAllStanding(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		want := func(want ...native.Standing) {
			t.Helper()
			got, err := native.AllStanding(protect.MayProtectTable)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("native tables (-want +got):\n%s", diff)
			}
		}
		want()
		nstest.Command(t, "iptables-nft", "-t", "nat", "-N", "KUBE-SERVICES")
		nstest.Command(t, "nft", "add table ip canaryd-witness")
		want()
		for _, name := range []string{"ip kube-proxy", "ip6 kube-proxy", "inet filter", "bridge nat"} {
			nstest.Command(t, "nft", "add table "+name)
		}
		want(native.Standing{ID: tableid.Bridge.Table("nat")}, native.Standing{ID: tableid.Inet.Table("filter")},
			native.Standing{ID: tableid.IPv4.Table("kube-proxy")}, native.Standing{ID: tableid.IPv6.Table("kube-proxy")})
	})
}
