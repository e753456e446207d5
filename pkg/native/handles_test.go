package native_test

import (
	"errors"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
)

// tableHandles are those that a table made again cannot have: the kernel never gives one twice.
var tableHandles = regexp.MustCompile(`(?m)^(table .*) # handle \d+$`)

func listed(t *testing.T) string {
	t.Helper()
	return tableHandles.ReplaceAllString(nstest.Command(t, "nft", "-s", "-a", "list", "ruleset"), "$1")
}

// TestHandlesComeBack: what remembers handles finds what it remembers, in every table of the
// corpus, in kube-proxy's, and where rules were inserted and deleted.
func TestHandlesComeBack(t *testing.T) {
	files, err := filepath.Glob("testdata/corpus/*.nft")
	if err != nil {
		t.Fatal(err)
	}
	text := services(t, "testdata/services-100.nft.gz")
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		for _, file := range files {
			t.Run(strings.TrimSuffix(filepath.Base(file), ".nft"), func(t *testing.T) {
				nstest.Command(t, "nft", "flush", "ruleset")
				if loads(t, file) {
					withHandles(t, conn)
				}
			})
		}
		for name, scripts := range map[string][]string{
			"kube-proxy": {text},
			"libvirt": {libvirt, "insert rule ip libvirt_network forward counter accept", "insert rule ip libvirt_network guest_input tcp dport { 1, 2 } accept",
				"delete rule ip libvirt_network forward handle 4", "add rule ip libvirt_network forward counter drop", "add chain ip libvirt_network gone",
				"delete chain ip libvirt_network gone", "insert rule ip libvirt_network forward position 7 counter return"},
		} {
			t.Run(name, func(t *testing.T) {
				nstest.Command(t, "nft", "flush", "ruleset")
				for _, script := range scripts {
					nstest.CommandInput(t, script, "nft", "-f", "-")
				}
				withHandles(t, conn)
			})
		}
	})
}

// withHandles flushes and replays what stands, and wants the same handles.
func withHandles(t *testing.T, conn *nft.Conn) {
	t.Helper()
	before, was := listed(t), capture(t, conn)
	nstest.Command(t, "nft", "flush", "ruleset")
	b := nft.NewBatch()
	for _, table := range was.InOrder() {
		if _, err := table.CreateWithHandles(b, native.Options{Age: time.Since(was.At)}); err != nil {
			t.Fatal(err)
		}
	}
	b.Finish()
	if err := b.Send(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, listed(t)); diff != "" {
		t.Errorf("nft lists (-before +after):\n%.4000s", diff)
	}
	sameRaw(t, was, capture(t, conn))
}

// TestHandlesFarApart: a table that lived long is not put back by way of thousands of rules.
func TestHandlesFarApart(t *testing.T) {
	table := &native.Table{Chains: []native.Chain{{Name: "c", Handle: 1 << 40}}}
	if _, err := table.CreateWithHandles(nft.NewBatch(), native.Options{}); !errors.Is(err, native.ErrHandles) {
		t.Errorf("got %v", err)
	}
}
