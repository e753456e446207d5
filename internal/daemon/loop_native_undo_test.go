package daemon

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestNativeUndoNotKept: the present content cannot be kept for an undo. A restore that would
// remove rules writes nothing; a restore that only adds rules says that it has no way back.
func TestNativeUndoNotKept(t *testing.T) {
	for _, test := range []struct {
		name     string
		stands   *native.Table
		refused  string
		outcomes map[string]api.Outcome
		detail   string
	}{
		{name: "rules would go", stands: tableOf(proxyTable, "z"), refused: "so nothing was written; make room in "},
		{name: "rules only come", stands: tableOf(proxyTable, "a"), outcomes: map[string]api.Outcome{"ip kube-proxy": reload.Proved},
			detail: "the previous content could not be kept, so there is no undo: "},
	} {
		t.Run(test.name, func(t *testing.T) {
			storedNode(t, func(t *testing.T, r *rig, k *fakeNative, store *nativestore.Store) {
				first := r.present(proxyTable)
				k.sync(test.stands)
				must(t, os.MkdirAll(filepath.Join(filepath.Dir(store.Path()), "native", nativestore.IDOf(test.stands.Digest())+".json/in/the/way"), 0o700))
				reply, err := r.d.Restore(t.Context(), r.agreed(first))
				if test.refused != "" {
					if err == nil || !strings.Contains(err.Error(), test.refused) {
						t.Errorf("the answer is %+v, %v, want an error with %q", reply, err, test.refused)
					}
					k.wantNative(t, test.stands)
					return
				}
				must(t, err)
				got := map[string]api.Outcome{}
				for _, row := range reply.Native {
					got[row.Table] = row.Outcome
				}
				if d := cmp.Diff(test.outcomes, got); d != "" {
					t.Errorf("the reply (-want +got):\n%s", d)
				}
				if !strings.HasPrefix(reply.Native[0].Detail, test.detail) || reply.Undo != "" {
					t.Errorf("the reply is %+v", reply)
				}
				r.wantLog(test.detail)
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
			})
		})
	}
}

// TestNativeGenerationInForce: a restore of the present generation writes nothing, and canaryd
// does not count as its maker.
func TestNativeGenerationInForce(t *testing.T) {
	storedNode(t, func(t *testing.T, r *rig, k *fakeNative, _ *nativestore.Store) {
		first := r.present(proxyTable)
		reply, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: first})
		must(t, err)
		if reply.Native[0].Outcome != reload.Skipped || k.count().heals != 0 {
			t.Errorf("the reply is %+v, after %d writes", reply, k.count().heals)
		}
		if strings.Contains(r.log.String(), "Restored on request") {
			t.Error("the log says that it was restored")
		}
		k.again(tableOf(proxyTable, "a", "b")) // the same content, stored once more
		r.after(10 * time.Minute)
		for _, g := range r.d.Status().NativeStored {
			if g.ID == first && g.Made != reload.MadeAtStart {
				t.Errorf("it is called %s", g.Made)
			}
		}
	})
}

// TestNativeStoreForgets: the index names only the tables that are guarded now. A glob may
// match ever new names, and a content that was kept for an undo is no longer in force.
func TestNativeStoreForgets(t *testing.T) {
	storedNode(t, func(t *testing.T, r *rig, k *fakeNative, store *nativestore.Store) {
		first := r.present(proxyTable)
		for _, name := range []string{"a", "b", "c"} {
			k.again(tableOf(tableid.IPv4.Table(name), name))
			r.after(time.Minute)
			k.deleteTable(tableid.IPv4.Table(name))
			r.settled()
			_, err := r.d.Dismiss(t.Context())
			must(t, err)
			r.after(10 * time.Minute)
		}
		k.sync(tableOf(proxyTable, "z"))
		request := r.agreed(first)
		k.with(func() { k.refuses[proxyTable] = true })
		_, err := r.d.Restore(t.Context(), request) // keeps the undo, and writes nothing
		must(t, err)
		r.stop()
		var named []string
		stored, err := store.Load()
		must(t, err)
		for _, row := range stored.Tables {
			named = append(named, row.Generation.Name)
		}
		slices.Sort(named)
		if d := cmp.Diff([]string{dockerTable.NFT(), proxyTable.NFT()}, named); d != "" {
			t.Errorf("the tables that the index names (-want +got):\n%s", d)
		}
	})
}

// TestNativeOldNotRemoved: old generations cannot be removed. The log says that, and not that
// the present ones are not on disk.
func TestNativeOldNotRemoved(t *testing.T) {
	storedNode(t, func(t *testing.T, r *rig, k *fakeNative, store *nativestore.Store) {
		must(t, os.MkdirAll(filepath.Join(filepath.Join(filepath.Dir(store.Path()), "native"), ".7"+private.Unfinished, "in the way"), 0o700))
		k.sync(tableOf(proxyTable, "z"))
		r.after(10 * time.Minute)
		if strings.Contains(r.log.String(), "is not on disk") {
			t.Error("the log says that the native tables are not on disk")
		}
		if n := strings.Count(r.log.String(), "Old generations of native tables could not be removed"); n != 1 {
			t.Errorf("the log says %d times that old generations could not be removed", n)
		}
	})
}
