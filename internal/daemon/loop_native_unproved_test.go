package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// An unproved is an event between the write of a generation and its proof.
type unproved struct {
	name string
	do   func(k *fakeNative)
	want api.NativeRestored
	now  *native.Table // in force from then on
}

func unproveds() []unproved {
	row := restoredRow(reload.Failed, "")[0]
	saying := func(detail string) api.NativeRestored {
		said := row
		said.Detail = detail
		return said
	}
	old, newer := tableOf(proxyTable, "a", "b"), tableOf(proxyTable, "newer")
	return []unproved{
		{"the read after it is interrupted", func(k *fakeNative) { k.with(func() { k.brokenReads = nft.ErrInterrupted }) },
			saying("it was written, and whether it is in force is unknown: " + nft.ErrInterrupted.Error()), old},
		{"its owner writes", func(k *fakeNative) { k.sync(newer) }, saying("ip kube-proxy: " + nativestore.ErrOwnerWrote.Error()), newer},
	}
}

// agreed returns a request for a generation, with the agreement to the changes of a dry run.
func (r *rig) agreed(generation string) api.RestoreRequest {
	r.t.Helper()
	dry, err := r.d.Restore(r.t.Context(), api.RestoreRequest{Generation: generation, DryRun: true})
	must(r.t, err)
	return api.RestoreRequest{Generation: generation, Agreed: dry.Agreement()}
}

// TestNativeGenerationUnproved: the kernel takes a requested generation, and no read proves it.
// The removals are recorded, and canaryd reads and guards the present table.
func TestNativeGenerationUnproved(t *testing.T) {
	hears := unproved{"the notifications cannot be read", func(k *fakeNative) { k.with(func() { k.brokenHears = errNativeBroken }) },
		restoredRow(reload.Proved, "")[0], tableOf(proxyTable, "a", "b")}
	for _, test := range append(unproveds(), hears) {
		for _, known := range []bool{true, false} {
			name := test.name
			if !known {
				name += ", and the table did not stand"
			}
			t.Run(name, func(t *testing.T) {
				storedNode(t, func(t *testing.T, r *rig, k *fakeNative, _ *nativestore.Store) {
					first := r.present(proxyTable)
					k.sync(tableOf(proxyTable, "z"))
					if !known {
						k.deleteTable(proxyTable)
					}
					r.after(10 * time.Second)
					if !known {
						_, err := r.d.Dismiss(t.Context())
						must(t, err)
						r.after(10 * time.Second)
					}
					request := r.agreed(first)
					k.with(func() { k.between = func() { test.do(k) } })
					reply, err := r.d.Restore(t.Context(), request)
					must(t, err)
					if d := cmp.Diff([]api.NativeRestored{test.want}, reply.Native); d != "" {
						t.Errorf("the reply (-want +got):\n%s", d)
					}
					k.with(func() { k.brokenReads, k.brokenHears = nil, nil })
					r.settled()
					r.wantReady()
					if d := cmp.Diff(nativestore.IDOf(test.now.Digest()), r.present(proxyTable)); d != "" {
						t.Errorf("the generation that is guarded (-want +got):\n%s", d)
					}
					var removed []api.Flush
					for _, f := range r.d.Status().Flushes {
						if f.Kind == api.Removed {
							removed = append(removed, f)
						}
					}
					if known && (len(removed) != 1 || removed[0].Lost.Rules != 1) || !known && len(removed) > 0 {
						t.Errorf("what was taken away is recorded as %+v", removed)
					}
					k.flushRuleset()
					r.settled()
					k.wantNative(t, test.now)
				})
			})
		}
	}
}

// TestNativeGenerationUnprovedAlone: without a daemon the removals are also in the journal.
func TestNativeGenerationUnprovedAlone(t *testing.T) {
	for _, test := range unproveds() {
		t.Run(test.name, func(t *testing.T) {
			storedNode(t, func(t *testing.T, r *rig, k *fakeNative, store *nativestore.Store) {
				first := r.present(proxyTable)
				k.sync(tableOf(proxyTable, "z"))
				r.after(10 * time.Second)
				request := r.agreed(first)
				r.stop()
				k.with(func() { k.between = func() { test.do(k) } })
				reply, _, err := store.RestoreGeneration(t.Context(), k, func(tableid.TableID) bool { return true }, request, nil)
				must(t, err)
				if d := cmp.Diff([]api.NativeRestored{test.want}, reply.Native); d != "" {
					t.Errorf("the reply (-want +got):\n%s", d)
				}
				text, err := os.ReadFile(filepath.Join(filepath.Dir(store.Path()), "journal.jsonl"))
				if err != nil || !strings.Contains(string(text), `"kind":"removed"`) {
					t.Errorf("the journal has\n%s%v", text, err)
				}
			})
		})
	}
}

// TestNativeRestoreUnprovedAlone: without a daemon the kernel takes a lost table, and no read
// proves it. The reply has the reason, and the stored state does not change.
func TestNativeRestoreUnprovedAlone(t *testing.T) {
	for _, test := range unproveds() {
		t.Run(test.name, func(t *testing.T) {
			storedNode(t, func(t *testing.T, r *rig, k *fakeNative, store *nativestore.Store) {
				r.stop()
				before, err := os.ReadFile(store.Path())
				must(t, err)
				k.flushRuleset()
				k.with(func() { k.between = func() { test.do(k) } })
				rows, err := store.RestoreStored(k, func(id tableid.TableID) bool { return id == proxyTable }, false, nil)
				must(t, err)
				if d := cmp.Diff([]api.NativeRestored{test.want}, rows); d != "" {
					t.Errorf("the reply (-want +got):\n%s", d)
				}
				after, err := os.ReadFile(store.Path())
				must(t, err)
				if d := cmp.Diff(string(before), string(after)); d != "" {
					t.Errorf("what is stored (-before +after):\n%s", d)
				}
			})
		})
	}
}
