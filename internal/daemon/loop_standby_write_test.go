package daemon

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// writing is how long the kernel takes for a copy in these stories.
const writing = 100 * time.Millisecond

// duringAWrite starts a daemon whose standby has just begun to write a change.
func duringAWrite(t *testing.T) (*rig, *fakeStandby) {
	t.Helper()
	r, s := withStandby(t, nil)
	r.after(10 * time.Second)
	s.set(func(s *fakeStandby) { s.takes = writing })
	begun := time.Now()
	r.endpoint(1, true)
	r.after(20 * time.Millisecond)
	if len(s.named("follow ipv4", begun)) != 1 || len(s.named("write ipv4", begun)) != 0 {
		t.Fatalf("no write has begun: %+v", s.since(begun))
	}
	return r, s
}

// TestTheLoopLearnsWhileACopyIsWritten: the kernel takes its time for the copy. The loop learns
// another change meanwhile, and the copy follows that, too.
func TestTheLoopLearnsWhileACopyIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := duringAWrite(t)
		before, changed := r.d.Status().Generation.ID, time.Now()
		r.endpoint(2, true)
		r.after(captureSoon + time.Millisecond)
		if r.d.Status().Generation.ID == before {
			t.Error("the change was not learned during the write")
		}
		if len(s.named("write ipv4", changed)) > 0 {
			t.Fatal("the write had ended by then")
		}
		r.after(2*standbyEvery + writing)
		if n := len(s.named("write ipv4", changed)); n != 2 {
			t.Errorf("%d writes, want one for each change", n)
		}
		const chain = "KUBE-SEP-BUSYBUSYBUSYBUSY"
		if diff := cmp.Diff(r.chain(rules.IPv4, rules.Nat, chain), specsOf(s.copied(rules.IPv4), chain)); diff != "" {
			t.Errorf("the copy lacks the second change (-want +got):\n%s", diff)
		}
		r.wantStandby(s, api.StandbyArmed)
	})
}

// TestAFlushWhileACopyIsWritten: the gate opens at once. The replay begins after the write, whose
// commit would make it stale, and is the only one.
func TestAFlushWhileACopyIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := duringAWrite(t)
		flushed := time.Now()
		r.flushNat()
		r.after(0)
		if opened := s.named("open ipv4", flushed); len(opened) != 1 || !opened[0].at.Equal(flushed) {
			t.Errorf("opened: %+v, want at once", opened)
		}
		r.after(writing)
		r.settled()
		record := r.records(0)[0]
		if diff := cmp.Diff(api.Flush{Outcome: api.Outcome(reload.Proved), Attempts: 1}, api.Flush{Outcome: record.Outcome, Attempts: record.Attempts}); diff != "" {
			t.Errorf("the record (-want +got):\n%s", diff)
		}
		if most := (writing + 22*time.Millisecond).Seconds(); record.AbsentSeconds > most || record.Standby == nil {
			t.Errorf("absent for %v s, want %v at most; the standby: %+v", record.AbsentSeconds, most, record.Standby)
		}
		r.wantReady()
		r.wantStandby(s, api.StandbyArmed)
	})
}

// TestAWriteThatFailsBehindAnOpenGate: the copy is gone. The status no longer says that it is
// open, and the next copy is made once the rules are back.
func TestAWriteThatFailsBehindAnOpenGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := duringAWrite(t)
		r.fake.FailRestores(-1, iptables.ReasonMissingSet)
		r.flushNat()
		r.after(0)
		r.wantStandbyOf(rules.IPv4, api.StandbyOpen)
		s.set(func(s *fakeStandby) {
			s.followErr, s.takes, s.open[rules.IPv4] = errors.New("the kernel has no memory"), 0, false
		})
		r.after(2 * writing)
		r.wantStandbyOf(rules.IPv4, api.StandbyUnavailable)
		if since := r.d.Status().Standby[rules.IPv4].OpenSince; !since.IsZero() {
			t.Errorf("open since %s without a copy", since)
		}
		s.set(func(s *fakeStandby) { s.followErr = nil })
		r.fake.FailRestores(0, iptables.ReasonMissingSet)
		r.after(5 * time.Minute)
		r.wantReady()
		r.wantStandby(s, api.StandbyArmed)
	})
}

// TestACleanupWhileACopyIsWritten: the cleanup waits for the write, so that no copy stays.
func TestACleanupWhileACopyIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := duringAWrite(t)
		asked := time.Now()
		must(t, r.d.Cleanup(t.Context(), api.CleanupRequest{}))
		r.after(time.Minute)
		r.wantStandby(s, api.StandbyOff)
		var order []string
		for _, c := range s.since(asked) {
			if strings.HasSuffix(c.what, "ipv4") {
				order = append(order, c.what)
			}
		}
		if diff := cmp.Diff([]string{"write ipv4", "release ipv4"}, order); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// TestAStopWhileACopyIsWritten: canaryd ends after the write, and the standby may then be closed.
func TestAStopWhileACopyIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := duringAWrite(t)
		asked := time.Now()
		r.stop()
		r.after(writing)
		if len(s.named("write ipv4", asked)) != 1 || len(s.since(asked)) != 2 { // of both families
			t.Errorf("after the stop: %+v, want the end of the write", s.since(asked))
		}
		r.wantLog("Stopped; canaries and rules stay in place")
	})
}

// TestAWriteThatHangs: the service manager learns that the kernel does not finish a write.
func TestAWriteThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		r.after(10 * time.Second)
		s.set(func(s *fakeStandby) { s.takes = 2 * writeLimit })
		r.endpoint(1, true)
		r.after(writeLimit / 2)
		if err := r.d.Alive(); err != nil {
			t.Errorf("too early: %v", err)
		}
		r.after(writeLimit)
		if err := r.d.Alive(); err == nil || !strings.Contains(err.Error(), "the standby's copy") {
			t.Errorf("a write that hangs: %v", err)
		}
		r.after(2 * writeLimit)
		r.wantStandby(s, api.StandbyArmed)
	})
}

// wantStandbyOf fails unless the status says that of a family's copy.
func (r *rig) wantStandbyOf(f rules.Family, state api.StandbyState) {
	r.t.Helper()
	if now := r.d.Status().Standby[f]; now.State != state {
		r.t.Errorf("%s: the status says %+v, want %s", f, now, state)
	}
}
