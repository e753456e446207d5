package native_test

import (
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestRequestFullSync: the request adds a chain that cannot be deleted before the element that
// leads to it, at one genid only. A table without services gets neither.
func TestRequestFullSync(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		family         tableid.Family
		address, named string
		element        string
	}{
		{tableid.IPv4, "ipv4_addr", "10.96.0.1", "0.0.0.0 . tcp . 443 : goto canaryd/full-sync"},
		{tableid.IPv6, "ipv6_addr", "fd00::1", ":: . tcp . 443 : goto canaryd/full-sync"},
	} {
		t.Run(test.family.NFT(), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				table := "table " + test.family.NFT() + " kube-proxy { chain service-A/web { }; map service-ips { type " + test.address +
					" . inet_proto . inet_service : verdict; elements = { " + test.named + " . tcp . 443 : goto service-A/web }; }; }"
				nstest.CommandInput(t, table, "nft", "-f", "-")
				k := openKernel(t)
				seen, err := k.Capture(everything)
				if err != nil {
					t.Fatal(err)
				}
				now := seen.Tables[test.family.Table("kube-proxy")]
				if err := k.RequestFullSync(seen.Genid-1, now); !errors.Is(err, nft.ErrStale) {
					t.Errorf("at an old genid: %v", err)
				}
				if err := k.RequestFullSync(seen.Genid, now); err != nil {
					t.Fatal(err)
				}
				if text := nstest.Command(t, "nft", "list", "ruleset"); !strings.Contains(text, test.element) {
					t.Errorf("want the element %q in\n%s", test.element, text)
				}
				remove := func(args ...string) error {
					return exec.CommandContext(t.Context(), "nft", append([]string{"delete"}, args...)...).Run()
				}
				if err := remove("chain", test.family.NFT(), "kube-proxy", native.SyncChain); err == nil {
					t.Error("the chain can be deleted while the element leads there")
				}
				key, _, _ := strings.Cut(test.element, " :")
				if err := errors.Join(remove("element", test.family.NFT(), "kube-proxy", "service-ips", "{ "+key+" }"),
					remove("chain", test.family.NFT(), "kube-proxy", native.SyncChain)); err != nil {
					t.Errorf("the element and then the chain: %v", err)
				}
				now.Sets[0].Elements = nil
				if err := k.RequestFullSync(seen.Genid, now); err == nil || !strings.Contains(err.Error(), "it has no services") {
					t.Errorf("without a service: %v", err)
				}
			})
		})
	}
}
