package daemon

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/copies"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestStandbyThatFailsDelaysNothing: the copy cannot be made, or its gate cannot be opened or
// shut. Rules are back as fast as without a standby, and the log names the failure.
func TestStandbyThatFailsDelaysNothing(t *testing.T) {
	broken := errors.New("the kernel has no memory")
	ills := map[string]func(*fakeStandby){
		"none":      func(*fakeStandby) {},
		"follow":    func(s *fakeStandby) { s.followErr = broken },
		"open":      func(s *fakeStandby) { s.gateErr = broken },
		"shut":      func(s *fakeStandby) { s.shutErr = broken },
		"kept shut": func(s *fakeStandby) { s.keptShut = "changed by another owner" },
	}
	lines := map[string]string{
		"follow":    "There is no standby: while rules are missing",
		"open":      "The standby could not be opened",
		"shut":      "There is no standby: while rules are missing",
		"kept shut": "The standby stays shut for a hook",
	}
	for name, ill := range ills {
		bubble(t, name, func(t *testing.T) {
			r, s := withStandby(t, nil)
			s.set(ill)
			r.endpoint(1, true) // something to follow
			r.settled()
			for range 3 {
				flushed := time.Now()
				r.flushNat()
				r.settled()
				r.wantReady()
				all := r.records(0)
				if record := all[len(all)-1]; record.AbsentSeconds != 0.02 || record.Time.Before(flushed) {
					t.Errorf("without rules for %v s, want 20 ms; the record began %s after the flush", record.AbsentSeconds, record.Time.Sub(flushed))
				}
			}
			if line := lines[name]; line != "" {
				r.wantLog(line)
			}
		})
	}
}

// TestStandbyThatFailsWhileNatChanges: a copy is due again before its last change is followed.
// The loop still waits for hints, and answers a flush at once.
func TestStandbyThatFailsWhileNatChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		s.set(func(s *fakeStandby) {
			s.followErr, s.takes = errors.New("the kernel has no memory"), 100*time.Millisecond
		})
		for n := range 100 {
			r.endpoint(n, true)
			r.after(50 * time.Millisecond)
		}
		s.set(func(s *fakeStandby) { s.followErr, s.takes = nil, 0 })
		r.after(time.Minute)
		flushed := time.Now()
		r.flushNat()
		r.settled()
		r.wantReady()
		if len(s.named("open ipv4", flushed)) == 0 {
			t.Error("not opened")
		}
	})
}

// TestStandbyWhoseTableIsGone: opening the gate shows that the standby's table is gone. The
// status no longer says that it is armed.
func TestStandbyWhoseTableIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		s.set(func(s *fakeStandby) { s.gateErr = standby.ErrNotBuilt })
		r.fake.FailRestores(-1, iptables.ReasonMissingSet)
		r.flushNat()
		r.settled()
		if now := r.d.Status().Standby[rules.IPv4]; now.State != api.StandbyUnavailable {
			t.Errorf("the status says %+v", now)
		}
		s.set(func(s *fakeStandby) { s.gateErr = nil })
		r.fake.FailRestores(0, iptables.ReasonMissingSet)
		r.after(2 * pace.MakeAgain)
		r.wantReady()
		r.wantStandby(s, api.StandbyArmed)
	})
}

// TestStandbyWhoseTableGoesWhileItIsOpen: the standby's table is deleted while its gate is
// open. The status no longer says that it is open.
func TestStandbyWhoseTableGoesWhileItIsOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		must(t, r.fake.Flush(rules.IPv4, rules.Filter, ""))
		r.after(9500 * time.Microsecond)
		r.flushNat()
		r.after(3 * time.Millisecond)
		if !s.anyOpen() {
			t.Fatal("it was not opened for the flush")
		}
		s.set(func(s *fakeStandby) { s.gateErr = standby.ErrNotBuilt })
		r.write(rules.Nat, "-A POSTROUTING -s 203.0.113.7/32 -j ACCEPT")
		r.after(40 * time.Millisecond) // until the rules are back, before the next try
		if now := r.d.Status().Standby[rules.IPv4]; now.State != api.StandbyUnavailable || !now.OpenSince.IsZero() {
			t.Errorf("the status says %+v", now)
		}
	})
}

// TestStandbysWhoseSocketWasClosed: a gate cannot be shut, so canaryd closes the socket, and
// the tables of both families are gone. canaryd's next try with either of them shows that.
func TestStandbysWhoseSocketWasClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		s.set(func(s *fakeStandby) { s.shutErr, s.followErr = errors.New("the kernel has no memory"), net.ErrClosed })
		r.flushNat()
		r.after(5 * time.Second)
		r.wantReady()
		r.wantStandby(s, api.StandbyUnavailable)
		s.set(func(s *fakeStandby) { s.shutErr, s.followErr = nil, nil })
		r.after(2 * pace.MakeAgain)
		r.wantStandby(s, api.StandbyArmed)
	})
}

// TestStandbyThatCannotBeReadOn: nat cannot be read. The copy stays and opens, until it has
// been behind for as long as a gate may be open. Then it stays shut, and the log has the
// reason.
func TestStandbyThatCannotBeReadOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		s.set(func(s *fakeStandby) { s.followErr = copies.ErrUnread })
		r.endpoint(1, true)
		r.after(10 * time.Second)
		opens := func() int {
			since := time.Now()
			r.flushNat()
			r.settled()
			r.wantReady()
			return len(s.named("open ipv4", since))
		}
		if now := r.d.Status().Standby[rules.IPv4]; now.State != api.StandbyBehind {
			t.Errorf("the status says %+v", now)
		}
		if opens() == 0 {
			t.Error("a copy that is 10 s behind was not opened")
		}
		r.after(copies.Most)
		if n := opens(); n > 0 {
			t.Errorf("a copy that is 40 s behind was opened %d times", n)
		}
		r.wantLog("The standby stays shut: its copy is out of date")
		s.set(func(s *fakeStandby) { s.followErr = nil })
		r.after(2 * pace.MakeAgain)
		r.wantStandby(s, api.StandbyArmed)
		if opens() == 0 {
			t.Error("a copy that is not behind any more was not opened")
		}
	})
}

// TestStandbyThatStaysShut: in each flush the log says once why a hook stays shut.
func TestStandbyThatStaysShut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		s.set(func(s *fakeStandby) { s.keptShut = "changed by another owner" })
		for range 2 {
			must(t, r.fake.Flush(rules.IPv4, rules.Filter, ""))
			r.after(9500 * time.Microsecond)
			since := time.Now()
			r.flushNat()
			r.after(3 * time.Millisecond)
			r.write(rules.Filter, "-A FORWARD -s 203.0.113.7/32 -j ACCEPT")
			r.after(time.Minute)
			if n := len(s.named("open ipv4", since)); n < 2 {
				t.Errorf("tried %d times", n)
			}
		}
		if n := strings.Count(r.log.String(), "The standby stays shut for a hook"); n != 2 {
			t.Errorf("said %d times of two flushes", n)
		}
	})
}

// TestStandbyThatMustNotBeOpenAnyMore: another owner's write during a flush can shut the gate,
// and a later one can open it again.
func TestStandbyThatMustNotBeOpenAnyMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		write := func() (opened int) {
			since := time.Now()
			r.write(rules.Nat, "-A POSTROUTING -s 203.0.113.7/32 -j ACCEPT")
			r.after(3 * time.Millisecond)
			return len(s.named("open ipv4", since))
		}
		must(t, r.fake.Flush(rules.IPv4, rules.Filter, ""))
		r.after(9500 * time.Microsecond)
		r.flushNat()
		r.after(3 * time.Millisecond)
		if !s.anyOpen() {
			t.Fatal("it was not opened for the flush")
		}
		s.set(func(s *fakeStandby) { s.keptShut = "changed by another owner" })
		for range 3 {
			if n := write(); n != 1 || s.anyOpen() {
				t.Errorf("open: %t, after %d tries; want it shut by one", s.anyOpen(), n)
			}
		}
		if n := strings.Count(r.log.String(), "The standby stopped translating: another owner's new rule in nat"); n != 1 {
			t.Errorf("the log says %d times that it was shut", n)
		}
		s.set(func(s *fakeStandby) { s.keptShut = "" })
		if write(); !s.anyOpen() {
			t.Error("it was not opened again")
		}
		r.after(5 * time.Minute)
		r.wantReady()
		r.wantStandby(s, api.StandbyArmed)
	})
}

// TestStandbyThatWaits: another owner's write has shut the gate. It stays shut until the next
// write, however long the outage lasts.
func TestStandbyThatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		r.fake.FailRestores(-1, iptables.ReasonMissingSet)
		r.flushNat()
		r.after(3 * time.Millisecond)
		s.set(func(s *fakeStandby) { s.keptShut = "changed by another owner" })
		r.write(rules.Nat, "-A POSTROUTING -s 203.0.113.7/32 -j ACCEPT")
		r.after(3 * time.Millisecond)
		shut := time.Now()
		r.after(20 * time.Second)
		r.wantStandby(s, api.StandbyArmed)
		if n := len(s.named("open ipv4", shut)); n > 30 {
			t.Errorf("it was to be opened %d times in 20 s", n)
		}
	})
}

// TestStandbyIsOpenTwice: the record adds the open times before and after a pause.
func TestStandbyIsOpenTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		r.fake.FailRestores(-1, iptables.ReasonMissingSet)
		flushed := time.Now()
		r.flushNat()
		r.after(10 * time.Second)
		paused := time.Now()
		r.pause(5 * time.Second)
		r.after(10 * time.Second)
		if !s.anyOpen() {
			t.Fatal("not opened after the pause")
		}
		opened := s.named("open ipv4", paused)[0].at
		r.fake.FailRestores(0, iptables.ReasonMissingSet)
		r.after(5 * time.Minute)
		r.wantReady()
		shut := s.named("shut ipv4", opened)[0].at
		want := paused.Sub(flushed) + shut.Sub(opened)
		all := r.records(0)
		if diff := cmp.Diff(want.Seconds(), all[len(all)-1].Standby.OpenSeconds); diff != "" {
			t.Errorf("seconds (-want +got):\n%s", diff)
		}
	})
}

// TestStandbyThatItsLimitShut: the standby translated until its limit, and not until the loop
// noticed.
func TestStandbyThatItsLimitShut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		r.fake.FailRestores(-1, iptables.ReasonMissingSet)
		flushed := time.Now()
		r.flushNat()
		r.after(10 * time.Second)
		s.set(func(s *fakeStandby) { s.limit = flushed.Add(2 * time.Second) })
		r.after(time.Minute)
		r.wantLog("The standby's limit shut it")
		if open := r.d.Status().Flushes[0].Standby.OpenSeconds; open != 2 {
			t.Errorf("the record says %v s, want 2", open)
		}
	})
}

// TestStandbyThatFailedIsWrittenAtOnce: after a failure the next try writes a whole copy,
// although the last one was written less than a second ago.
func TestStandbyThatFailedIsWrittenAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		until := func(n int, done func() bool) {
			r.endpoint(n, true)
			for range 100 {
				if r.after(5 * time.Millisecond); done() {
					return
				}
			}
			t.Fatalf("change %d was not followed", n)
		}
		r.after(10 * time.Second)
		since := time.Now()
		until(1, func() bool { return len(s.named("write ipv4", since)) > 0 })
		written := time.Now()
		s.set(func(s *fakeStandby) { s.followErr = fmt.Errorf("%w: a rule is unknown", standby.ErrUnavailable) })
		until(2, func() bool { return r.d.Status().Standby[rules.IPv4].State == api.StandbyUnavailable })
		s.set(func(s *fakeStandby) { s.followErr = nil })
		r.after(pace.FirstTry + 10*time.Millisecond)
		if late := time.Since(written); late >= standbyEvery {
			t.Fatalf("the try came after %s", late)
		}
		if now := r.d.Status().Standby[rules.IPv4]; now.State != api.StandbyArmed {
			t.Errorf("the status says %+v", now)
		}
	})
}

// TestCopiesOfNatComeFirst: nat's copies precede those of native tables, which may have to be
// translated when they are opened.
func TestCopiesOfNatComeFirst(t *testing.T) {
	st := &state{standby: map[tableid.TableID]*standbyOf{}}
	for _, id := range []tableid.TableID{proxyTable, dockerTable} {
		st.standby[id] = &standbyOf{id: id, kind: &nativeCopy{id: id}}
	}
	for _, id := range []tableid.TableID{rules.IPv6.Table(rules.Nat), rules.IPv4.Table(rules.Nat)} {
		st.standby[id] = &standbyOf{id: id, kind: &natCopy{id: id}}
	}
	var names []string
	for _, s := range st.copies() {
		names = append(names, s.kind.name())
	}
	if diff := cmp.Diff([]string{"ipv4 nat", "ipv6 nat", "ip docker-bridges", "ip kube-proxy"}, names); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
