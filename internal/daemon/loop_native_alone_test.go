package daemon

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

func everyTable(tableid.TableID) bool { return true }

// TestNativeStoredImmune: while no canaryd runs, a process becomes the owner of a stored table.
// That table is intact, and the others are restored.
func TestNativeStoredImmune(t *testing.T) {
	storedNode(t, func(t *testing.T, r *rig, k *fakeNative, store *nativestore.Store) {
		r.stop()
		k.flushRuleset()
		owned := tableOf(dockerTable, "o")
		owned.Owner = 77
		k.with(func() { k.owners[dockerTable] = 77 })
		k.again(owned)
		rows, err := store.RestoreStored(k, everyTable, false, nil)
		must(t, err)
		if d := cmp.Diff(restoredRow(reload.Proved, ""), rows); d != "" {
			t.Errorf("the reply (-want +got):\n%s", d)
		}
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		k.wantNative(t, owned)
		checked, _, err := store.CheckStored(k, everyTable)
		must(t, err)
		for _, row := range checked {
			if row.Verdict != "intact" || row.Immune != (row.Table == "ip docker-bridges") {
				t.Errorf("a check says %+v", row)
			}
		}
	})
}

// TestNativeStoredUnknown: canaryd cannot compare the stored tables with the kernel. It reports
// no table as intact or restored.
func TestNativeStoredUnknown(t *testing.T) {
	none := func(tableid.TableID) bool { return false }
	for _, test := range []struct {
		name     string
		noKernel bool
		identity func(*nativestore.Identity)
		protects func(tableid.TableID) bool
		want     string // the error, or ""
	}{
		{"the kernel has no nf_tables", true, func(*nativestore.Identity) {}, everyTable, nativestore.ErrNoNFTables.Error()},
		{"nor is any table protected", true, func(*nativestore.Identity) {}, none, ""},
		{"another boot", false, func(i *nativestore.Identity) { i.BootID = "later" }, everyTable, `boot "b", here "later"`},
		{"another network namespace", false, func(i *nativestore.Identity) { i.NetNS = "m" }, everyTable, `network namespace "n", here "m"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			storedNode(t, func(t *testing.T, r *rig, k *fakeNative, store *nativestore.Store) {
				generation := r.present(proxyTable)
				r.stop()
				k.flushRuleset()
				test.identity(&store.Identity)
				var kernel NativeKernel = k
				if test.noKernel {
					kernel = nil
				}
				says := func(what string, rows int, err error) {
					t.Helper()
					if rows != 0 || test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
						t.Errorf("%s: %d rows and the error %v, want none and %q", what, rows, err, test.want)
					}
				}
				checked, _, err := store.CheckStored(kernel, test.protects)
				says("a check", len(checked), err)
				restored, err := store.RestoreStored(kernel, test.protects, false, nil)
				says("a restore", len(restored), err)
				reply, found, err := store.RestoreGeneration(t.Context(), kernel, everyTable, api.RestoreRequest{Generation: generation}, nil)
				if test.want != "" {
					says("a restore of a generation", len(reply.Native), err)
				}
				if !found {
					t.Error("the generation is not found")
				}
				if k.count().heals != 0 {
					t.Error("something was written")
				}
			})
		})
	}
}
