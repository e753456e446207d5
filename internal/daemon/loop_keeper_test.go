package daemon

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// keeper is a Keeper in memory.
type keeper struct {
	mu    sync.Mutex
	kept  map[rules.Family]bool
	calls []string
	err   error
}

func newKeeper() *keeper { return &keeper{kept: map[rules.Family]bool{}} }

func (k *keeper) Keep(f rules.Family) error    { return k.call("keep", f, true) }
func (k *keeper) Release(f rules.Family) error { return k.call("release", f, false) }

func (k *keeper) call(what string, f rules.Family, kept bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls = append(k.calls, fmt.Sprint(what, " ", f))
	if k.err == nil {
		k.kept[f] = kept
	}
	return k.err
}

// fail makes later calls fail; nil ends that.
func (k *keeper) fail(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.err = err
}

// questions returns the number of calls since asked was called.
func (k *keeper) questions() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.calls)
}

// asked returns the number of calls since its last call.
func (k *keeper) asked() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	n := len(k.calls)
	k.calls = nil
	return n
}

// wantKeeper fails unless the families are kept, and status and metrics say state of all.
func (r *rig) wantKeeper(k *keeper, state api.KeeperState, families ...rules.Family) {
	r.t.Helper()
	want := map[rules.Family]bool{}
	for _, f := range families {
		want[f] = true
	}
	k.mu.Lock()
	got := maps.Clone(k.kept)
	k.mu.Unlock()
	maps.DeleteFunc(got, func(_ rules.Family, kept bool) bool { return !kept })
	if diff := cmp.Diff(want, got); diff != "" {
		r.t.Errorf("kept otherwise (-want +got):\n%s", diff)
	}
	shown := series{}
	for f, fk := range r.d.Status().Keeper {
		if fk.State != state || (fk.Reason != "") != (state == api.KeeperUnavailable) {
			r.t.Errorf("%s: the status says %+v, want %s", f, fk, state)
		}
		shown[fmt.Sprintf("keeper{family=%s,state=%s}", f, state)] = 1
	}
	if diff := cmp.Diff(shown, r.metrics("keeper")); diff != "" {
		r.t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

// TestKeeperKeepsWhatTranslates: from the first generation on the keeper has a table in each
// family, through flushes, pauses and failing replays. canaryd requests it once.
func TestKeeperKeepsWhatTranslates(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		k := newKeeper()
		r := start(t, backend, setup{keeper: k})
		r.wantKeeper(k, api.KeeperKept, rules.Families()...)
		if n := k.asked(); n != 2 {
			t.Errorf("asked %d times for two families", n)
		}
		r.wantLog("Established connections live through a flush")
		for _, s := range scenario.All() {
			if s.On(backend) && s.Prepare == nil {
				must(t, s.Do(t.Context(), r.programs()))
				r.settled()
			}
		}
		r.after(time.Minute)
		r.fake.FailRestores(1000, iptables.ReasonMissingSet)
		r.flushNat()
		r.after(5 * time.Minute)
		r.wantKeeper(k, api.KeeperKept, rules.Families()...)
		r.fake.FailRestores(0, iptables.ReasonMissingSet)
		r.after(time.Minute)
		r.pause(time.Hour)
		r.flushNat()
		r.after(time.Hour)
		r.settled()
		r.wantReady()
		r.wantKeeper(k, api.KeeperKept, rules.Families()...)
		if n := k.asked(); n != 0 {
			t.Errorf("asked %d times although nothing changed", n)
		}
	})
}

// TestKeeperFollowsItsOwners: without a rule that translates there is no table. canaryd makes
// it for the first such rule, and deletes it once it has learned that the owner removed the
// last one.
func TestKeeperFollowsItsOwners(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		k, fake := newKeeper(), iptablestest.NewFake(backend)
		must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Nat, ":KUBE-SERVICES - [0:0]", "-A PREROUTING -j KUBE-SERVICES", "-A KUBE-SERVICES -d 10.0.0.9/32 -j RETURN")))
		r := run(t, fake, setup{keeper: k})
		r.settled()
		r.wantKeeper(k, api.KeeperIdle)
		if n := k.asked(); n != 0 {
			t.Errorf("asked %d times on a node where nothing translates", n)
		}
		r.write(rules.Nat, "-A KUBE-SERVICES -d 10.0.0.1/32 -p tcp -j DNAT --to-destination 10.1.0.1:80")
		r.settled()
		if got := r.d.Status().Keeper; got[rules.IPv4].State != api.KeeperKept || got[rules.IPv6].State != api.KeeperIdle {
			t.Errorf("with a first DNAT of IPv4: %+v", got)
		}
		r.write(rules.Nat, "-D KUBE-SERVICES -d 10.0.0.1/32 -p tcp -j DNAT --to-destination 10.1.0.1:80")
		r.after(10 * time.Second)
		r.wantKeeper(k, api.KeeperIdle)
	})
}

// TestKeeperIsOff: there is no table in observe mode and after a cleanup. Without a keeper
// canaryd makes no call.
func TestKeeperIsOff(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		k := newKeeper()
		r := start(t, backend, setup{keeper: k, mode: api.Observe})
		r.wantKeeper(k, api.KeeperOff)
		r.stop()
		r = start(t, backend, setup{})
		r.wantKeeper(newKeeper(), api.KeeperOff)
		r.stop()
		r = start(t, backend, setup{keeper: k})
		r.wantKeeper(k, api.KeeperKept, rules.Families()...)
		must(t, r.d.Cleanup(t.Context(), api.CleanupRequest{}))
		r.wantKeeper(k, api.KeeperOff)
		k.asked()
		r.after(time.Hour)
		if n := k.asked(); n != 0 {
			t.Errorf("asked %d times after a cleanup", n)
		}
	})
}

// TestKeeperOfAPredecessor: the kernel deletes the table of a canaryd that has just died within
// milliseconds. The next canaryd waits for that, and logs nothing.
func TestKeeperOfAPredecessor(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		k := newKeeper()
		k.fail(fmt.Errorf("%w (EPERM)", iptables.ErrKeeperTaken))
		r := run(t, loadedFake(t, backend), setup{keeper: k})
		r.after(200 * time.Millisecond)
		r.wantKeeper(k, api.KeeperUnavailable)
		k.fail(nil)
		r.after(time.Second)
		r.wantKeeper(k, api.KeeperKept, rules.Families()...)
		if strings.Contains(r.log.String(), "may break established connections") {
			t.Errorf("the log has what lasted for 0.2 s:\n%s", r.log)
		}
	})
}

// TestKeeperIsRefused: the log has the refusal once for each family, and nothing is delayed.
// canaryd tries at most every five minutes in the end, however often the generation changes.
func TestKeeperIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		most int // most tries of both families in the first hour
	}{
		"kernel": {fmt.Errorf("%w: before Linux 5.12", iptables.ErrKeeperKernel), 26},
		"taken":  {fmt.Errorf("%w (EEXIST)", iptables.ErrKeeperTaken), 48},
		"socket": {errors.New("no buffer space available"), 48},
	} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				k := newKeeper()
				k.fail(c.err)
				r := start(t, backend, setup{keeper: k})
				for range 10 {
					r.after(5 * time.Minute)
					must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
					r.settled()
					r.flushNat()
					r.settled()
				}
				r.wantReady()
				r.wantKeeper(k, api.KeeperUnavailable)
				if n := k.asked(); n < 16 || n > c.most {
					t.Errorf("asked %d times in 50 minutes, want 16 to %d", n, c.most)
				}
				if n := strings.Count(r.log.String(), "There is no keeper: a flush may break established connections"); n != 2 {
					t.Errorf("logged %d times, want once for each family:\n%s", n, r.log)
				}
				k.fail(nil)
				r.after(pace.MakeAgain)
				r.wantKeeper(k, api.KeeperKept, rules.Families()...)
			})
		})
	}
}

// TestKeeperStaysWhereItCannotGo: a table cannot be deleted. canaryd tries again later, and its
// loop turns no faster, also while rules are lost.
func TestKeeperStaysWhereItCannotGo(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		k, fake := newKeeper(), iptablestest.NewFake(backend, rules.IPv4)
		masquerade := "KUBE-POSTROUTING -j MASQUERADE"
		must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Nat, ":KUBE-POSTROUTING - [0:0]", "-A POSTROUTING -j KUBE-POSTROUTING", "-A KUBE-POSTROUTING -s 10.0.0.9/32 -j RETURN", "-A "+masquerade)))
		r := run(t, fake, setup{keeper: k})
		r.settled()
		k.fail(errors.New("no buffer space available"))
		r.write(rules.Nat, "-D "+masquerade)
		r.after(10 * time.Second)
		r.wantKeeper(k, api.KeeperKept, rules.IPv4)
		r.fake.FailRestores(1000, iptables.ReasonMissingSet)
		r.flushNat()
		k.asked()
		r.after(time.Hour)
		if n := k.asked(); n > 15 {
			t.Errorf("asked %d times in an hour", n)
		}
		r.fake.FailRestores(0, iptables.ReasonMissingSet)
		k.fail(nil)
		r.after(10 * time.Minute)
		r.wantKeeper(k, api.KeeperIdle)
	})
}
