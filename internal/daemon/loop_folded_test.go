package daemon

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestAnEmptyTableThatIsDeletedMakesNoRecord: a process makes and deletes a table 100 times a
// second. Its name is a preset's, but no packet meets it, so the history ignores it.
func TestAnEmptyTableThatIsDeletedMakesNoRecord(t *testing.T) {
	for _, tt := range []struct {
		name  string
		table *native.Table
		want  bool // a record
	}{
		{"no chain", &native.Table{ID: dockerTable}, false},
		{"chains without rules", withoutRules(tableOf(dockerTable)), false},
		{"a rule", tableOf(dockerTable, "c"), true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			nativeNode(t, setup{guarded: newFakeNative(tableOf(proxyTable, "a", "b"))}, func(t *testing.T, r *rig, k *fakeNative) {
				k.again(tt.table)
				r.after(5 * time.Second)
				for range 400 {
					k.deleteTable(dockerTable)
					r.after(5 * time.Millisecond)
					k.again(tt.table)
					r.after(5 * time.Millisecond)
				}
				r.after(time.Minute)
				list := r.d.Status().Flushes
				if tt.want != (len(list) > 0) || len(list) > flushes.FoldFrom {
					t.Errorf("%d records, want some %t, %d at most: %+v", len(list), tt.want, flushes.FoldFrom, list)
				}
				r.wantReady()
				if n := strings.Count(r.log.String(), "\n"); n > 60 {
					t.Errorf("the log has %d lines", n)
				}
			})
		})
	}
}

// withoutRules returns the table without its rules.
func withoutRules(t *native.Table) *native.Table {
	for i := range t.Chains {
		t.Chains[i].Rules = nil
	}
	return t
}

// TestFlushesThatFollowFold: one process flushes the same tables every two seconds. The history
// has FoldFrom records, and the newest counts the others, on disk too. Another process's flush
// has a record of its own.
func TestFlushesThatFollowFold(t *testing.T) {
	const times = 40
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		r := start(t, backend, setup{journal: dir})
		flush := func(comm string) {
			must(t, r.fake.As(4242, comm).Flush(rules.IPv4, rules.Nat, ""))
			r.after(2 * time.Second)
		}
		for range times {
			flush("iptables")
		}
		flush("other")
		r.after(2 * time.Minute)
		want := flushes.FoldFrom
		if backend == iptables.NFT { // the kernel reveals the process
			want++
		}
		list := r.d.Status().Flushes
		if len(list) != want {
			t.Fatalf("%d records, want %d", len(list), want)
		}
		i := slices.IndexFunc(list, func(f api.Flush) bool { return f.Repeated != nil })
		if i < 0 {
			t.Fatalf("no record counts the others: %+v", list)
		}
		counts := list[i]
		if n := times + 1 - want; counts.Repeated.Times != n || counts.Repeated.MostAbsentSeconds == 0 || counts.Outcome != reload.Proved {
			t.Errorf("%s: %+v, want %d more", counts.Outcome, counts.Repeated, n)
		}
		if got := r.full(fmt.Sprintf("%x", counts.Repeated.Last.UnixMicro())); got.Flush.ID != counts.ID {
			t.Errorf("the ID of the last flush that is counted leads to %s, want %s", got.Flush.ID, counts.ID)
		}
		if last := list[0]; backend == iptables.NFT && last.Culprit.Comm != "other" {
			t.Errorf("the last flush was by %s", last.ByText())
		}
		r.stop()
		next := run(t, loadedFake(t, backend), setup{journal: dir})
		next.after(time.Second)
		i = slices.IndexFunc(next.d.Status().Flushes, func(f api.Flush) bool { return f.ID == counts.ID })
		if diff := cmp.Diff(counts.Repeated, next.d.Status().Flushes[i].Repeated); diff != "" {
			t.Errorf("after a restart (-want +got):\n%s", diff)
		}
	})
}

// TestAFlushThatLastsDoesNotFold: journal and reports have a lasting flush before it ends, so
// it has a record of its own, and both get its end.
func TestAFlushThatLastsDoesNotFold(t *testing.T) {
	for name, lasts := range map[string]func(r *rig, flush func()){
		"the replay fails": func(r *rig, flush func()) {
			r.fake.FailRestores(-1, iptables.ReasonOther)
			flush()
			r.after(15 * time.Second)
			r.fake.FailRestores(0, "")
		},
		"in a pause": func(r *rig, flush func()) {
			r.pause(15 * time.Second)
			flush()
		},
		"under a held lock": func(r *rig, flush func()) {
			defer r.fake.HoldLock()()
			flush()
			r.after(15 * time.Second)
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir := t.TempDir()
				r := start(t, backend, setup{journal: dir})
				p, end := r.reported()
				defer end()
				flush := func() { must(t, r.fake.As(4242, "iptables").Bypassing().Flush(rules.IPv4, rules.Nat, "")) }
				for range flushes.FoldFrom + 2 {
					flush()
					r.after(2 * time.Second)
				}
				lasts(r, flush)
				r.after(30 * time.Second)
				r.wantReady()
				last := r.d.Status().Flushes[0]
				if long := last.AbsentSeconds > 10; long != (backend == iptables.Legacy || name != "under a held lock") {
					t.Errorf("the last record was absent for %gs", last.AbsentSeconds)
				}
				for id, n := range p.ids {
					if line := fmt.Sprintf("flush %d final true: proved", n); !slices.Contains(p.lines, line) {
						t.Errorf("flush %s has no final line in %q", id, p.lines)
					}
				}
				r.stop()
				next := run(t, loadedFake(t, backend), setup{journal: dir})
				next.after(time.Second)
				for _, f := range next.d.Status().Flushes {
					if f.Outcome != reload.Proved {
						t.Errorf("after a restart the record of flush %s says %s", f.ID, f.Outcome)
					}
				}
			})
		})
	}
}
