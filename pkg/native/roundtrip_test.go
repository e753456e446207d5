package native_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// TestKubeProxysTableComesBack: tables of 100 and of 1,000 services are flushed and replayed. They
// must be the same in nft's list, and byte by byte.
func TestKubeProxysTableComesBack(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../hack/bench/heal/testdata/services-1*.nft.gz")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		text := services(t, file)
		t.Run(strings.TrimSuffix(filepath.Base(file), ".nft.gz"), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				if len(text) > 100_000 { // the batch is larger than a user namespace may send
					nstest.NeedRoot(t)
				}
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
		})
	}
}
