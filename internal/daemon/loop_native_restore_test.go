package daemon

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// restoredRow returns a reply's row of kube-proxy's table.
func restoredRow(outcome api.Outcome, detail string) []api.NativeRestored {
	return []api.NativeRestored{{Family: "ip", Table: "ip kube-proxy", Chains: 2, Rules: 3, Outcome: outcome, Detail: detail}}
}

// restoreNatively requests a restore and compares the reply's rows of native tables.
func (r *rig) restoreNatively(dry bool, want []api.NativeRestored) {
	r.t.Helper()
	reply, err := r.d.Restore(r.t.Context(), api.RestoreRequest{DryRun: dry})
	must(r.t, err)
	if d := cmp.Diff(want, reply.Native); d != "" {
		r.t.Errorf("native tables, a dry run %t (-want +got):\n%s", dry, d)
	}
	if want != nil && !dry && reply.Proved() != (want[0].Outcome == reload.Proved) {
		r.t.Errorf("the reply is called proved: %t, with %v", reply.Proved(), want[0].Outcome)
	}
}

// TestNativeRestore: an operator requests tables that canaryd does not restore by itself.
// canaryd writes them once, and the record ends proved. A dry run only lists them.
func TestNativeRestore(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(r *rig, k *fakeNative)
		want []api.NativeRestored
		kind string
	}{
		{"nothing is lost", func(*rig, *fakeNative) {}, nil, ""},
		{"deleted alone", func(_ *rig, k *fakeNative) { k.deleteTable(proxyTable) }, restoredRow(reload.Proved, ""), "deleted_by_owner_or_unknown"},
		{"dormant", func(_ *rig, k *fakeNative) { k.dormant(proxyTable, true) }, restoredRow(reload.Proved, ""), "disabled"},
		{"a pause", func(r *rig, k *fakeNative) {
			_, err := r.d.Pause(r.t.Context(), api.PauseRequest{Seconds: 3600})
			must(r.t, err)
			k.flushTable(proxyTable)
		}, restoredRow(reload.Proved, ""), "emptied"},
	} {
		t.Run(test.name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				test.do(r, k)
				r.settled()
				preview := restoredRow("", "")
				if test.want == nil {
					preview = nil
				}
				r.restoreNatively(true, preview)
				if k.count().heals != 0 {
					t.Error("a dry run wrote")
				}
				r.restoreNatively(false, test.want)
				r.restoreNatively(false, nil)
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
				k.wantNative(t, tableOf(dockerTable, "c"))
				_, err := r.d.Resume(t.Context())
				must(t, err)
				r.settled()
				r.wantReady()
				if test.kind == "" {
					return
				}
				r.wantOneFlush(test.kind, reload.Proved)
				if k.count().heals != 1 {
					t.Errorf("%d replays", k.count().heals)
				}
				k.flushRuleset() // the restored table is guarded as before
				r.settled()
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
			})
		})
	}
}

// TestNativeRestoreObserved: a restore writes in observe mode too.
func TestNativeRestoreObserved(t *testing.T) {
	nativeNode(t, setup{mode: api.Observe}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() { delete(k.tables, dockerTable) })
		k.flushTable(proxyTable)
		r.settled()
		r.wantNotReady("ip kube-proxy is emptied")
		r.restoreNatively(false, restoredRow(reload.Proved, ""))
		r.settled()
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		r.wantOneFlush("emptied", reload.Proved)
	})
}

// TestNativeRestoreFails: a restore does not undo an owner's change, reports the kernel's
// refusal, and is no success without a proof.
func TestNativeRestoreFails(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.dormant(proxyTable, true)
		k.commit(false, func(deed func(id tableid.TableID) *native.Deed, _ *native.Commit) {
			next := *k.tables[proxyTable]
			next.Chains = append(next.Chains[:1:1], native.Chain{Name: "services", Rules: []native.Rule{ruleOf("newer")}})
			k.tables[proxyTable] = &next
			deed(proxyTable).New, deed(proxyTable).Rules = 1, map[string]int{"services": 2}
		})
		r.settled()
		r.wantNotReady("ip kube-proxy is disabled")
		r.restoreNatively(false, restoredRow(reload.Failed, nativestore.ErrOwnersNewer.Error()))

		k.again(tableOf(proxyTable, "a", "b"))
		r.settled()
		r.wantReady()
		k.deleteTable(proxyTable)
		r.settled()
		k.with(func() { k.refuses[proxyTable] = true })
		r.restoreNatively(false, restoredRow(reload.Failed, "the kernel refused table ipv4 kube-proxy: file exists"))
		r.wantNotReady("ip kube-proxy is deleted_by_owner_or_unknown")
		k.with(func() { clear(k.refuses) })
		k.breakDown(errNativeBroken)
		r.restoreNatively(false, []api.NativeRestored{{Table: "native tables", Outcome: reload.Failed, Detail: errNativeBroken.Error()}})
		k.breakDown(nil)
		k.with(func() { k.stale = 2 })
		r.restoreNatively(false, restoredRow(reload.Proved, ""))
		r.wantReady()
	})
}

// TestNativeRestoreStored: a restore without a daemon writes the stored tables.
func TestNativeRestoreStored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, test := range []struct {
			name string
			do   func(k *fakeNative)
			want []api.NativeRestored
			// verdict is the verdict of a check before the restore.
			verdict canary.Verdict
		}{
			{"nothing is lost", func(*fakeNative) {}, nil, canary.Intact},
			{"flush ruleset", (*fakeNative).flushRuleset, restoredRow(reload.Proved, ""), "table_deleted"},
			{"deleted alone", func(k *fakeNative) { k.deleteTable(proxyTable) }, restoredRow(reload.Proved, ""), "deleted_by_owner_or_unknown"},
			{"flush table", func(k *fakeNative) { k.flushTable(proxyTable) }, restoredRow(reload.Proved, ""), "emptied"},
			{"its owner wrote another", func(k *fakeNative) { k.again(tableOf(proxyTable, "z")) }, nil, "changed"},
		} {
			k, store := newFakeNative(tableOf(proxyTable, "a", "b")), nativestore.New(t.TempDir(), nativestore.Identity{})
			r := start(t, iptables.NFT, setup{guarded: k, nativeStore: store})
			time.Sleep(time.Minute)
			r.stop()
			test.do(k)
			all := func(tableid.TableID) bool { return true }
			verdicts, _, err := store.CheckStored(k, all)
			must(t, err)
			if len(verdicts) != 1 || verdicts[0].Verdict != test.verdict || verdicts[0].Rules != 3 {
				t.Errorf("%s: a check says %+v, want %s", test.name, verdicts, test.verdict)
			}
			for _, dry := range []bool{true, false} {
				got, err := store.RestoreStored(k, all, dry, nil)
				must(t, err)
				want := test.want
				if dry && want != nil {
					want = restoredRow("", "")
				}
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("%s, a dry run %t (-want +got):\n%s", test.name, dry, d)
				}
				if dry && k.count().heals != 0 {
					t.Errorf("%s: a dry run wrote", test.name)
				}
			}
			if test.want != nil {
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
			}
		}
	})
}

// TestNativeRestoredAloneThenDeleted: while no canaryd runs, the ruleset is flushed, an
// operator restores a table, and its owner deletes it for good. The next start does not confuse
// that with the flush. It restores another table that the flush took.
func TestNativeRestoredAloneThenDeleted(t *testing.T) {
	all := func(tableid.TableID) bool { return true }
	for _, test := range []struct {
		name    string
		restore func(r *rig, k *fakeNative, store *nativestore.Store, generation string) []api.NativeRestored
	}{
		{"a generation", func(r *rig, k *fakeNative, store *nativestore.Store, generation string) []api.NativeRestored {
			reply, _, err := store.RestoreGeneration(r.t.Context(), k, all, api.RestoreRequest{Generation: generation}, nil)
			must(r.t, err)
			return reply.Native
		}},
		{"what is lost", func(r *rig, k *fakeNative, store *nativestore.Store, _ string) []api.NativeRestored {
			rows, err := store.RestoreStored(k, func(id tableid.TableID) bool { return id == proxyTable }, false, nil)
			must(r.t, err)
			return rows
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			storedNode(t, func(t *testing.T, r *rig, k *fakeNative, store *nativestore.Store) {
				generation := r.present(proxyTable)
				r.stop()
				k.flushRuleset()
				if d := cmp.Diff(restoredRow(reload.Proved, ""), test.restore(r, k, store, generation)); d != "" {
					t.Errorf("the reply (-want +got):\n%s", d)
				}
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
				k.deleteTable(proxyTable)
				k.Hear(0)
				next := run(t, loadedFake(t, iptables.NFT), setup{guarded: k, nativeStore: store})
				next.settled()
				if k.standing(proxyTable) != nil {
					t.Error("the table that its owner deleted is back")
				}
				next.wantNativeAwaiting("ip kube-proxy")
				k.wantNative(t, tableOf(dockerTable, "c"))
			})
		})
	}
}
