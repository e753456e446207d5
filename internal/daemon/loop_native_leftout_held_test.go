package daemon

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// blocklist returns a table with a set of n addresses and these rules.
func blocklist(n int, rules ...string) *native.Table {
	t := tableOf(bigTable, rules...)
	t.Sets = []native.Set{{Name: "addresses"}}
	for i := range n {
		t.Sets[0].Elements = append(t.Sets[0].Elements, native.Element(fmt.Sprint("address ", i)))
	}
	return t
}

// fill adds n addresses to the set of that table.
func (k *fakeNative) fill(n int) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		next := *k.tables[bigTable]
		next.Sets = slices.Clone(next.Sets)
		next.Sets[0].Elements = slices.Concat(next.Sets[0].Elements, blocklist(n).Sets[0].Elements)
		k.tables[bigTable] = &next
		deed(bigTable).New = 1
	})
}

// TestNativeLeftOutWithQuarantine: a table has a rule in quarantine, and becomes too large. Log,
// status and record say that the rule waits. When the table fits again, canaryd puts the rule back,
// unless a commit took rules from its chain meanwhile, or made the table again.
func TestNativeLeftOutWithQuarantine(t *testing.T) {
	for _, test := range []struct {
		name    string
		do      func(k *fakeNative) // while it is left out
		restart bool
		given   bool // the rule is given up
	}{
		{"its owner writes other parts", func(k *fakeNative) { k.fill(5) }, false, false},
		{"canaryd is restarted", func(*fakeNative) {}, true, false},
		{"a rule of its chain is removed", func(k *fakeNative) {
			k.addRule(bigTable, "once more")
			k.removeRule(bigTable)
		}, false, true},
		{"the table is made again", func(k *fakeNative) { k.again(blocklist(60, "a", "c")) }, false, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			store := nativestore.New(t.TempDir(), nativestore.Identity{})
			k := newFakeNative(tableOf(proxyTable, "a", "b"), blocklist(1, "a", "refused", "c"))
			k.limit(50)
			nativeNode(t, setup{guarded: k, nativeStore: store}, func(t *testing.T, r *rig, k *fakeNative) {
				k.with(func() { k.refusesRule = "refused" })
				k.flushRuleset()
				r.after(time.Second)
				k.fill(60)
				r.after(3 * time.Second)
				s := r.d.Status()
				if s.Healthy || len(s.NativeLeftOut) != 1 || s.Native[0].Verdict != canary.Partial || s.Native[0].QuarantinedParts != 1 {
					t.Fatalf("%q, left out %v, the row is %+v", s.Headline, s.NativeLeftOut, s.Native[0])
				}
				r.wantLog("Parts in quarantine wait until their native table is not left out any more")
				if f := s.Flushes[0]; f.Outcome != reload.Partial || !strings.Contains(f.Detail, "inet big has parts in quarantine") {
					t.Errorf("the record is %s: %q", f.Outcome, f.Detail)
				}
				if test.restart {
					r.after(3 * time.Second)
					r.stop()
					r = run(t, loadedFake(t, iptables.NFT), setup{guarded: k, nativeStore: store})
				}
				test.do(k)
				r.after(3 * time.Second)
				k.flushSet(bigTable, "addresses")
				r.after(2 * nft.CountAgainAfter(0))
				if list := r.d.Status().NativeLeftOut; len(list) > 0 {
					t.Errorf("left out are %v", list)
				}
				k.with(func() { k.refusesRule = "" })
				r.after(time.Minute)
				r.wantReady()
				if test.given {
					k.wantNative(t, blocklist(0, "a", "c"))
					r.wantLog("Parts in quarantine are given up")
					if f := r.d.Status().Flushes[0]; f.Outcome != reload.Partial || !strings.Contains(f.Detail, "given up") {
						t.Errorf("the record is %s: %q", f.Outcome, f.Detail)
					}
					return
				}
				k.wantNative(t, blocklist(0, "a", "refused", "c"))
				if list := r.d.Status().Flushes; !test.restart && (list[0].Outcome != reload.Proved || list[0].Detail != "") {
					t.Errorf("the record is %s: %q", list[0].Outcome, list[0].Detail)
				}
			})
		})
	}
}
