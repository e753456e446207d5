package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/copies"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// fakeStandbys is a Standby in memory, with a fake for each kind of table; nil: none.
type fakeStandbys struct {
	nat    *fakeStandby
	native *fakeNativeStandby
}

func (s fakeStandbys) Follow(_ context.Context, wants ...copies.Want) (map[tableid.TableID]copies.Copy, copies.Write) {
	all, w := map[tableid.TableID]copies.Copy{}, &fakeWrite{s: s, copied: map[tableid.TableID]copies.Copy{}}
	for _, want := range wants {
		if want.ID.Name == rules.Nat {
			all[want.ID] = s.nat.translate(want)
		} else {
			all[want.ID] = copies.Copy{Writing: true}
		}
		if all[want.ID].Writing {
			w.wants = append(w.wants, want)
		}
	}
	if len(w.wants) == 0 {
		return all, nil
	}
	return all, w
}

// A fakeWrite is the Write of fakeStandbys.
type fakeWrite struct {
	s      fakeStandbys
	wants  []copies.Want
	copied map[tableid.TableID]copies.Copy
}

func (w *fakeWrite) Run() {
	for i, want := range w.wants {
		if want.ID.Name != rules.Nat {
			w.copied[want.ID] = w.s.native.write(want.Native)
			continue
		}
		if i == 0 {
			w.s.nat.take()
		}
		w.copied[want.ID] = w.s.nat.write(want)
	}
}

func (w *fakeWrite) Take() map[tableid.TableID]copies.Copy { return w.copied }

func (s fakeStandbys) Gate(want copies.Want, order copies.Order) (copies.Answer, error) {
	if want.ID.Name == rules.Nat {
		return s.nat.Gate(want.ID.Family, order)
	}
	return s.native.Gate(want.ID, want.Native.Table, order)
}

func (s fakeStandbys) Release(id tableid.TableID) error {
	if id.Name == rules.Nat {
		return s.nat.Release(id.Family)
	}
	return s.native.Release(id)
}

// standbyConfig returns the standby's configuration for a setup's daemon.
func (s setup) standbyConfig() StandbyConfig {
	cfg := StandbyConfig{NativeOff: s.nativeStandbyOff, Auto: s.standbyAuto}
	if s.standby != nil || s.nativeStandby != nil {
		cfg.Table = fakeStandbys{s.standby, s.nativeStandby}
	}
	if s.standby == nil {
		cfg.Off = "the test has none"
	}
	return cfg
}

// fakeStandby is a Standby of families' nat, in memory. Its commits move the Fake's genid.
type fakeStandby struct {
	mu    sync.Mutex
	fake  *iptablestest.Fake
	nat   map[rules.Family]copies.Nat // contents of the copies
	open  map[rules.Family]bool
	calls []standbyCall
	// native is the standby of native tables; nil: none.
	native *fakeNativeStandby

	followErr, gateErr, shutErr error
	outdated                    error     // reason for refusing outstanding changes
	keptShut                    string    // reason why gates stay shut, without an error
	limit                       time.Time // time at which the limit shut the gate
	takes                       time.Duration
	// pieces is the number of calls of Follow for a build, without the last; built counts them.
	pieces int
	built  map[rules.Family]int
}

// A standbyCall is one call, with the work before it.
type standbyCall struct {
	what                    string
	at                      time.Time
	reads, restores, probes int
}

func newFakeStandby(fake *iptablestest.Fake) *fakeStandby {
	return &fakeStandby{fake: fake, nat: map[rules.Family]copies.Nat{}, open: map[rules.Family]bool{}, built: map[rules.Family]int{}}
}

// questions returns the number of calls, those of native tables included.
func (s *fakeStandby) questions() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.native.mu.Lock()
	defer s.native.mu.Unlock()
	return len(s.calls) + len(s.native.calls)
}

func (s *fakeStandby) note(what string, f rules.Family) {
	s.calls = append(s.calls, standbyCall{fmt.Sprint(what, " ", f), time.Now(), s.fake.Reads(), s.fake.Restores(), s.fake.Probes()})
}

// translate is the part of Follow before a write.
func (s *fakeStandby) translate(want copies.Want) copies.Copy {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.note("follow", want.ID.Family)
	for _, before := range []error{copies.ErrMoved, copies.ErrUnread, standby.ErrUnavailable} {
		if errors.Is(s.followErr, before) {
			return copies.Copy{Err: s.followErr}
		}
	}
	if now, err := s.fake.Stamp(context.Background(), want.ID.Family); !want.Nat.Known && (err != nil || now.Exact && now.Value != want.Nat.Digest) {
		return copies.Copy{Err: copies.ErrMoved}
	}
	return copies.Copy{Chains: len(want.Nat.Section.Chains), Writing: want.Nat.Write}
}

// take lets the time of a write pass.
func (s *fakeStandby) take() {
	s.mu.Lock()
	takes := s.takes
	s.mu.Unlock()
	time.Sleep(takes)
}

func (s *fakeStandby) write(want copies.Want) copies.Copy {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := want.ID.Family
	switch {
	case s.followErr != nil:
		return copies.Copy{Err: s.followErr}
	case s.built[f] < s.pieces:
		s.built[f]++
		s.fake.CommitElsewhere()
		return copies.Copy{Unfinished: true}
	}
	s.fake.CommitElsewhere()
	s.note("write", f)
	s.nat[f] = want.Nat
	return copies.Copy{Chains: len(want.Nat.Section.Chains)}
}

func (s *fakeStandby) Gate(f rules.Family, order copies.Order) (copies.Answer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	what, fault, open := "shut", s.shutErr, order != copies.Shut
	if open {
		what, fault = "open", s.gateErr
	}
	s.note(what, f)
	var shut time.Time
	if !open {
		shut, s.limit = s.limit, time.Time{}
	}
	switch {
	case order == copies.OpenCurrent && s.outdated != nil:
		return copies.Answer{Open: s.open[f]}, fmt.Errorf("%w: %w", copies.ErrOutdated, s.outdated)
	case fault != nil && !open: // the table is deleted
		delete(s.nat, f)
		s.open[f] = false
		return copies.Answer{}, fault
	case fault != nil || s.open[f] == open || open && s.keptShut != "":
		got := copies.Answer{Open: s.open[f], Shut: shut}
		if open && s.keptShut != "" {
			got.KeptShut = map[string]string{"postrouting": s.keptShut}
			got.Open, s.open[f] = false, false
		}
		return got, fault
	}
	s.fake.CommitElsewhere()
	if s.open[f] = open; !open {
		return copies.Answer{Commits: 1, Shut: shut}, nil
	}
	return copies.Answer{Open: true, Commits: 1, Outdated: s.outdated}, nil
}

func (s *fakeStandby) Release(f rules.Family) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.note("release", f)
	delete(s.nat, f)
	s.open[f] = false
	return nil
}

// set changes the faults.
func (s *fakeStandby) set(change func(*fakeStandby)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

// since returns the calls since that time.
func (s *fakeStandby) since(at time.Time) []standbyCall {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []standbyCall
	for _, c := range s.calls {
		if !c.at.Before(at) {
			list = append(list, c)
		}
	}
	return list
}

// named returns the calls of that name since that time.
func (s *fakeStandby) named(what string, at time.Time) (list []standbyCall) {
	for _, c := range s.since(at) {
		if c.what == what {
			list = append(list, c)
		}
	}
	return list
}

// copied returns the copy's section of nat.
func (s *fakeStandby) copied(f rules.Family) rules.Section {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nat[f].Section
}

// anyOpen reports whether a gate is open.
func (s *fakeStandby) anyOpen() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open[rules.IPv4] || s.open[rules.IPv6]
}

// wantStandby fails unless status and metrics say state of all families, and the gates are open
// only if that is the state.
func (r *rig) wantStandby(s *fakeStandby, state api.StandbyState) {
	r.t.Helper()
	want, got := series{}, series{}
	for _, f := range r.fake.Families() {
		want[fmt.Sprintf("standby{family=%s,state=%s}", f, state)] = 1
		now := r.d.Status().Standby[f]
		got[fmt.Sprintf("standby{family=%s,state=%s}", f, now.State)] = 1
		if (now.State == api.StandbyOpen) == now.OpenSince.IsZero() {
			r.t.Errorf("%s: the status says %+v", f, now)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		r.t.Errorf("status (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want, r.metrics("standby{", "standby")); diff != "" && state != api.StandbyOpen {
		shown := r.metrics("standby")
		for name := range shown {
			if name[:8] != "standby{" {
				delete(shown, name)
			}
		}
		if diff := cmp.Diff(want, shown); diff != "" {
			r.t.Errorf("metrics (-want +got):\n%s", diff)
		}
	}
	if s != nil && s.anyOpen() != (state == api.StandbyOpen) {
		r.t.Errorf("a gate is open: %t, while the state is %s", s.anyOpen(), state)
	}
}

// withStandby starts a daemon on nft with an armed standby.
func withStandby(t *testing.T, change func(*setup)) (*rig, *fakeStandby) {
	t.Helper()
	fake := loadedFake(t, "nft")
	s := newFakeStandby(fake)
	set := setup{standby: s}
	if change != nil {
		change(&set)
	}
	r := run(t, fake, set)
	r.settled()
	r.wantReady()
	return r, s
}
