package native_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// TestKubeProxysTableComesBack: a flushed table of 100 services is the same again, as nft lists it
// and byte by byte.
func TestKubeProxysTableComesBack(t *testing.T) {
	text := services(t, "testdata/services-100.nft.gz")
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, text, "nft", "-f", "-")
		conn := dial(t)
		before, was := nstest.Command(t, "nft", "-s", "list", "ruleset"), capture(t, conn)
		nstest.Command(t, "nft", "flush", "ruleset")
		b := replay(t, conn, was)
		t.Logf("%d messages in %v", b.Messages(), b.Took)
		if diff := cmp.Diff(before, nstest.Command(t, "nft", "-s", "list", "ruleset")); diff != "" {
			t.Errorf("nft lists (-before +after):\n%.4000s", diff)
		}
		sameRaw(t, was, capture(t, conn))
	})
}
