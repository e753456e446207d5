package nativestore

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// rowOf returns a table of that name as it is stored, with one chain.
func rowOf(name, chain string) Row {
	t := &native.Table{ID: tableid.IPv4.Table(name), Chains: []native.Chain{{Name: chain}}}
	return Row{Verdict: native.Intact, Generation: GenerationOf(t, t.Digest(), reload.MadeAtStart, time.Unix(7, 0), time.Hour)}
}

// TestKilledWhileSaving: canaryd is killed while it saves; everything that the older index
// names must still be there.
func TestKilledWhileSaving(t *testing.T) {
	store := New(t.TempDir(), Identity{})
	old, next := rowOf("kube-proxy", "a"), rowOf("kube-proxy", "b")
	must(t, store.Save(Stored{Tables: []Row{old}}))
	must(t, store.keep(next.Generation)) // and killed
	left := filepath.Join(store.folder(), ".7"+private.Unfinished)
	must(t, os.WriteFile(left, []byte("{"), 0o600))
	stored, err := New(filepath.Dir(store.Path()), Identity{}).Load()
	must(t, err)
	if d := cmp.Diff(old.Generation.Table, stored.Tables[0].Generation.Table); d != "" {
		t.Errorf("the table (-want +got):\n%s", d)
	}
	last := Stored{Tables: []Row{next}}
	must(t, store.Save(last))
	must(t, store.Prune(last))
	if _, err := os.Stat(left); err == nil {
		t.Error("what the killed process left is there still")
	}
}

// TestFilesHaveNoMore: fields that are only in memory must not be in a file.
func TestFilesHaveNoMore(t *testing.T) {
	store := New(t.TempDir(), Identity{BootID: "b"})
	row := rowOf("kube-proxy", "a")
	row.InForce, row.Generation.Foreign = "another", "another boot"
	must(t, store.Save(Stored{Tables: []Row{row}, Unread: []reload.Unread{{File: "x"}}}))
	keys := func(path string) (names []string) {
		text, err := os.ReadFile(path)
		must(t, err)
		var has map[string]json.RawMessage
		must(t, json.Unmarshal(text, &has))
		if tables := has["tables"]; tables != nil {
			var rows []map[string]json.RawMessage
			must(t, json.Unmarshal(tables, &rows))
			names = slices.Sorted(maps.Keys(rows[0]))
		}
		return append(names, slices.Sorted(maps.Keys(has))...)
	}
	if d := cmp.Diff([]string{"id", "table", "verdict", "confirmed", "format", "identity", "sum", "tables"}, keys(store.Path())); d != "" {
		t.Errorf("the index (-want +got):\n%s", d)
	}
	want := []string{"captured", "chains", "content", "digest", "elements", "family", "format", "id", "identity", "made", "read", "rules", "table"}
	if d := cmp.Diff(want, keys(store.file(row.Generation.ID))); d != "" {
		t.Errorf("a generation (-want +got):\n%s", d)
	}
}

// TestStoreForgets: the store remembers only the tables that its index names. It forgets tables
// that are no longer guarded, and generations that were kept for an undo.
func TestStoreForgets(t *testing.T) {
	store := New(t.TempDir(), Identity{})
	gone, named, undo := rowOf("gone", "a"), rowOf("kube-proxy", "a"), rowOf("kube-proxy", "z")
	must(t, store.Save(Stored{Tables: []Row{gone, named}}))
	must(t, store.Save(Stored{Tables: []Row{named}}))
	n := returning{store: store, uptime: func() time.Duration { return time.Hour }, want: named.Generation}
	id, err := n.keepForUndo(undo.Generation.Table)
	must(t, err)
	if _, err := store.Read(id); err != nil {
		t.Error(err)
	}
	want := map[tableid.TableID]*native.Table{named.Generation.Table.ID: named.Generation.Table}
	if d := cmp.Diff(want, store.written); d != "" {
		t.Errorf("the tables that the store remembers (-want +got):\n%s", d)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
