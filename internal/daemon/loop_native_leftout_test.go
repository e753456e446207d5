package daemon

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
	"github.com/canaryd/canaryd/pkg/watch"
)

// bigTable is a table of a word, next to kube-proxy's.
var bigTable = tableid.Inet.Table("big")

// bigOf makes that table with so many rules in a chain, and one more.
func bigOf(n int) *native.Table {
	var rules []string
	for i := range n {
		rules = append(rules, fmt.Sprint("rule ", i))
	}
	return tableOf(bigTable, rules...)
}

// leftOutNode runs body on a node whose limit is 50, with kube-proxy's table and a table of that
// many rules.
func leftOutNode(t *testing.T, n int, s setup, body func(t *testing.T, r *rig, k *fakeNative)) {
	s.guarded = newFakeNative(tableOf(proxyTable, "a", "b"), bigOf(n))
	s.guarded.limit(50)
	nativeNode(t, s, body)
}

// wantLeftOut fails unless exactly these tables are left out, and the node is healthy.
func (r *rig) wantLeftOut(tables ...string) {
	r.t.Helper()
	s := r.d.Status()
	var got []string
	for _, l := range s.NativeLeftOut {
		got = append(got, l.Table)
	}
	if diff := cmp.Diff(tables, got); diff != "" || !s.Healthy {
		r.t.Errorf("healthy %t, left out (-want +got)\n%s", s.Healthy, diff)
	}
	if page := pageOf(r.t, s); len(tables) > 0 != strings.Contains(page, "Native tables are not guarded") {
		r.t.Errorf("the page says %s", page)
	}
	if got := r.metrics("native_tables_not_guarded")["native_tables_not_guarded"]; got != float64(len(tables)) {
		r.t.Errorf("the metric is %v", got)
	}
}

const (
	logLeftOut  = "A native table is left out: it is NOT guarded"
	logReturned = "A native table is no longer left out"
	logShrunk   = "A native table that was left out is guarded again, without most of its rules and elements"
)

// logs fails unless the log says so often that the table is left out, and that it is not any
// more.
func (r *rig) logs(out, back int) {
	r.t.Helper()
	if o, b := strings.Count(r.log.String(), logLeftOut), strings.Count(r.log.String(), logReturned); o != out || b != back {
		r.t.Errorf("the log says %d times that it is left out, and %d times that it is back; want %d and %d", o, b, out, back)
	}
}

// TestNativeTooLarge: a table above --max-rules costs itself only. Status, log, metric and page
// say so once, and the other tables return after a flush. The lost table makes the node unhealthy
// until its owner writes it.
func TestNativeTooLarge(t *testing.T) {
	leftOutNode(t, 60, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		r.wantLeftOut("inet big")
		r.logs(1, 0)
		if got := r.d.Status().NotGuarded(); got != "one native table is not guarded" {
			t.Errorf("the warning is %q", got)
		}

		k.flushRuleset()
		r.settled()
		r.wantNotReady("table inet big is table_deleted")
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		s := r.d.Status()
		if k.standing(bigTable) != nil || len(s.NativeLeftOut) != 0 || len(s.Flushes) != 2 {
			t.Errorf("after a flush: the table is %v, left out %v, %d records", k.standing(bigTable), s.NativeLeftOut, len(s.Flushes))
		}
		for _, row := range s.Native {
			if lost := row.Table == "inet big"; row.LeftOut != lost || row.Awaiting != lost || lost != strings.Contains(row.Why, "cannot put it back") {
				t.Errorf("the row is %+v", row)
			}
		}
		if page := pageOf(t, s); !strings.Contains(page, "canaryd cannot put them back") || strings.Contains(page, "canaryd restore") {
			t.Errorf("the page says %s", page)
		}

		k.again(bigOf(70))
		r.settled()
		r.wantLeftOut("inet big")
		r.logs(1, 0)

		k.again(bigOf(20))
		r.settled()
		r.wantLeftOut()
		r.logs(1, 1)
		k.flushRuleset()
		r.settled()
		r.wantReady()
		k.wantNative(t, bigOf(20))
	})
}

// TestNativeGrows: a guarded table becomes too large. It returns once all fit into three quarters
// of the limit, and is not read at each commit until then.
func TestNativeGrows(t *testing.T) {
	store := nativestore.New(t.TempDir(), nativestore.Identity{})
	leftOutNode(t, 10, setup{nativeStore: store}, func(t *testing.T, r *rig, k *fakeNative) {
		r.wantLeftOut()
		k.sync(bigOf(60))
		r.after(3 * time.Second)
		r.wantLeftOut("inet big")
		var reads int
		k.with(func() { reads = k.read[bigTable] })
		for i := range 100 {
			k.addRule(bigTable, fmt.Sprint("one more ", i))
			r.after(3 * time.Second)
		}
		k.with(func() { reads = k.read[bigTable] - reads })
		if reads < 3 || reads > 6 {
			t.Errorf("%d reads in 5 minutes", reads)
		}
		if s := r.d.Status(); time.Since(s.LastKnown) > 10*time.Second {
			t.Errorf("the other tables were last known %s ago", time.Since(s.LastKnown))
		}
		stored, err := store.Load()
		must(t, err)
		if len(stored.Tables) != 1 {
			t.Errorf("the disk has %d tables", len(stored.Tables))
		}

		k.sync(bigOf(40)) // it would fit
		r.after(2 * nft.CountAgainAfter(0))
		r.wantLeftOut("inet big")
		k.sync(bigOf(30))
		r.after(2 * nft.CountAgainAfter(0))
		r.wantLeftOut()
		r.logs(1, 1)
		k.flushTable(bigTable)
		r.settled()
		r.wantReady()
		k.wantNative(t, bigOf(30))
	})
}

// TestNativeLeftOutIsTaken: a flush takes a table that is left out. An operator's restore cannot
// put it back, and a dismissal accepts the loss.
func TestNativeLeftOutIsTaken(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(k *fakeNative)
		want string // the loss; "" if its owner did it
	}{
		{"by a flush of all", (*fakeNative).flushRuleset, "table_deleted"},
		{"by a flush whose commit was missed", func(k *fakeNative) { k.missing(k.flushRuleset) }, "table_deleted"},
		{"by an unknown process", func(k *fakeNative) { k.deleteTable(bigTable) }, "deleted_by_owner_or_unknown"},
		{"by a unit that loads a file", func(k *fakeNative) {
			k.origin = watch.Origin{Unit: "nftables.service"}
			k.deleteTable(bigTable)
		}, "table_deleted"},
		{"its rules, by such a unit", func(k *fakeNative) {
			k.origin = watch.Origin{Unit: "nftables.service"}
			k.flushTable(bigTable)
		}, "emptied"},
		{"its rules, by an unknown process", func(k *fakeNative) { k.flushTable(bigTable) }, "emptied"},
		{"most of a chain, by an unknown process", func(k *fakeNative) {
			k.removeNamed(bigTable, nil, map[string]int{"services": 55}, nil)
		}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			leftOutNode(t, 60, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				test.do(k)
				r.after(3 * time.Second)
				if test.want == "" {
					r.wantReady()
					r.logs(1, 0)
					if got := strings.Count(r.log.String(), logShrunk); got != 1 {
						t.Errorf("the log says %d times that most of it is lost", got)
					}
					return
				}
				r.wantNotReady("table inet big is " + test.want)
				reply, err := r.d.Restore(t.Context(), api.RestoreRequest{})
				must(t, err)
				if len(reply.Native) != 1 || !strings.Contains(reply.Native[0].Detail, "--max-rules") {
					t.Errorf("the reply to a restore is %+v", reply.Native)
				}
				r.wantNotReady("table inet big is " + test.want)
				_, err = r.d.Dismiss(t.Context())
				must(t, err)
				r.settled()
				r.wantReady()
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
			})
		})
	}
}

// TestNativeMakesRoom: a table that is left out returns at once when another table shrinks.
func TestNativeMakesRoom(t *testing.T) {
	leftOutNode(t, 40, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		var many []string
		for i := range 20 {
			many = append(many, fmt.Sprint("service ", i))
		}
		k.sync(tableOf(proxyTable, many...))
		r.after(3 * time.Second)
		r.wantLeftOut("inet big")
		k.sync(bigOf(20))
		r.after(2 * nft.CountAgainAfter(0))
		r.wantLeftOut("inet big")
		k.sync(tableOf(proxyTable, "a"))
		r.after(3 * time.Second)
		r.wantLeftOut()
		k.flushRuleset()
		r.settled()
		r.wantReady()
		k.wantNative(t, bigOf(20))
	})
}

// withElements returns the table with a set of so many elements, which packets add and time takes.
func withElements(table *native.Table, n int) *native.Table {
	seen := native.Set{Name: "seen", Flags: unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT}
	for i := range n {
		seen.Elements = append(seen.Elements, native.Element(fmt.Sprint(i)))
	}
	table.Sets = []native.Set{seen}
	return table
}

// expire takes all elements of a table's set, without a commit.
func (k *fakeNative) expire(id tableid.TableID) {
	k.with(func() {
		next := *k.tables[id]
		next.Sets = slices.Clone(next.Sets)
		next.Sets[0].Elements = nil
		k.tables[id] = &next
	})
}

// TestNativeExpires: elements expire without a commit. A table that is left out is taken up again,
// whether they were its own elements or another table's.
func TestNativeExpires(t *testing.T) {
	for _, test := range []struct {
		name       string
		proxy, big *native.Table
		of         tableid.TableID
		within     time.Duration
	}{
		{"another table's", withElements(tableOf(proxyTable, "a"), 18), bigOf(33), proxyTable, 2 * refreshEvery},
		{"its own", tableOf(proxyTable, "a"), withElements(bigOf(10), 60), bigTable, 2 * nft.CountAgainAfter(0)},
	} {
		t.Run(test.name, func(t *testing.T) {
			k := newFakeNative(test.proxy, test.big)
			k.limit(50)
			nativeNode(t, setup{guarded: k}, func(t *testing.T, r *rig, k *fakeNative) {
				r.after(5 * time.Minute)
				r.wantLeftOut("inet big")
				reads := 0
				k.with(func() { reads = k.read[bigTable] })
				if reads > 7 {
					t.Errorf("%d reads of an unchanged table", reads)
				}
				k.expire(test.of)
				r.after(test.within + time.Second)
				r.wantLeftOut()
				r.logs(1, 1)
				k.flushRuleset()
				r.settled()
				k.wantNative(t, test.big)
			})
		})
	}
}

// TestNativeTooLargeToBeProved: while a table is lost, another one fills the limit. The lost table
// is put back, and the read that would prove it leaves it out. The record says so, and the loop
// tries no further.
func TestNativeTooLargeToBeProved(t *testing.T) {
	leftOutNode(t, 30, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		var many []string
		for i := range 25 {
			many = append(many, fmt.Sprint("service ", i))
		}
		k.flushRuleset()
		k.again(tableOf(proxyTable, many...))
		r.settled()
		r.wantLeftOut("inet big")
		k.wantNative(t, bigOf(30))
		heals := k.count().heals
		r.after(time.Minute)
		if n := k.count().heals - heals; n != 0 {
			t.Errorf("%d more replays", n)
		}
		list := r.d.Status().Flushes
		if len(list) != 1 || list[0].Outcome != reload.Partial || list[0].Attempts != 1 {
			t.Errorf("the records are %+v", list)
		}
		if says := "inet big: " + nativestore.ErrNotProved.Error(); list[0].Detail != says || strings.Contains(r.log.String(), "ought to be") {
			t.Errorf("the record says %q, and the log\n%s", list[0].Detail, r.log)
		}
	})
}

// TestNativeTooLargeToBeProvedOnRequest: a person has a table put back, and its owner makes it too
// large before the proof. Reply and record say that the restore is not proved.
func TestNativeTooLargeToBeProvedOnRequest(t *testing.T) {
	leftOutNode(t, 30, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.deleteTable(bigTable)
		r.after(3 * time.Second)
		r.wantNotReady("table inet big is deleted_by_owner_or_unknown")
		k.between = func() { k.sync(bigOf(60)) }
		reply, err := r.d.Restore(t.Context(), api.RestoreRequest{})
		must(t, err)
		if len(reply.Native) != 1 || reply.Native[0].Outcome != reload.Partial || reply.Native[0].Detail != nativestore.ErrNotProved.Error() {
			t.Errorf("the reply is %+v", reply.Native)
		}
		r.settled()
		r.wantLeftOut("inet big")
		if list := r.d.Status().Flushes; len(list) != 1 || list[0].Outcome != reload.Partial || !strings.Contains(list[0].Detail, nativestore.ErrNotProved.Error()) {
			t.Errorf("the records are %+v", list)
		}
		if log := r.log.String(); strings.Contains(log, "their owner wrote them") {
			t.Errorf("the log says %s", log)
		}
	})
}

// TestNativeTooLargeWithoutDaemon: check and restore compare no table that has become too large
// since it was stored.
func TestNativeTooLargeWithoutDaemon(t *testing.T) {
	store := nativestore.New(t.TempDir(), nativestore.Identity{BootID: "b", NetNS: "n", Release: "6.18"})
	leftOutNode(t, 10, setup{nativeStore: store}, func(t *testing.T, r *rig, k *fakeNative) {
		r.after(2 * time.Second)
		generation := r.present(bigTable)
		r.stop()
		k.sync(bigOf(60))
		k.deleteTable(proxyTable)
		k.with(func() { clear(k.witness) })
		checked, _, err := store.CheckStored(k, everyTable)
		must(t, err)
		for _, row := range checked {
			if want := map[string]string{"inet big": "unknown", "ip kube-proxy": "table_deleted"}[row.Table]; string(row.Verdict) != want {
				t.Errorf("a check says %+v, want %s", row, want)
			}
		}
		rows, err := store.RestoreStored(k, everyTable, false, nil)
		must(t, err)
		if len(rows) != 1 || rows[0].Table != "ip kube-proxy" || rows[0].Outcome != reload.Proved {
			t.Errorf("a restore says %+v", rows)
		}
		k.wantNative(t, bigOf(60))
		_, _, err = store.RestoreGeneration(t.Context(), k, everyTable, api.RestoreRequest{Generation: generation}, nil)
		if !errors.Is(err, nativestore.ErrTooLarge) {
			t.Errorf("a restore of the generation: %v", err)
		}
	})
}

// TestNativeLeftOutIsLostOverARestart: the node stays unhealthy after a restart, until the owner
// writes the table or a person accepts the loss.
func TestNativeLeftOutIsLostOverARestart(t *testing.T) {
	for name, test := range map[string]struct {
		end  func(r *rig, k *fakeNative)
		left []string // out, in the end
	}{
		"its owner writes it": {func(_ *rig, k *fakeNative) { k.again(bigOf(70)) }, []string{"inet big"}},
		"a small one":         {func(_ *rig, k *fakeNative) { k.again(bigOf(9)) }, nil},
		"a person accepts it": {func(r *rig, _ *fakeNative) {
			_, err := r.d.Dismiss(r.t.Context())
			must(r.t, err)
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			store := nativestore.New(t.TempDir(), nativestore.Identity{})
			leftOutNode(t, 60, setup{nativeStore: store}, func(t *testing.T, r *rig, k *fakeNative) {
				for range 2 {
					k.flushRuleset()
					r.after(3 * time.Second)
					r.wantNotReady("table inet big is table_deleted")
					r.stop()
					r = run(t, loadedFake(t, iptables.NFT), setup{guarded: k, nativeStore: store})
					r.after(3 * time.Second)
				}
				r.wantNotReady("table inet big is table_deleted")
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
				test.end(r, k)
				r.after(3 * time.Second)
				r.wantReady()
				r.stop()
				r = run(t, loadedFake(t, iptables.NFT), setup{guarded: k, nativeStore: store})
				r.settled()
				r.wantLeftOut(test.left...)
			})
		})
	}
}

// TestNativeLimitIsLower: a restart with a lower --max-rules takes up a stored table that is too
// large by now.
func TestNativeLimitIsLower(t *testing.T) {
	store := nativestore.New(t.TempDir(), nativestore.Identity{})
	leftOutNode(t, 40, setup{nativeStore: store}, func(t *testing.T, r *rig, k *fakeNative) {
		r.after(2 * time.Second)
		r.stop()
		k.limit(20)
		next := run(t, loadedFake(t, iptables.NFT), setup{guarded: k, nativeStore: store})
		next.settled()
		next.wantLeftOut("inet big")
	})
}
