package daemon

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

var errNative = errors.New("holds rules that iptables cannot print")

// TestRestartBesideAnUnreadableTable: canaryd renews marks while a table is unknown. It stores
// the new marks, so that the next start knows them.
func TestRestartBesideAnUnreadableTable(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		r := start(t, backend, setup{store: openStore(t, dir, identity(backend))})
		r.after(3 * time.Second)
		r.fake.DropTableFromReads(rules.IPv6, rules.Nat, errNative)
		must(t, r.fake.Flush(rules.IPv6, rules.Nat, ""))
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, "")) // healed, with a new nonce
		r.after(3 * time.Second)
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		r.after(3 * time.Second)
		r.stop()
		r.fake.DropTableFromReads(rules.IPv6, rules.Nat, nil)
		want := r.chain(rules.IPv4, rules.Nat, latecome)

		n := run(t, r.fake, setup{store: openStore(t, dir, identity(backend))})
		n.after(3 * time.Second)
		if got := n.chain(rules.IPv4, rules.Nat, latecome); len(want) == 0 || len(got) != len(want) {
			t.Errorf("the owner's newest chain holds %v after the restart, before it %v", got, want)
		}
		for _, f := range n.d.Status().Flushes {
			if f.Families[0] == rules.IPv4 {
				t.Errorf("a flush of what was in force: %+v", f)
			}
		}
	})
}

// TestAReadThatFailsBesideACleanup: an owner removes its chains while canaryd reads, and the
// read fails. canaryd reads again after 0.1 s, so that a flush does not bring them back.
func TestAReadThatFailsBesideACleanup(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		r.after(3 * time.Second)
		r.fake.FailReads(errNative)
		r.write(rules.Nat, "-A "+latecome+" -j RETURN")
		r.after(50 * time.Millisecond)
		r.wantNotReady("unknown")
		r.fake.FailReads(nil)
		r.after(100 * time.Millisecond)
		r.wantReady()
	})
}

// TestOwnerInAnotherTableMeanwhile: an owner writes to one table while canaryd replays another.
// canaryd learns that write.
func TestOwnerInAnotherTableMeanwhile(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		if backend == iptables.Legacy {
			return // the lock keeps other processes out
		}
		r := start(t, backend, setup{})
		once := false
		r.fake.BeforeRestore(func() {
			if !once {
				once = true
				must(t, r.fake.RestoreNoflush(rules.IPv6, section(rules.Nat, ":KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]", "-A KUBE-SVC-AAAAAAAAAAAAAAAA -j ACCEPT")))
			}
		})
		must(t, r.fake.Flush(rules.IPv6, rules.Filter, ""))
		r.after(5 * time.Second)
		text, err := r.d.Render(t.Context(), api.RenderRequest{Family: rules.IPv6})
		must(t, err)
		if !strings.Contains(text, "KUBE-SVC-AAAAAAAAAAAAAAAA") {
			t.Error("the generation lacks the chain")
		}
	})
}

// TestReadsThatKeepFailing: reads fail, and probes work. That makes neither the log report
// success nor canaryd read more often.
func TestReadsThatKeepFailing(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.fake.FailReads(errors.New("iptables-save: no result in 60s"))
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		before := r.fake.Reads()
		r.after(time.Minute)
		if reads := r.fake.Reads() - before; reads > 2*(60+4) {
			t.Errorf("%d reads in a minute of two families, want one a second of each at most, and four more in the first second", reads)
		}
		log := r.log.String()
		if n := strings.Count(log, "could not be read"); n < 1 || n > 2 {
			t.Errorf("the log says %d times that reads fail, want once for each family", n)
		}
		if strings.Contains(log, "again") {
			t.Errorf("the log says that it works again:\n%s", log)
		}
		if r.d.Status().Ready() == nil {
			t.Error("ready while nothing can be read")
		}
		r.fake.FailReads(nil)
		r.after(3 * time.Second)
		if err := r.d.Status().Ready(); err != nil {
			t.Errorf("once it can be read: %v", err)
		}
	})
}

// TestObserveHoldsOnToALoss: rules that no owner restores stay lost.
func TestObserveHoldsOnToALoss(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{mode: api.Observe})
		before := r.d.Status().Generation
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, "KUBE-MARK-MASQ"))
		r.after(10 * time.Second)
		s := r.d.Status()
		if s.Ready() == nil || s.LossSince.IsZero() || len(s.Flushes) != 1 || s.Generation.Rules != before.Rules {
			t.Errorf("ready %v, lost since %s, %d records, %d rules of %d", s.Ready(), s.LossSince, len(s.Flushes), s.Generation.Rules, before.Rules)
		}
		// A restore on request ends the loss.
		reply, err := r.d.Restore(t.Context(), api.RestoreRequest{})
		must(t, err)
		r.after(3 * time.Second)
		if s := r.d.Status(); !reply.Proved() || s.Ready() != nil || !s.LossSince.IsZero() {
			t.Errorf("after a restore: %v, ready %v, lost since %s", reply, s.Ready(), s.LossSince)
		}
	})
}

// TestObserveCountsWhatItCannotReadYet: canaryd records the flush once it can read the table.
func TestObserveCountsWhatItCannotReadYet(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{mode: api.Observe})
		r.fake.DropTableFromReads(rules.IPv4, rules.Filter, errNative)
		must(t, r.fake.Flush(rules.IPv4, rules.Filter, ""))
		r.after(10 * time.Second)
		if s := r.d.Status(); s.Ready() == nil || s.LossSince.IsZero() {
			t.Errorf("ready %v, lost since %s", s.Ready(), s.LossSince)
		}
		r.fake.DropTableFromReads(rules.IPv4, rules.Filter, nil)
		r.after(40 * time.Second)
		if n := len(r.d.Status().Flushes); n != 1 {
			t.Errorf("%d records, want 1", n)
		}
	})
}

// TestRestoreOfAnUnreadableTable: a restore of a table that cannot be read is not proved.
func TestRestoreOfAnUnreadableTable(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.fake.DropTableFromReads(rules.IPv4, rules.Filter, errNative)
		must(t, r.fake.Flush(rules.IPv4, rules.Filter, ""))
		r.after(time.Second)
		reply, err := r.d.Restore(t.Context(), api.RestoreRequest{})
		must(t, err)
		if reply.Proved() || !strings.Contains(reply.Detail, "filter could not be read") {
			t.Errorf("%+v, want it not proved", reply)
		}
	})
}

// TestRuleThatNeedsAMissingChain: canaryd restores the other rules of its table, and the record
// is partial.
func TestRuleThatNeedsAMissingChain(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.write(rules.Filter, ":MYLOG-CANARY - [0:0]", "-A MYLOG-CANARY -j ACCEPT", "-A KUBE-FORWARD -s 10.9.9.9/32 -j MYLOG-CANARY")
		r.after(5 * time.Second)
		before := r.chain(rules.IPv4, rules.Filter, "KUBE-FORWARD")
		r.write(rules.Filter, "-F", "-X")
		r.after(5 * time.Second)
		if got := r.chain(rules.IPv4, rules.Filter, "KUBE-FORWARD"); len(got) != len(before)-1 {
			t.Errorf("%d rules came back, want %d", len(got), len(before)-1)
		}
		f := r.d.Status().Flushes[0]
		if f.Outcome != reload.Partial || !strings.Contains(f.Detail, "MYLOG-CANARY") {
			t.Errorf("outcome %s, %q: want partial, and the chain that is missing", f.Outcome, f.Detail)
		}
		if !strings.Contains(r.log.String(), "MYLOG-CANARY") {
			t.Error("the log does not name the missing chain")
		}
	})
}

// TestUnreadableAtTheStart: a table cannot be read when canaryd plants the canaries, and can be
// read a moment later. It does not stay unknown without a reason.
func TestUnreadableAtTheStart(t *testing.T) {
	for _, later := range []time.Duration{10 * time.Millisecond, 150 * time.Millisecond, 350 * time.Millisecond, time.Second, 10 * time.Second} {
		t.Run(later.String(), func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				fake := loadedFake(t, backend)
				fake.DropTableFromReads(rules.IPv4, rules.Filter, errNative)
				r := run(t, fake, setup{})
				r.after(later)
				r.wantNotReady("ipv4 filter is unknown")
				fake.DropTableFromReads(rules.IPv4, rules.Filter, nil)
				must(t, fake.RestoreNoflush(rules.IPv4, scenario.NewService)) // a hint
				r.after(time.Minute)
				r.wantReady()
				if flushes := r.d.Status().Flushes; len(flushes) != 0 {
					t.Errorf("a flush that never was: %+v", flushes)
				}
			})
		})
	}
}
