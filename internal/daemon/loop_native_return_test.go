package daemon

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// storedNode is nativeNode with a state folder that has the present generations.
func storedNode(t *testing.T, body func(t *testing.T, r *rig, k *fakeNative, store *nativestore.Store)) {
	t.Helper()
	store := nativestore.New(t.TempDir(), nativestore.Identity{BootID: "b", NetNS: "n", Release: "6.18"})
	nativeNode(t, setup{nativeStore: store}, func(t *testing.T, r *rig, k *fakeNative) {
		r.after(2 * time.Second)
		body(t, r, k, store)
	})
}

// present returns the ID of a table's present generation.
func (r *rig) present(id tableid.TableID) string {
	r.t.Helper()
	for _, t := range r.d.Status().Native {
		if t.Table == id.NFT() {
			return t.Generation
		}
	}
	r.t.Fatalf("%s is not in the status", id.NFT())
	return ""
}

// storedIDs returns the generations of a table on disk, the newest first.
func (r *rig) storedIDs(id tableid.TableID) (ids []string) {
	for _, g := range r.d.Status().NativeStored {
		if g.Table == id.NFT() {
			ids = append(ids, g.ID)
		}
	}
	return ids
}

// TestNativeGenerationRestored: each content of a table is a generation. An operator sees an
// older one and the changes that it would cause, and must agree to removals. canaryd then
// restores and guards it, changes no other table, and names the way back.
func TestNativeGenerationRestored(t *testing.T) {
	storedNode(t, func(t *testing.T, r *rig, k *fakeNative, _ *nativestore.Store) {
		first := r.present(proxyTable)
		k.sync(tableOf(proxyTable, "a", "c"))
		r.after(10 * time.Second)
		second := r.present(proxyTable)
		if d := cmp.Diff([]string{second, first}, r.storedIDs(proxyTable)); d != "" || first == second {
			t.Fatalf("stored generations (-want +got):\n%s", d)
		}
		text, err := r.d.Render(t.Context(), api.RenderRequest{Generation: first})
		must(t, err)
		if !strings.HasPrefix(text, "# generation "+first+" of table ip kube-proxy, learned ") || !strings.Contains(text, "\nchain services\n") {
			t.Errorf("it is rendered as\n%s", text)
		}

		dry, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: first, DryRun: true})
		must(t, err)
		if len(dry.Changes) != 1 || dry.Changes[0].Removes.Rules != 1 || dry.Changes[0].Adds.Rules != 1 || len(dry.Changes[0].Lines) != 2 || k.count().heals != 0 {
			t.Errorf("a dry run says %+v, after %d writes", dry, k.count().heals)
		}
		reply, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: first})
		must(t, err)
		if reply.Refused == "" || reply.Proved() || k.count().heals != 0 {
			t.Errorf("without an agreement: %+v", reply)
		}
		k.sync(tableOf(proxyTable, "a", "c", "d")) // agreed to the content before
		reply, err = r.d.Restore(t.Context(), api.RestoreRequest{Generation: first, Agreed: dry.Agreement()})
		must(t, err)
		if reply.Refused == "" || k.count().heals != 0 {
			t.Errorf("with an agreement to another content: %+v", reply)
		}
		third := tableOf(proxyTable, "a", "c", "d")
		dry, err = r.d.Restore(t.Context(), api.RestoreRequest{Generation: first, DryRun: true})
		must(t, err)
		reply, err = r.d.Restore(t.Context(), api.RestoreRequest{Generation: first, Agreed: dry.Agreement()})
		must(t, err)
		if !reply.Proved() || reply.Undo != nativestore.IDOf(third.Digest()) {
			t.Errorf("the reply is %+v, want proved, and %s as the way back", reply, nativestore.IDOf(third.Digest()))
		}
		r.wantLog(`"Restored on request" generation="` + first + `" table="ip kube-proxy" detail="" undo="` + reply.Undo + `"`)
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		k.wantNative(t, tableOf(dockerTable, "c"))
		r.settled()
		r.wantReady()
		if f := r.wantOneFlush(string(api.Removed), api.Requested); r.present(proxyTable) != first || f.Lost.Rules != 2 {
			t.Errorf("the generation is %s, want %s, with the record %+v", r.present(proxyTable), first, f)
		}
		k.flushRuleset()
		r.settled()
		k.wantNative(t, tableOf(proxyTable, "a", "b"))

		dry, err = r.d.Restore(t.Context(), api.RestoreRequest{Generation: reply.Undo, DryRun: true})
		must(t, err)
		_, err = r.d.Restore(t.Context(), api.RestoreRequest{Generation: reply.Undo, Agreed: dry.Agreement()})
		must(t, err)
		k.wantNative(t, third)
		r.wantReady()
	})
}

// TestNativeGenerationOfALostTable: an older generation also restores a deleted table, whether
// an operator has accepted its loss or not. The table's record ends.
func TestNativeGenerationOfALostTable(t *testing.T) {
	for name, do := range map[string]func(r *rig, k *fakeNative){
		"deleted alone": func(_ *rig, k *fakeNative) { k.deleteTable(proxyTable) },
		"deleted, and an operator accepted it": func(r *rig, k *fakeNative) {
			k.deleteTable(proxyTable)
			r.settled()
			_, err := r.d.Dismiss(r.t.Context())
			must(r.t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			storedNode(t, func(t *testing.T, r *rig, k *fakeNative, _ *nativestore.Store) {
				id := r.present(proxyTable)
				do(r, k)
				r.settled()
				reply, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: id})
				must(t, err)
				if !reply.Proved() || reply.Undo != "" {
					t.Errorf("the reply is %+v", reply)
				}
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
				r.settled()
				r.wantReady()
				if f := r.d.Status().Flushes; len(f) != 1 || f[0].Outcome == api.AwaitingDecision {
					t.Errorf("the records are %+v", f)
				}
				k.flushRuleset()
				r.settled()
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
			})
		})
	}
}

// TestNativeGenerationRefused: canaryd does not restore a generation of another machine, or a
// table that the kernel refuses. Each answer has the reason.
func TestNativeGenerationRefused(t *testing.T) {
	storedNode(t, func(t *testing.T, r *rig, k *fakeNative, store *nativestore.Store) {
		id := r.present(proxyTable)
		k.sync(tableOf(proxyTable, "z"))
		r.after(10 * time.Second)
		dry, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: id, DryRun: true})
		must(t, err)
		agreed := api.RestoreRequest{Generation: id, Agreed: dry.Agreement()}

		elsewhere := store.Identity
		store.Identity.Release = "6.19"
		if _, err := r.d.Restore(t.Context(), agreed); err == nil || !strings.Contains(err.Error(), `kernel "6.18", here "6.19"`) {
			t.Errorf("of another kernel: %v", err)
		}
		if text, err := r.d.Render(t.Context(), api.RenderRequest{Generation: id}); err != nil || !strings.Contains(text, "# canaryd does not restore it here: ") {
			t.Errorf("of another kernel it is rendered as\n%s%v", text, err)
		}
		store.Identity = elsewhere

		k.with(func() { k.refuses[proxyTable] = true })
		reply, err := r.d.Restore(t.Context(), agreed)
		must(t, err)
		if reply.Proved() || !strings.Contains(reply.Native[0].Detail, "the kernel refused") {
			t.Errorf("refused by the kernel: %+v", reply)
		}
		k.wantNative(t, tableOf(proxyTable, "z"))
		k.with(func() { clear(k.refuses); k.stale = 2 })
		if reply, err = r.d.Restore(t.Context(), agreed); err != nil || !reply.Proved() {
			t.Errorf("written by another process meanwhile: %+v, %v", reply, err)
		}
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		if _, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: "0123456789ab"}); !errors.Is(err, api.ErrNoGeneration) {
			t.Errorf("no such generation: %v", err)
		}
	})
}

// TestNativeGenerationsKept: canaryd keeps five generations of each table, the present one
// included. It refuses a changed file, and the other generations remain usable.
func TestNativeGenerationsKept(t *testing.T) {
	storedNode(t, func(t *testing.T, r *rig, k *fakeNative, store *nativestore.Store) {
		var ids []string
		for _, rule := range []string{"1", "2", "3", "4", "5", "6", "7"} {
			k.sync(tableOf(proxyTable, rule))
			r.after(time.Minute)
			ids = append(ids, r.present(proxyTable))
		}
		slices.Reverse(ids)
		if d := cmp.Diff(ids[:5], r.storedIDs(proxyTable)); d != "" {
			t.Errorf("stored generations (-want +got):\n%s", d)
		}
		if n := len(r.storedIDs(dockerTable)); n != 1 {
			t.Errorf("%d generations of the other table", n)
		}
		text, err := os.ReadFile(filepath.Join(filepath.Dir(store.Path()), "native", ids[1]+".json"))
		must(t, err)
		must(t, os.WriteFile(filepath.Join(filepath.Dir(store.Path()), "native", ids[1]+".json"), []byte(strings.Replace(string(text), `"Name":"services"`, `"Name":"servicez"`, 1)), 0o600))
		if _, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: ids[1]}); err == nil || !strings.Contains(err.Error(), "corrupt") {
			t.Errorf("a generation that was tampered with: %v", err)
		}
		r.stop() // the end writes the file once more
		must(t, os.Remove(filepath.Join(filepath.Dir(store.Path()), "native", ids[0]+".json")))
		if _, err := store.Load(); !errors.Is(err, reload.ErrNothingStored) {
			t.Errorf("the present generation is gone: %v", err)
		}
	})
}

// TestNativeGenerationRestoredAlone: an operator restores an older generation without a daemon.
// The next start takes it as the present one.
func TestNativeGenerationRestoredAlone(t *testing.T) {
	storedNode(t, func(t *testing.T, r *rig, k *fakeNative, store *nativestore.Store) {
		first := r.present(proxyTable)
		k.sync(tableOf(proxyTable, "c"))
		r.after(10 * time.Second)
		r.stop()
		all := func(tableid.TableID) bool { return true }
		dry, found, err := store.RestoreGeneration(t.Context(), k, all, api.RestoreRequest{Generation: first, DryRun: true}, nil)
		if must(t, err); !found || k.count().heals != 0 {
			t.Fatalf("found %t, and written %d times", found, k.count().heals)
		}
		reply, _, err := store.RestoreGeneration(t.Context(), k, all, api.RestoreRequest{Generation: first, Agreed: dry.Agreement()}, nil)
		if must(t, err); !reply.Proved() || reply.Undo == "" {
			t.Errorf("the reply is %+v", reply)
		}
		kept, err := os.ReadFile(filepath.Join(filepath.Dir(store.Path()), "journal.jsonl"))
		if must(t, err); !strings.Contains(string(kept), `"about":"requested: ip kube-proxy removed; by `) {
			t.Errorf("the journal has\n%s", kept)
		}
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		k.flushRuleset()
		k.Hear(0)
		next := run(t, loadedFake(t, iptables.NFT), setup{guarded: k, nativeStore: store})
		next.settled()
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		k.wantNative(t, tableOf(dockerTable, "c"))
		next.wantReady()
		none := func(tableid.TableID) bool { return false }
		if _, _, err := store.RestoreGeneration(t.Context(), k, none, api.RestoreRequest{Generation: first}, nil); !errors.Is(err, nativestore.ErrNotProtected) {
			t.Errorf("a table that is not protected: %v", err)
		}
	})
}

// TestNativeGenerationWithoutItsDevices: canaryd restores a generation without devices that the
// node lacks. That is not proved, and canaryd guards the table as it is now.
func TestNativeGenerationWithoutItsDevices(t *testing.T) {
	ways := map[string]func(r *rig, k *fakeNative, store *nativestore.Store, asked api.RestoreRequest) (api.RestoreReply, error){
		"with a daemon": func(r *rig, _ *fakeNative, _ *nativestore.Store, asked api.RestoreRequest) (api.RestoreReply, error) {
			return r.d.Restore(r.t.Context(), asked)
		},
		"without one": func(r *rig, k *fakeNative, store *nativestore.Store, asked api.RestoreRequest) (api.RestoreReply, error) {
			r.stop()
			reply, _, err := store.RestoreGeneration(r.t.Context(), k, func(tableid.TableID) bool { return true }, asked, nil)
			return reply, err
		},
	}
	for name, restored := range ways {
		t.Run(name, func(t *testing.T) {
			storedNode(t, func(t *testing.T, r *rig, k *fakeNative, store *nativestore.Store) {
				first := r.present(proxyTable)
				k.sync(tableOf(proxyTable, "a", "b", "c"))
				r.after(10 * time.Second)
				dry, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: first, DryRun: true})
				must(t, err)
				k.with(func() { k.lacking = []string{"eth9"} })
				reply, err := restored(r, k, store, api.RestoreRequest{Generation: first, Agreed: dry.Agreement()})
				must(t, err)
				want := nativestore.Outcome(tableOf(proxyTable, "a", "b"), reload.Partial, nativestore.DevicesLeft([]string{"eth9"}))
				if d := cmp.Diff([]api.NativeRestored{want}, reply.Native); d != "" || reply.Proved() || reply.Undo == "" {
					t.Errorf("%+v (-want +got):\n%s", reply, d)
				}
				if name == "without one" {
					r = run(t, loadedFake(t, iptables.NFT), setup{guarded: k, nativeStore: store})
				}
				r.settled()
				r.wantReady()
				stands := k.standing(proxyTable)
				k.flushRuleset()
				r.settled()
				k.wantNative(t, stands)
			})
		})
	}
}
