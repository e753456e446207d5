package daemon

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

var wordTable = tableid.Inet.Table("fw")

// wordNode is a node with a table that a word names, next to kube-proxy's.
func wordNode() *fakeNative {
	return newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(wordTable, "c"))
}

// TestNativePartLostUnheard: canaryd misses the commit that empties a base chain. It restores
// the chain if its owner never does that. Otherwise the loss waits for the owner, an operator
// or a flush, and the generation does not change meanwhile.
func TestNativePartLostUnheard(t *testing.T) {
	for _, test := range []struct {
		name  string
		table tableid.TableID
		then  func(r *rig, k *fakeNative)
		want  api.Outcome
		holds *native.Table
	}{
		{"kube-proxy's", proxyTable, nil, reload.Proved, tableOf(proxyTable, "a", "b")},
		{"restore", wordTable, func(r *rig, _ *fakeNative) {
			reply, err := r.d.Restore(r.t.Context(), api.RestoreRequest{})
			must(r.t, err)
			if len(reply.Native) != 1 || reply.Native[0].Outcome != reload.Proved {
				r.t.Errorf("the reply says %+v", reply.Native)
			}
		}, reload.Proved, tableOf(wordTable, "c", "newer")},
		{"dismiss", wordTable, func(r *rig, _ *fakeNative) {
			_, err := r.d.Dismiss(r.t.Context())
			must(r.t, err)
		}, api.Dismissed, nil},
		{"its owner writes it again", wordTable, func(_ *rig, k *fakeNative) { k.sync(tableOf(wordTable, "c", "newer")) }, reload.Skipped, tableOf(wordTable, "c", "newer")},
		{"a flush", wordTable, func(_ *rig, k *fakeNative) { k.flushRuleset() }, reload.Proved, tableOf(wordTable, "c")},
	} {
		t.Run(test.name, func(t *testing.T) {
			nativeNode(t, setup{guarded: wordNode()}, func(t *testing.T, r *rig, k *fakeNative) {
				k.missing(func() { k.flushChain(test.table, "prerouting") })
				r.settled()
				if test.then != nil {
					for range 2 { // the owner keeps writing, and canaryd misses nothing more
						r.wantNotReady("table inet fw is emptied")
						if f := r.wantOneFlush("emptied", api.AwaitingDecision); f.Lost.Rules != 1 {
							t.Errorf("the record says %+v", f)
						}
						if k.count().heals != 0 {
							t.Fatal("it was put back unasked")
						}
						k.addRule(wordTable, "newer")
						r.after(10 * time.Second)
					}
					k.removeRule(wordTable)
					r.settled()
					test.then(r, k)
				}
				r.settled()
				r.wantReady()
				for _, f := range r.d.Status().Flushes {
					if f.Outcome != test.want {
						t.Errorf("a record ends %s, want %s", f.Outcome, test.want)
					}
				}
				if test.holds != nil {
					k.wantNative(t, test.holds)
				} else if chain := k.standing(test.table).Chain("prerouting"); len(chain.Rules) != 0 {
					t.Error("what was dismissed is back")
				}
			})
		})
	}
}

// TestNativePartLostBetweenRuns: the same while canaryd is down, and over restarts.
func TestNativePartLostBetweenRuns(t *testing.T) {
	for _, test := range []struct {
		name  string
		table tableid.TableID
		down  time.Duration
		waits bool
	}{
		{"kube-proxy's", proxyTable, time.Minute, false},
		{"kube-proxy's, too long ago", proxyTable, time.Hour, true},
		{"a word's", wordTable, time.Minute, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := nativestore.New(t.TempDir(), nativestore.Identity{BootID: "b"})
				k := wordNode()
				r := start(t, iptables.NFT, setup{guarded: k, nativeStore: store})
				r.after(2 * time.Second)
				r.stop()
				k.flushChain(test.table, "prerouting")
				k.with(func() { k.unheard = nil })
				for range 2 {
					r.after(test.down)
					r = run(t, r.fake, setup{guarded: k, nativeStore: store})
					r.settled()
					if !test.waits {
						r.wantReady()
						k.wantNative(t, tableOf(test.table, "a", "b"))
						return
					}
					r.wantNotReady("table " + test.table.NFT() + " is emptied")
					k.addRule(test.table, "newer")
					r.after(10 * time.Second)
					r.wantNotReady("table " + test.table.NFT() + " is emptied")
					r.stop()
				}
				r.after(test.down)
				r = run(t, r.fake, setup{guarded: k, nativeStore: store})
				r.settled()
				if _, err := r.d.Restore(t.Context(), api.RestoreRequest{}); err != nil {
					t.Fatal(err)
				}
				r.settled()
				r.wantReady()
				if chain := k.standing(test.table).Chain("prerouting"); len(chain.Rules) != 1 {
					t.Error("the restore has not brought the chain back")
				}
			})
		})
	}
}
