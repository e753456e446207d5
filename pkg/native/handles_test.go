package native_test

import (
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// smallLibvirt has its rules at handles that the tests know.
const smallLibvirt = `table ip libvirt_network {
	chain forward { type filter hook forward priority 0; counter jump guest_input; }
	chain guest_nat { type nat hook postrouting priority srcnat; ip saddr 192.168.122.0/24 counter masquerade; }
	chain guest_input { oif "lo" counter accept; }
}`

func listed(t *testing.T) string {
	t.Helper()
	return tableHandle.ReplaceAllString(nstest.Command(t, "nft", "-s", "-a", "list", "ruleset"), "$1")
}

// TestHandlesComeBack: a program that remembers handles must find the same objects after a replay.
// The tables are the corpus, kube-proxy's, and a table with inserted and deleted rules.
func TestHandlesComeBack(t *testing.T) {
	t.Parallel()
	text := services(t, services100)
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		t.Run("the corpus", func(t *testing.T) {
			loadCorpus(t)
			withHandles(t, conn)
		})
		for name, scripts := range map[string][]string{
			"kube-proxy": {text},
			"libvirt": {smallLibvirt, "insert rule ip libvirt_network forward counter accept", "insert rule ip libvirt_network guest_input tcp dport { 1, 2 } accept",
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

// withHandles flushes and replays all tables, and wants the same handles.
func withHandles(t *testing.T, conn *nft.Conn) {
	t.Helper()
	before, was := listedTables(t, "-s", "-a"), capture(t, conn)
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
	if diff := cmp.Diff(before, listedTables(t, "-s", "-a")); diff != "" {
		t.Errorf("nft lists (-before +after):\n%.4000s", diff)
	}
	sameRaw(t, was, capture(t, conn))
}

// TestHandlesFarApart: a table that lived long must not be put back by thousands of extra rules.
func TestHandlesFarApart(t *testing.T) {
	table := &native.Table{Chains: []native.Chain{{Name: "c", Handle: 1 << 40}}}
	if _, err := table.CreateWithHandles(nft.NewBatch(), native.Options{}); !errors.Is(err, native.ErrHandles) {
		t.Errorf("got %v", err)
	}
}

// TestOwnersHandles: libvirt deletes a rule by the handle that the kernel gave it. After each kind
// of repair it must hit the same rule, even if other rules were deleted before.
func TestOwnersHandles(t *testing.T) {
	for _, test := range []struct {
		name   string
		flush  string
		remedy native.Remedy
	}{
		{"nft flush ruleset", "flush ruleset", native.ByCreate},
		{"nft flush table", "flush table ip libvirt_network", native.ByRefill},
		{"an old copy", "flush ruleset\n" + smallLibvirt, native.ByReplace},
	} {
		t.Run(test.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				k := openKernel(t)
				nstest.CommandInput(t, smallLibvirt, "nft", "-f", "-")
				for _, change := range []string{"insert rule ip libvirt_network guest_input counter drop", "delete rule ip libvirt_network guest_input handle 7",
					"add rule ip libvirt_network guest_nat ip saddr 10.9.0.0/16 counter masquerade"} {
					nstest.CommandInput(t, change, "nft", "-f", "-")
				}
				before, was := listed(t), capture(t, dial(t))
				handle := regexp.MustCompile(`10\.9\.0\.0/16 .* # handle (\d+)`).FindStringSubmatch(before)
				if len(handle) != 2 {
					t.Fatalf("no handle of the rule in\n%s", before)
				}
				nstest.CommandInput(t, test.flush, "nft", "-f", "-")
				now := capture(t, dial(t))
				id := tableid.IPv4.Table("libvirt_network")
				repair := native.Repair{Remedy: test.remedy, Want: was.Tables[id], Now: now.Tables[id]}
				if _, err := k.Write(now.Genid, []native.Repair{repair}, nil); err != nil {
					t.Fatal(err)
				}
				if stands := capture(t, dial(t)).Tables[id]; !repair.Repaired(stands, false) {
					t.Error("the repair is not proved")
				}
				if diff := cmp.Diff(before, listed(t)); diff != "" {
					t.Errorf("nft lists (-before +after):\n%s", diff)
				}
				nstest.Command(t, "nft", "delete", "rule", "ip", "libvirt_network", "guest_nat", "handle", handle[1])
				if after := listed(t); strings.Contains(after, "10.9.0.0") || strings.Count(after, "counter") != strings.Count(before, "counter")-1 {
					t.Errorf("another rule is gone:\n%s", after)
				}
			})
		})
	}
}

// TestOwnersNewerWord: an owner that remembers handles writes a rule after a flush. The repair must
// not delete that rule.
func TestOwnersNewerWord(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		k := openKernel(t)
		nstest.CommandInput(t, smallLibvirt, "nft", "-f", "-")
		was := capture(t, dial(t))
		nstest.CommandInput(t, "flush table ip libvirt_network\nadd rule ip libvirt_network guest_nat counter return", "nft", "-f", "-")
		now := capture(t, dial(t))
		id := tableid.IPv4.Table("libvirt_network")
		if _, err := k.Write(now.Genid, []native.Repair{{Remedy: native.ByRefill, Want: was.Tables[id], Now: now.Tables[id]}}, nil); err != nil {
			t.Fatal(err)
		}
		after := listed(t)
		if _, chain, _ := strings.Cut(after, "chain guest_nat"); !strings.Contains(strings.SplitN(chain, "}", 2)[0], "return") || !strings.Contains(after, "jump guest_input") {
			t.Errorf("nft lists\n%s", after)
		}
	})
}
