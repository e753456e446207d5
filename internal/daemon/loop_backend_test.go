package daemon

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	logMixed      = "Both backends hold rules"
	logUnmixed    = "Only one backend holds rules again"
	logMismatch   = "The other backend is in use by now"
	logMatch      = "The guarded backend is in use again"
	logUnchecked  = "The backends cannot be compared"
	logChecked    = "The backends can be compared again"
	aCheckAndMore = checkBackendEvery + time.Second
)

// holds sets the rules that the rig's backend and the other one have from now on.
func (r *rig) holds(ours, other iptables.Count) {
	if r.fake.Info().Backend == iptables.NFT {
		r.fake.SetCounts(ours, other)
	} else {
		r.fake.SetCounts(other, ours)
	}
}

// wantChoice fails unless status, metrics and the number of lines in the log
// agree on the choice of the backend.
func (r *rig) wantChoice(when string, mixed, mismatch bool, lines map[string]int) {
	r.t.Helper()
	s := r.d.Status()
	if s.Backend.Name != r.fake.Info().Backend {
		r.t.Errorf("%s: the backend is %s", when, s.Backend.Name)
	}
	if s.Backend.Mixed != mixed || s.Backend.Mismatch != mismatch {
		r.t.Errorf("%s: %+v, want mixed %t, mismatch %t", when, s.Backend, mixed, mismatch)
	}
	want := series{}
	for name, is := range map[string]bool{"mixed_backends": mixed, "backend_mismatch": mismatch} {
		if is {
			want[name] = 1
		}
	}
	if diff := cmp.Diff(want, r.metrics("mixed_backends", "backend_mismatch")); diff != "" {
		r.t.Errorf("%s: metrics (-want +got):\n%s", when, diff)
	}
	for _, line := range []string{logMixed, logUnmixed, logMismatch, logMatch, logUnchecked, logChecked} {
		if n := strings.Count(r.log.String(), line); n != lines[line] {
			r.t.Errorf("%s: the log says %d times %q, want %d", when, n, line, lines[line])
		}
	}
}

func (r *rig) wantReason(when, want string) {
	r.t.Helper()
	if got := r.d.Status().Backend.Reason; got != want {
		r.t.Errorf("%s: the reason is %q, want %q", when, got, want)
	}
}

func plain(n int) iptables.Count { return iptables.Count{Rules: n} }

// TestSecondBackendFillsUp: the log reports rules on a second backend once. canaryd reads both
// backends only when something changes.
func TestSecondBackendFillsUp(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.after(10 * time.Minute)
		if n := r.fake.EvidenceGathered(); n != 0 {
			t.Errorf("both backends were read %d times though nothing moved", n)
		}
		r.wantReason("at first", "a fake")

		r.holds(iptables.Count{Rules: 300, Hint: true}, plain(40))
		r.after(aCheckAndMore)
		r.wantChoice("with rules on the other backend", true, false, map[string]int{logMixed: 1})
		r.wantReason("with rules on the other backend", "kubelet's hint chain is in "+string(backend)+" only")
		r.wantReady()
		r.after(10 * time.Minute)
		r.wantChoice("ten minutes later", true, false, map[string]int{logMixed: 1})
		if n := r.fake.EvidenceGathered(); n != 1 {
			t.Errorf("both backends were read %d times, want once", n)
		}

		r.holds(iptables.Count{Rules: 300, Hint: true}, plain(0))
		r.after(aCheckAndMore)
		r.wantChoice("without them", false, false, map[string]int{logMixed: 1, logUnmixed: 1})
	})
}

// TestAlternativesAreSwitched: kubelet and kube-proxy move to the other backend. Two counts in
// a row are a mismatch, and canaryd stays on its backend.
func TestAlternativesAreSwitched(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		other := backend.Other()
		r := start(t, backend, setup{})
		r.holds(plain(20), iptables.Count{Rules: 300, Hint: true})
		r.after(aCheckAndMore)
		r.wantChoice("once", true, false, map[string]int{logMixed: 1})
		r.wantReason("once", "a fake")
		r.after(checkBackendEvery)
		told := map[string]int{logMixed: 1, logMismatch: 1}
		reason := "kubelet's hint chain is in " + string(other) + " only"
		r.wantChoice("twice", true, true, told)
		r.wantReason("twice", reason)
		r.wantLog(`evidence="` + string(other) + `"`)
		r.after(10 * time.Minute)
		if n := r.fake.EvidenceGathered(); n != 2 {
			t.Errorf("both backends were read %d times, want twice", n)
		}
		r.holds(plain(20), iptables.Count{Rules: 310, Hint: true})
		r.after(aCheckAndMore)
		r.wantChoice("later", true, true, told)

		// canaryd guards its own backend, and learns nothing from the other one.
		must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
		r.settled()
		if record := r.oneRecord(); record.Outcome != reload.Proved {
			t.Errorf("a flush on the guarded side: %+v", record)
		}
		r.wantReady()
		object := r.statusJSON()["backend"].(map[string]any)
		if object["mismatch"] != true || object["mixed"] != true || object["reason"] != reason {
			t.Errorf("status -o json says %v", object)
		}

		told[logMatch], told[logUnmixed] = 1, 1
		r.holds(plain(20), plain(0))
		r.after(aCheckAndMore)
		r.wantChoice("switched back", false, false, told)
		r.wantReason("switched back", string(backend)+" holds more rules: "+string(backend)+" 20, "+string(other)+" 0")

		r.holds(plain(0), plain(0))
		r.after(aCheckAndMore)
		r.wantChoice("flushed on both sides", false, false, told)
		if s := r.d.Status().Backend.Reason; !strings.HasPrefix(s, "iptables' tables hold no rules") {
			t.Errorf("where nobody holds rules the reason is %q", s)
		}
	})
}

// TestNoFlapping: evidence that keeps changing is no mismatch.
func TestNoFlapping(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.after(checkBackendEvery / 2) // between two checks
		for range 20 {
			r.holds(plain(0), plain(300))
			r.after(checkBackendEvery)
			r.wantChoice("for a moment", false, false, nil)
			r.holds(plain(300), plain(0))
			r.after(checkBackendEvery)
			r.wantChoice("and back", false, false, nil)
		}
		if n := r.fake.EvidenceGathered(); n != 40 {
			t.Errorf("both backends were read %d times, want 40", n)
		}
	})
}

// TestForcedBackendIsNoMismatch: a forced backend may be mixed, but is never a mismatch.
func TestForcedBackendIsNoMismatch(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.fake.ForceBackend()
		r.holds(plain(1), plain(300))
		r.after(5 * aCheckAndMore)
		r.wantChoice("forced", true, false, map[string]int{logMixed: 1})
		if s := r.d.Status().Backend.Reason; !strings.HasPrefix(s, "it was asked for, against the evidence: ") {
			t.Errorf("the reason is %q", s)
		}
	})
}

// TestEvidenceCannotBeRead: a failed read of the evidence is not "no evidence". The last known
// choice remains, and the log reports the failure once.
func TestEvidenceCannotBeRead(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.holds(plain(20), plain(300))
		r.after(2 * aCheckAndMore)
		told := map[string]int{logMixed: 1, logMismatch: 1}
		r.wantChoice("before", true, true, told)

		r.fake.FailEvidence(errors.New("no buffer space"))
		r.holds(plain(300), plain(0))
		r.after(10 * time.Minute)
		told[logUnchecked] = 1
		r.wantChoice("while it cannot be read", true, true, told)
		r.wantReady()

		r.fake.FailEvidence(nil)
		r.after(aCheckAndMore)
		told[logChecked], told[logMatch], told[logUnmixed] = 1, 1, 1
		r.wantChoice("when it can again", false, false, told)
	})
}

// TestWeighingIsBounded: the other backend is large and changes all the time. Checking it takes
// 2 % of a core, and no flush waits for it.
func TestWeighingIsBounded(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		const takes = 10 * time.Second
		r.fake.WeighTakes(takes)
		const hour = time.Hour
		for range int(hour / time.Second) {
			r.holds(plain(300), plain(1))
			r.after(time.Second)
		}
		n := r.fake.EvidenceGathered()
		if most := int(hour/(50*takes)) + 1; n < 2 || n > most {
			t.Errorf("both backends were read %d times in %s, want at most %d", n, hour, most)
		}

		// The flush happens during the next check.
		for r.fake.EvidenceGathered() == n {
			r.holds(plain(300), plain(1))
			r.after(time.Second)
		}
		must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
		r.settled()
		if record := r.oneRecord(); record.Outcome != reload.Proved || record.AbsentSeconds > 0.1 {
			t.Errorf("a flush while both backends are read: %+v", record)
		}
		r.wantReady()
		r.stop() // ends the goroutine of the check, or the bubble would not end
	})
}

// TestMixedFromTheStart: rules on both backends at the start are reported once.
func TestMixedFromTheStart(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake := loadedFake(t, backend)
		info := fake.Info()
		info.Mixed = true
		fake.SetInfo(info)
		r := run(t, fake, setup{})
		synctest.Wait()
		r.wantChoice("at the start", true, false, map[string]int{logMixed: 1})
		r.after(10 * time.Minute)
		r.wantChoice("later", true, false, map[string]int{logMixed: 1})
	})
}
