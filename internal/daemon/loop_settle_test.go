package daemon

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// TestAFlusherOfSeveralCommands: canaryd plans a replay while the flusher may still work, but
// does not replay half a flush.
func TestAFlusherOfSeveralCommands(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		for i, table := range protect.Always() {
			if i > 0 {
				time.Sleep(12 * time.Millisecond)
			}
			must(t, r.fake.Flush(rules.IPv4, table, ""))
		}
		r.settled()
		record := r.oneRecord()
		if len(record.Tables) != 3 || record.Outcome != reload.Proved || record.Attempts != 1 {
			t.Errorf("the record is %+v, want one of all three tables, proved at once", record)
		}
		if absent := time.Duration(record.AbsentSeconds * float64(time.Second)); absent < 44*time.Millisecond || absent > 50*time.Millisecond {
			t.Errorf("the rules were absent for %s, want 24 ms of flushing, 20 ms of settling and little more", absent)
		}
		replays := 0
		for _, payload := range r.fake.Payloads(rules.IPv4) {
			if strings.Contains(payload, ":KUBE-SERVICES ") {
				replays++
			}
		}
		if replays != 1 {
			t.Errorf("%d restores of nat, want 1", replays)
		}
		r.wantReady()
	})
}

// TestNoticedBeforeSettling: the log reports a flush at once, however long --settle is. While a
// process keeps writing, canaryd waits 30 s at most.
func TestNoticedBeforeSettling(t *testing.T) {
	const notice = "Rules are being flushed"
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{settle: 10 * time.Second})
		r.flushNat()
		r.after(5 * time.Second)
		if !strings.Contains(r.log.String(), notice) || r.chain(rules.IPv4, rules.Nat, "KUBE-MARK-MASQ") == nil || len(r.chain(rules.IPv4, rules.Nat, "KUBE-MARK-MASQ")) != 0 {
			t.Errorf("after half of --settle the log has the notice: %t, and KUBE-MARK-MASQ holds %q",
				strings.Contains(r.log.String(), notice), r.chain(rules.IPv4, rules.Nat, "KUBE-MARK-MASQ"))
		}
		r.after(10 * time.Second)
		r.wantReady()
		if n := strings.Count(r.log.String(), notice); n != 1 {
			t.Errorf("the log has the notice %d times", n)
		}
		r.wantLog("by=")

		r.flushNat()
		for i := range 7 {
			r.after(5 * time.Second)
			must(t, r.fake.RestoreNoflush(rules.IPv4, "*filter\n-A corp-input -s 10.9.0."+string(rune('1'+i))+"/32 -j RETURN\nCOMMIT\n"))
		}
		if record := r.records(1)[0]; record.Outcome != reload.Proved || record.AbsentSeconds > 32 {
			t.Errorf("beside a busy process the record is %+v", record)
		}
	})
}

// TestATableThatCannotBeReadBesideTheFlusher: a read fails while the flusher works. That costs
// neither a try nor time.
func TestATableThatCannotBeReadBesideTheFlusher(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.fake.FailReads(errors.New("the tables changed all the time"))
		r.flushNat()
		time.Sleep(15 * time.Millisecond)
		r.fake.FailReads(nil)
		r.settled()
		record := r.oneRecord()
		if record.Outcome != reload.Proved || record.Attempts != 1 || record.AbsentSeconds > 0.025 {
			t.Errorf("the record is %+v, want it proved by the first try", record)
		}
	})
}

// TestAnExaminationComesBeforeTheLook: an examination is due when a flush takes everything and
// makes one table unreadable. That table's marks still show its loss, so the record stays open
// until it is back.
func TestAnExaminationComesBeforeTheLook(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{deaf: true})
		must(t, r.fake.RestoreNoflush(rules.IPv6, "*filter\n:FOREIGN - [0:0]\nCOMMIT\n"))
		for r.d.Status().LearningPendingSince.IsZero() { // until the poll sees it
			time.Sleep(time.Millisecond)
		}
		r.fake.DropTableFromReads(rules.IPv6, rules.Nat, errors.New("a native rule"))
		for _, table := range protect.Always() {
			must(t, r.fake.Flush(rules.IPv6, table, ""))
		}
		time.Sleep(500 * time.Millisecond)
		if s := r.d.Status(); s.LossSince.IsZero() || len(s.Flushes) != 1 || s.Flushes[0].Outcome.Done() {
			t.Errorf("while nat cannot be read: loss since %v, records %+v", s.LossSince, s.Flushes)
		}
		r.fake.DropTableFromReads(rules.IPv6, rules.Nat, nil)
		time.Sleep(40 * time.Second)
		if record := r.oneRecord(); record.Outcome != reload.Proved || len(record.Tables) != 3 {
			t.Errorf("the record is %+v, want one of all three tables, proved in the end", record)
		}
	})
}

// TestALossThatAMissShows: a missed packet shows a loss during the flusher's commit. The quiet
// before the replay begins with the kernel's notification of the commit, because the flusher
// may have more to do. canaryd waits for a missing notification half a second.
func TestALossThatAMissShows(t *testing.T) {
	for _, story := range []struct {
		name  string
		hint  watch.Source
		heard time.Duration // after the flush; 0: never
		least time.Duration // shortest absence of the rules
	}{
		{"a commit that takes long", watch.SourceMiss, 100 * time.Millisecond, 120 * time.Millisecond},
		{"a commit of which no word comes", watch.SourceMiss, 0, 520 * time.Millisecond},
		{"a loss that a poll shows", watch.SourcePoll, 0, 20 * time.Millisecond},
	} {
		t.Run(story.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, iptables.NFT, setup{deaf: true})
				r.flushNat()
				r.hints.Give(story.hint)
				if story.heard > 0 {
					time.Sleep(story.heard)
					stamp, err := r.fake.Stamp(t.Context(), rules.IPv4)
					must(t, err)
					r.writers.Note(watch.Writer{Time: time.Now(), Genid: uint32(stamp.Value), PID: 4711, Comm: "iptables"})
				}
				r.settled()
				record := r.oneRecord()
				if absent := time.Duration(record.AbsentSeconds * float64(time.Second)); absent < story.least || absent > story.least+5*time.Millisecond {
					t.Errorf("the rules were absent for %s, want %s and little more", absent, story.least)
				}
				if story.heard > 0 && record.Culprit.PID != 4711 {
					t.Errorf("the culprit is %+v", record.Culprit)
				}
			})
		})
	}
}
