package daemon

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/watch"
)

// twoLists returns a table with rules and two sets of 60 addresses. With a limit of 50 each set
// alone is too large.
func twoLists() *native.Table {
	t := blocklist(60, "a", "b", "c")
	t.Sets = append(t.Sets, native.Set{Name: "more", Elements: t.Sets[0].Elements})
	return t
}

// twoListsNode runs body on a node with that table, which is left out.
func twoListsNode(t *testing.T, store *nativestore.Store, body func(t *testing.T, r *rig, k *fakeNative)) {
	k := newFakeNative(tableOf(proxyTable, "a", "b"), twoLists())
	k.limit(50)
	nativeNode(t, setup{guarded: k, nativeStore: store}, func(t *testing.T, r *rig, k *fakeNative) {
		r.wantLeftOut("inet big")
		body(t, r, k)
	})
}

// rewrite has the owner write the rules of that table again, and keep its sets.
func (k *fakeNative) rewrite() {
	next := twoLists()
	k.with(func() { next.Sets = k.tables[bigTable].Sets })
	k.sync(next)
}

// wantPartsLost fails unless the table is lost in parts and still left out, and the record has
// these parts.
func (r *rig) wantPartsLost(parts ...string) {
	r.t.Helper()
	r.wantNotReady("table inet big is emptied")
	s := r.d.Status()
	if len(s.NativeLeftOut) != 1 || len(s.Flushes) == 0 {
		r.t.Fatalf("left out are %v, the records %+v", s.NativeLeftOut, s.Flushes)
	}
	f := s.Flushes[0]
	if f.Outcome != api.AwaitingDecision || f.Lost.Unread || len(f.Native) != 1 || strings.Join(f.Native[0].Parts, "; ") != strings.Join(parts, "; ") {
		r.t.Errorf("the record is %s of %+v", f.Outcome, f.Native)
	}
	for _, row := range s.Native {
		if row.Table == "inet big" && (row.Verdict != canary.Emptied || !row.LeftOut || !row.Awaiting || !strings.Contains(row.Why, "cannot put it back")) {
			r.t.Errorf("the row is %+v", row)
		}
	}
}

// TestNativeLeftOutLosesParts: a process takes parts of a table, and the rest is too large still.
// canaryd reports that, if it would have put such parts of a table that it reads back.
func TestNativeLeftOutLosesParts(t *testing.T) {
	chains := []string{"chain prerouting: 1 rule lost, empty", "chain services: 3 rules lost, empty"}
	another := func(do func(k *fakeNative)) func(k *fakeNative) {
		return func(k *fakeNative) {
			k.origin = watch.Origin{Unit: "nftables.service"}
			do(k)
			k.origin = watch.Origin{}
		}
	}
	set := func(k *fakeNative) { k.flushSet(bigTable, "more") }
	for _, test := range []struct {
		name string
		do   func(k *fakeNative)
		lost []string
	}{
		{"all rules, by an unknown process", func(k *fakeNative) { k.flushTable(bigTable) }, chains},
		{"all rules, and an unknown process adds an address", func(k *fakeNative) {
			k.flushTable(bigTable)
			k.fill(1)
		}, chains},
		{"all rules, and the owner writes them at once", func(k *fakeNative) {
			k.flushTable(bigTable)
			k.rewrite()
		}, nil},
		{"a set, by an unknown process", set, nil},
		{"a set, by another owner's unit", another(set), []string{"set more: 60 elements lost, empty"}},
		{"a chain, by another owner's unit", another(func(k *fakeNative) { k.flushChain(bigTable, "services") }), chains[1:]},
		{"a rule, by an unknown process", func(k *fakeNative) { k.removeRule(bigTable) }, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			twoListsNode(t, nil, func(t *testing.T, r *rig, k *fakeNative) {
				test.do(k)
				r.after(3 * time.Second)
				if test.lost == nil {
					r.wantLeftOut("inet big")
					if n := len(r.d.Status().Flushes); n > 0 {
						t.Errorf("%d records", n)
					}
					return
				}
				r.wantPartsLost(test.lost...)
				if by := r.d.Status().Flushes[0].Culprit; by.PID != 4242 {
					t.Errorf("the culprit is %+v", by)
				}
				if log := r.log.String(); strings.Contains(log, "owner changed") || !strings.Contains(log, "Rules were lost and are not put back unasked") {
					t.Errorf("the log says %s", log)
				}
			})
		})
	}
}

// TestNativeLeftOutHasPartsBack: such a loss lasts until the lost parts have rules or elements
// again, also after a restart, or until a person accepts it.
func TestNativeLeftOutHasPartsBack(t *testing.T) {
	for name, end := range map[string]func(r *rig, k *fakeNative){
		"its owner writes them": func(_ *rig, k *fakeNative) { k.rewrite() },
		"a person accepts it": func(r *rig, _ *fakeNative) {
			_, err := r.d.Dismiss(r.t.Context())
			must(r.t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			store := nativestore.New(t.TempDir(), nativestore.Identity{})
			twoListsNode(t, store, func(t *testing.T, r *rig, k *fakeNative) {
				k.flushTable(bigTable)
				r.after(3 * time.Second)
				lost := []string{"chain prerouting: 1 rule lost, empty", "chain services: 3 rules lost, empty"}
				for range 2 {
					r.wantPartsLost(lost...)
					k.fill(1)
					r.after(2 * nft.CountAgainAfter(0))
					r.wantPartsLost(lost...)
					reply, err := r.d.Restore(t.Context(), api.RestoreRequest{})
					must(t, err)
					if len(reply.Native) != 1 || !reply.Native[0].Unread || !strings.Contains(reply.Native[0].Detail, "--max-rules") {
						t.Errorf("the reply is %+v", reply.Native)
					}
					r.after(3 * time.Second)
					r.stop()
					r = run(t, loadedFake(t, iptables.NFT), setup{guarded: k, nativeStore: store})
					r.after(3 * time.Second)
				}
				r.wantPartsLost(lost...)
				end(r, k)
				r.after(3 * time.Second)
				r.wantLeftOut("inet big")
				r.stop()
				r = run(t, loadedFake(t, iptables.NFT), setup{guarded: k, nativeStore: store})
				r.after(3 * time.Second)
				r.wantLeftOut("inet big")
			})
		})
	}
}

// TestNativeLeftOutLosesMore: a table that waits loses another part. The loss lasts until both
// parts are back. A later loss gets a record of its own.
func TestNativeLeftOutLosesMore(t *testing.T) {
	twoListsNode(t, nil, func(t *testing.T, r *rig, k *fakeNative) {
		flush := func(unit string, do func()) {
			k.origin = watch.Origin{Unit: unit}
			do()
			k.origin = watch.Origin{}
			r.after(3 * time.Second)
		}
		chains := []string{"chain prerouting: 1 rule lost, empty", "chain services: 3 rules lost, empty"}
		set := "set more: 60 elements lost, empty"
		flush("nftables.service", func() { k.flushTable(bigTable) })
		r.wantPartsLost(chains...)
		flush("nftables.service", func() { k.flushSet(bigTable, "more") })
		r.wantPartsLost(chains...)
		r.wantLog("A native table that waits for a decision has lost more")
		r.wantLog(`parts=["` + set + `"]`)
		k.rewrite() // the rules only
		r.after(3 * time.Second)
		r.wantPartsLost(chains...)
		k.sync(twoLists())
		r.after(3 * time.Second)
		r.wantLeftOut("inet big")
		flush("nftables.service", func() { k.flushSet(bigTable, "more") })
		r.wantPartsLost(set)
		if n := len(r.d.Status().Flushes); n != 2 {
			t.Errorf("%d records", n)
		}
	})
}

// TestNativeLeftOutOfABusyOwner: its owner changes a table too often for a probe before each
// commit. The deeds until a flush do not displace the flush's.
func TestNativeLeftOutOfABusyOwner(t *testing.T) {
	twoListsNode(t, nil, func(t *testing.T, r *rig, k *fakeNative) {
		for range deedsKept - 2 {
			k.fill(1)
			r.after(time.Millisecond)
		}
		k.origin = watch.Origin{Unit: "nftables.service"}
		k.flushSet(bigTable, "more")
		r.after(time.Millisecond)
		k.origin = watch.Origin{}
		for range 10 {
			k.fill(1)
			r.after(time.Millisecond)
		}
		r.after(3 * time.Second)
		r.wantPartsLost("set more: 60 elements lost, empty")
	})
}

// TestNativeCannotBeProbed: the kernel does not answer a probe. The log says so, and the probe is
// made again.
func TestNativeCannotBeProbed(t *testing.T) {
	twoListsNode(t, nil, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() { k.brokenProbes = errors.New("no answer") })
		k.flushTable(bigTable)
		r.after(3 * time.Second)
		r.wantLog(tablesUnread)
		k.with(func() { k.brokenProbes = nil })
		r.after(3 * time.Second)
		r.wantPartsLost("chain prerouting: 1 rule lost, empty", "chain services: 3 rules lost, empty")
	})
}

// TestNativeLosesPartsAndGrows: a process takes all rules of a table, and makes it too large in the
// same moment. The loss is reported.
func TestNativeLosesPartsAndGrows(t *testing.T) {
	k := newFakeNative(tableOf(proxyTable, "a", "b"), blocklist(1, "a", "b", "c"))
	k.limit(50)
	nativeNode(t, setup{guarded: k}, func(t *testing.T, r *rig, k *fakeNative) {
		k.flushTable(bigTable)
		k.fill(60)
		r.after(3 * time.Second)
		r.wantNotReady("table inet big is emptied")
		k.sync(blocklist(60, "a", "b", "c"))
		r.after(3 * time.Second)
		r.wantLeftOut("inet big")
	})
}

// TestNativeProbesAreFew: a process removes a rule of a table that is left out, again and again.
// canaryd probes the table now and then, and not at each commit.
func TestNativeProbesAreFew(t *testing.T) {
	twoListsNode(t, nil, func(t *testing.T, r *rig, k *fakeNative) {
		for range 2000 {
			k.addRule(bigTable, "d")
			k.removeRule(bigTable)
			r.after(10 * time.Millisecond)
		}
		n := 0
		k.with(func() { n = k.probes })
		if n < 5 || n > 100 {
			t.Errorf("%d looks in 20 s", n)
		}
		r.wantLeftOut("inet big")
	})
}
