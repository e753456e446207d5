package native_test

import (
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

func everything(nft.Table) bool { return true }

// services100 is the table that kube-proxy in nftables mode wrote for 100 services.
const services100 = "../../hack/bench/heal/testdata/services-100.nft.gz"

// dial opens a connection for a test.
func dial(t testing.TB) *nft.Conn {
	t.Helper()
	conn, err := nft.Dial()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// capture reads all tables of the namespace.
func capture(t testing.TB, conn *nft.Conn) *native.Ruleset {
	t.Helper()
	r, err := native.Capture(conn, everything)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// replay writes all tables of a ruleset under the present genid.
func replay(t testing.TB, conn *nft.Conn, r *native.Ruleset) *nft.Batch {
	t.Helper()
	genid, err := conn.Genid()
	if err != nil {
		t.Fatal(err)
	}
	b := build(t, r, genid)
	if err := b.Send(); err != nil {
		t.Fatal(err)
	}
	return b
}

// build writes all tables of a ruleset into a batch.
func build(t testing.TB, r *native.Ruleset, genid uint32) *nft.Batch {
	t.Helper()
	b := nft.NewBatch()
	b.Guard(genid)
	for _, table := range r.InOrder() {
		if _, err := table.Create(b, native.Options{Age: time.Since(r.At)}); err != nil {
			t.Fatal(err)
		}
	}
	b.Finish()
	return b
}

// raw returns the tables without the numbers and times that differ after each creation.
func raw(r *native.Ruleset) map[tableid.TableID]*native.Table {
	all := map[tableid.TableID]*native.Table{}
	for id, t := range r.Tables {
		all[id] = t.Bare()
		slices.SortStableFunc(all[id].Sets, func(a, b native.Set) int { return strings.Compare(a.Name, b.Name) })
	}
	return all
}

// apart is cmp.Diff of tables. It is quick for equal tables, for which cmp takes seconds if they
// are large.
func apart(want, got map[tableid.TableID]*native.Table) string {
	if reflect.DeepEqual(want, got) {
		return ""
	}
	return cmp.Diff(want, got, cmpopts.EquateEmpty())
}

// sameRaw compares two captures byte by byte.
func sameRaw(t testing.TB, want, got *native.Ruleset) {
	t.Helper()
	if diff := apart(raw(want), raw(got)); diff != "" {
		t.Errorf("raw objects (-want +got):\n%.8000s", diff)
	}
	for id, table := range want.Tables {
		if changes := native.Diff(table, got.Tables[id]); len(changes) > 0 {
			t.Errorf("%s changed: %v", id, changes)
		}
		if table.Digest() != got.Tables[id].Digest() {
			t.Errorf("%s has another digest", id)
		}
	}
}

// services returns kube-proxy's table from a file, in nft's language.
func services(t *testing.T, path string) string {
	t.Helper()
	nstest.Need(t, path, exists(path))
	return testkit.Unpacked(t, path)
}

func exists(path string) error {
	_, err := os.Stat(path)
	return err
}

// changes returns the differences between a table and its present state.
func changes(t testing.TB, conn *nft.Conn, was *native.Table) []native.Change {
	t.Helper()
	return native.Diff(was, capture(t, conn).Tables[was.ID])
}
