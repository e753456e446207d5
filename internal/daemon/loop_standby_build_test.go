package daemon

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/standby"
)

// TestAFlushDuringABuild: canaryd builds the copy of a native table, and notices a flush after
// the present piece. The flush opens no gate, and the build continues once the table is back.
func TestAFlushDuringABuild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const pieces, takes = 400, 50 * time.Millisecond
		r, k, s := withNativeStandby(t, func(set *setup) {
			s := set.nativeStandby
			s.pieces, s.takes = pieces, takes
		})
		r.wantNativeStandby(s, api.StandbyBuilding)
		flushed := time.Now()
		k.flushRuleset()
		r.after(200 * time.Millisecond)
		flushes := r.d.Status().Flushes
		if len(flushes) != 1 {
			t.Fatalf("%d flushes were noticed", len(flushes))
		}
		record := flushes[0]
		if record.NoticedSeconds > takes.Seconds() || record.AbsentSeconds > (takes+22*time.Millisecond).Seconds() {
			t.Errorf("noticed after %v s, back after %v s, want one piece of %s and the 20 ms of settling at most", record.NoticedSeconds, record.AbsentSeconds, takes)
		}
		k.wantNative(t, natTable(proxyTable, "a", "b"))
		r.wantNativeStandby(s, api.StandbyBuilding)
		if during := s.named("follow ip kube-proxy", flushed); len(during) == 0 || during[0].at.Sub(flushed) < 20*time.Millisecond {
			t.Errorf("the build went on before the table was back, or not at all: %+v", during)
		}
		r.after(pieces * takes)
		r.wantReady()
		r.wantNativeStandby(s, api.StandbyArmed)
		if diff := cmp.Diff([]int{pieces + 1, 0}, []int{len(s.named("follow ip kube-proxy", time.Time{})), len(s.named("open ip kube-proxy", time.Time{}))}); diff != "" {
			t.Errorf("steps of the build, and openings (-want +got):\n%s", diff)
		}
	})
}

// TestAFlushDuringABuildOfAFamily is the same for nat.
func TestAFlushDuringABuildOfAFamily(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const pieces, takes = 400, 50 * time.Millisecond
		fake := loadedFake(t, iptables.NFT)
		s := newFakeStandby(fake)
		s.pieces, s.takes = pieces, takes
		r := run(t, fake, setup{standby: s})
		r.after(5 * time.Second)
		r.wantReady()
		r.wantStandby(s, api.StandbyBuilding)
		flushed := time.Now()
		r.flushNat()
		r.after(200 * time.Millisecond)
		flushes := r.d.Status().Flushes
		if len(flushes) != 1 {
			t.Fatalf("%d flushes were noticed", len(flushes))
		}
		if record := flushes[0]; record.NoticedSeconds > takes.Seconds() || record.AbsentSeconds > (takes+22*time.Millisecond).Seconds() {
			t.Errorf("noticed after %v s, back after %v s, want one piece of %s and the 20 ms of settling at most", record.NoticedSeconds, record.AbsentSeconds, takes)
		}
		r.after(2 * pieces * takes)
		r.wantStandby(s, api.StandbyArmed)
		if len(s.named("open ipv4", flushed)) > 0 {
			t.Error("a copy that was being built was opened")
		}
	})
}

// TestANativeTableThatCannotBeCopied: canaryd tries as rarely as on a kernel without copies,
// and makes the copy once it can.
func TestANativeTableThatCannotBeCopied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, s := withNativeStandby(t, func(set *setup) {
			set.nativeStandby.followErr = fmt.Errorf("%w: it filters before it translates", standby.ErrUnavailable)
		})
		r.wantNativeStandby(s, api.StandbyUnavailable)
		r.after(pace.MakeAgain - 10*time.Second)
		if diff := cmp.Diff(1, len(s.named("follow ip kube-proxy", time.Time{}))); diff != "" {
			t.Errorf("tries (-want +got):\n%s", diff)
		}
		s.set(func(s *fakeNativeStandby) { s.followErr = nil })
		r.after(10 * time.Second)
		r.wantNativeStandby(s, api.StandbyArmed)
	})
}

// TestNatThatCannotBeCopied: canaryd tries again soon, because the rule that prevents the copy
// may be deleted at any time.
func TestNatThatCannotBeCopied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, func(set *setup) {
			set.standby.followErr = fmt.Errorf("%w: a rule cannot be copied", standby.ErrUnavailable)
		})
		r.wantStandby(s, api.StandbyUnavailable)
		s.set(func(s *fakeStandby) { s.followErr = nil })
		r.after(time.Minute)
		r.wantStandby(s, api.StandbyArmed)
	})
}
