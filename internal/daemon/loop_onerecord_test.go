package daemon

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// flushKinds is a record by the number of its tables of each kind, and its outcome.
type flushKinds struct {
	Iptables, Native int
	Outcome          api.Outcome
}

// kinds returns the records of the status, the newest first.
func (r *rig) kinds() (list []flushKinds) {
	for _, f := range r.d.Status().Flushes {
		list = append(list, flushKinds{len(f.Lost.Tables), len(f.Native), f.Outcome})
	}
	return list
}

func (r *rig) wantKinds(want ...flushKinds) {
	r.t.Helper()
	if diff := cmp.Diff(want, r.kinds()); diff != "" {
		r.t.Errorf("records (-want +got):\n%s", diff)
	}
}

// TestOneFlushIsOneRecord: a flush of both kinds of table has one record, which ends when the last
// table is back. A later flush has a record of its own, also while the first one lasts.
func TestOneFlushIsOneRecord(t *testing.T) {
	nativeNode(t, setup{journal: t.TempDir()}, func(t *testing.T, r *rig, k *fakeNative) {
		before := r.tables()
		k.with(func() { k.refuses[proxyTable] = true })
		r.flushBoth(k)
		r.settled()
		r.wantTables(before, nil)
		r.wantKinds(flushKinds{6, 2, reload.Failed})
		if n := r.logged("The rules are back and proved"); n != 0 {
			t.Error("the log says that the rules are back, and a table is missing")
		}
		first := r.d.Status().Flushes[0]

		must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
		r.settled()
		r.wantTables(before, nil)
		r.wantKinds(flushKinds{6, 2, reload.Failed}, flushKinds{1, 0, reload.Proved})

		k.with(func() { k.refuses[proxyTable] = false })
		r.after(2 * pace.LastTry)
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		r.wantReady()
		r.wantKinds(flushKinds{6, 2, reload.Proved}, flushKinds{1, 0, reload.Proved})
		last := r.d.Status().Flushes[0]
		if last.ID != first.ID || last.Detail != "" || last.AbsentSeconds < 1 {
			t.Errorf("the record was %+v, and ends as %+v", first, last)
		}
		if n := r.logged("The rules are back and proved"); n != 2 {
			t.Errorf("the log says %d times that the rules are back, want once for each flush", n)
		}
		got := r.metrics("flush_events", "rules_absent")
		if got["flush_events_total"] != 2 || got["rules_absent_seconds"] != 2 {
			t.Errorf("metrics %v, want two flushes that have ended", got)
		}
		native, other := 0, 0
		for _, diff := range r.full(last.ID).Diff {
			if diff.Native {
				native++
			} else {
				other++
			}
		}
		if native != 2 || other != 6 {
			t.Errorf("the journal has the lost rules of %d native tables and %d of iptables', want 2 and 6", native, other)
		}
	})
}

// TestOneFlushInOneWait: a flusher takes one kind of table after the other, and canaryd waits for
// it. Whichever kind it took first, that is one flush; after the wait another one begins.
func TestOneFlushInOneWait(t *testing.T) {
	one := []flushKinds{{1, 1, reload.Proved}}
	for name, test := range map[string]struct {
		nativeFirst bool
		pause       time.Duration
		want        []flushKinds
	}{
		"iptables' tables first":        {pause: 10 * time.Millisecond, want: one},
		"native tables first":           {nativeFirst: true, pause: 10 * time.Millisecond, want: one},
		"iptables' tables first, apart": {pause: time.Second, want: []flushKinds{{0, 1, reload.Proved}, {1, 0, reload.Proved}}},
		"native tables first, apart":    {nativeFirst: true, pause: time.Second, want: []flushKinds{{1, 0, reload.Proved}, {0, 1, reload.Proved}}},
	} {
		t.Run(name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				steps := []func(){func() { must(t, r.fake.Flush(rules.IPv4, rules.Nat, "")) }, func() { k.flushTable(proxyTable) }}
				if test.nativeFirst {
					steps[0], steps[1] = steps[1], steps[0]
				}
				steps[0]()
				time.Sleep(test.pause)
				steps[1]()
				r.settled()
				r.wantReady()
				r.wantKinds(test.want...)
				if n := r.logged("The rules are back"); n != len(test.want) {
					t.Errorf("the log says %d times that the rules are back, want once for each flush", n)
				}
			})
		})
	}
}

// TestARecordOfBothGoesOnOverARestart: canaryd is restarted while a flush of both kinds of table
// lasts. The record goes on, and ends when the last table is back.
func TestARecordOfBothGoesOnOverARestart(t *testing.T) {
	for name, test := range map[string]struct {
		before func(r *rig, k *fakeNative)
		after  flushKinds // while a native table is refused
	}{
		"all is lost": {func(r *rig, _ *fakeNative) {
			r.pause(time.Hour)
		}, flushKinds{6, 2, reload.Failed}},
		"a native table is lost": {func(_ *rig, k *fakeNative) {
			k.with(func() { k.refuses[proxyTable] = true })
		}, flushKinds{6, 2, reload.Failed}},
	} {
		t.Run(name, func(t *testing.T) {
			dir, natives, records := t.TempDir(), t.TempDir(), t.TempDir()
			next := func() setup {
				return setup{store: openStore(t, dir, identity(iptables.NFT)), nativeStore: nativestore.New(natives, nativestore.Identity{}), journal: records, asleep: true}
			}
			nativeNode(t, next(), func(t *testing.T, first *rig, k *fakeNative) {
				first.after(10 * time.Second)
				before := first.tables()
				test.before(first, k)
				first.flushBoth(k)
				first.after(10 * time.Second)
				was := first.d.Status().Flushes[0]
				if len(first.kinds()) != 1 || len(was.Lost.Tables) != 6 || len(was.Native) != 2 {
					t.Fatalf("records before the restart: %+v", first.kinds())
				}
				first.stop()
				time.Sleep(30 * time.Second)

				k.with(func() { k.refuses[proxyTable] = true })
				s := next()
				s.guarded = k
				r := run(t, first.fake, s)
				r.resume()
				r.after(2 * pace.LastTry)
				r.wantTables(before, nil)
				r.wantKinds(test.after)

				k.with(func() { k.refuses[proxyTable] = false })
				r.after(2 * pace.LastTry)
				r.wantReady()
				for _, table := range []*native.Table{tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c")} {
					k.wantNative(t, table)
				}
				r.wantKinds(flushKinds{6, 2, reload.Proved})
				got := r.d.Status().Flushes[0]
				if got.ID != was.ID || got.AbsentSeconds < 40 || !got.AbsentAtMost {
					t.Errorf("the record is %+v, and was %+v", got, was)
				}
				if m := r.metrics("flush_events"); m["flush_events_total"] != 0 {
					t.Errorf("metrics %v: the run before has counted the flush", m)
				}
			})
		})
	}
}

// TestOneFlushWhileNoCanarydRuns: a flush of both kinds of table that the start finds has one
// record, with a bound of the absence.
func TestOneFlushWhileNoCanarydRuns(t *testing.T) {
	dir, natives, records := t.TempDir(), t.TempDir(), t.TempDir()
	next := func() setup {
		return setup{store: openStore(t, dir, identity(iptables.NFT)), nativeStore: nativestore.New(natives, nativestore.Identity{}), journal: records, asleep: true}
	}
	nativeNode(t, next(), func(t *testing.T, first *rig, k *fakeNative) {
		first.after(10 * time.Second)
		before := first.tables()
		first.stop()
		k.missing(func() { first.flushBoth(k) })
		time.Sleep(30 * time.Second)
		s := next()
		s.guarded = k
		r := run(t, first.fake, s)
		r.after(2 * pace.LastTry)
		r.wantTables(before, nil)
		r.wantReady()
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		r.wantKinds(flushKinds{6, 2, reload.Proved})
		if f := r.d.Status().Flushes[0]; !f.AbsentAtMost || f.AbsentSeconds < 30 {
			t.Errorf("the record is %+v", f)
		}
	})
}

// TestFlushesOfBothAreFolded: a process that flushes both kinds of table again and again gets ten
// records, and the newest counts the others.
func TestFlushesOfBothAreFolded(t *testing.T) {
	for name, tables := range map[string][]*native.Table{"in one transaction": nil, "one after the other": {many(proxyTable)}} {
		t.Run(name, func(t *testing.T) {
			s := setup{journal: t.TempDir()}
			if tables != nil {
				s.guarded = newFakeNative(tables...)
			}
			nativeNode(t, s, func(t *testing.T, r *rig, k *fakeNative) {
				for range 15 {
					r.flushBoth(k)
					r.after(5 * time.Second)
				}
				r.wantReady()
				list := r.d.Status().Flushes
				if len(list) != 10 || list[0].Repeated == nil || list[0].Repeated.Times != 5 {
					t.Errorf("%d records, the newest %+v", len(list), list[0])
				}
				for _, f := range list {
					if kept := r.full(f.ID).Flush; kept.Outcome != reload.Proved {
						t.Errorf("the journal has %+v", kept)
					}
				}
			})
		})
	}
}

// TestAProofThatFailsAfterAPause: canaryd writes native tables at the end of a pause, and cannot
// read them then. The next read shows them, and the loss ends.
func TestAProofThatFailsAfterAPause(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		r.pause(time.Minute)
		k.flushRuleset()
		r.settled()
		k.with(func() {
			k.between = func() {
				k.with(func() { k.brokenReads = nft.ErrInterrupted })
				time.AfterFunc(50*time.Millisecond, func() { k.with(func() { k.brokenReads = nil }) })
			}
		})
		r.after(2*time.Minute + 2*pace.LastTry)
		r.wantReady()
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
	})
}
