package daemon

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/copies"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// fakeNativeStandby is a Standby of native tables, in memory. Its commits move their genid.
type fakeNativeStandby struct {
	mu    sync.Mutex
	k     *fakeNative
	held  map[tableid.TableID]*native.Table
	open  map[tableid.TableID]bool
	calls []nativeStandbyCall

	followErr, gateErr, shutErr error
	releaseErr                  error
	outdated                    error         // reason why an opening omits outstanding changes
	takes                       time.Duration // duration of Follow
	// pieces is the number of calls of Follow for a build, without the last; built counts them.
	pieces int
	built  map[tableid.TableID]int
}

// A nativeStandbyCall is one call, with canaryd's work before it.
type nativeStandbyCall struct {
	what            string
	at              time.Time
	heals, captures int
}

func newFakeNativeStandby(k *fakeNative) *fakeNativeStandby {
	return &fakeNativeStandby{k: k, held: map[tableid.TableID]*native.Table{}, open: map[tableid.TableID]bool{}, built: map[tableid.TableID]int{}}
}

func (s *fakeNativeStandby) note(what string, id tableid.TableID) {
	c := s.k.count()
	s.calls = append(s.calls, nativeStandbyCall{fmt.Sprint(what, " ", id.NFT()), time.Now(), c.heals, c.captures})
}

// commit makes a commit of canaryd itself.
func (s *fakeNativeStandby) commit() {
	s.k.commit(true, func(func(tableid.TableID) *native.Deed, *native.Commit) {})
}

func (s *fakeNativeStandby) write(of copies.Native) copies.Copy {
	want := of.Table
	s.mu.Lock()
	takes := s.takes
	s.mu.Unlock()
	time.Sleep(takes)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.note("follow", want.ID)
	if s.followErr != nil {
		delete(s.held, want.ID)
		delete(s.built, want.ID)
		return copies.Copy{Err: s.followErr}
	}
	s.commit()
	if s.held[want.ID] == nil && s.built[want.ID] < s.pieces {
		s.built[want.ID]++
		return copies.Copy{Unfinished: true}
	}
	s.held[want.ID] = want
	return copies.Copy{Chains: len(want.Chains)}
}

func (s *fakeNativeStandby) Gate(id tableid.TableID, want *native.Table, order copies.Order) (copies.Answer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	what, fault, open := "shut", s.shutErr, order != copies.Shut
	if open {
		what, fault = "open", s.gateErr
	}
	s.note(what, id)
	if fault != nil && !open { // the table is deleted
		delete(s.held, id)
		delete(s.open, id)
		return copies.Answer{}, fault
	}
	if order == copies.OpenCurrent && s.outdated != nil {
		return copies.Answer{}, fmt.Errorf("%w: %w", copies.ErrOutdated, s.outdated)
	}
	if fault != nil || s.open[id] == open {
		return copies.Answer{Open: s.open[id]}, fault
	}
	s.commit()
	if s.open[id] = open; !open {
		return copies.Answer{}, nil
	}
	if s.outdated == nil {
		s.held[id] = want
	}
	return copies.Answer{Open: true, Outdated: s.outdated}, nil
}

func (s *fakeNativeStandby) Release(id tableid.TableID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.note("release", id)
	if s.releaseErr != nil {
		return s.releaseErr
	}
	delete(s.held, id)
	delete(s.open, id)
	delete(s.built, id)
	return nil
}

// set changes the faults.
func (s *fakeNativeStandby) set(change func(*fakeNativeStandby)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

// named returns the calls of that name since that time; "" means all.
func (s *fakeNativeStandby) named(what string, since time.Time) (list []nativeStandbyCall) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.calls {
		if (what == "" || c.what == what) && !c.at.Before(since) {
			list = append(list, c)
		}
	}
	return list
}

// holds returns the copy of a table, or nil.
func (s *fakeNativeStandby) holds(id tableid.TableID) *native.Table {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held[id]
}

func (s *fakeNativeStandby) isOpen(id tableid.TableID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open[id]
}

// translating makes a table translate: its base chain becomes a nat chain.
func translating(t *native.Table) *native.Table {
	t.Chains[0].Attrs = nft.AppendAttr(nil, unix.NFTA_CHAIN_TYPE, "nat", 1)
	return t
}

// natTable is tableOf for a table that translates.
func natTable(id tableid.TableID, rules ...string) *native.Table {
	return translating(tableOf(id, rules...))
}

// withNativeStandby starts a daemon with an armed standby. It guards kube-proxy's table, which
// translates, and Docker's, which does not.
func withNativeStandby(t *testing.T, change func(*setup)) (*rig, *fakeNative, *fakeNativeStandby) {
	t.Helper()
	k := newFakeNative(natTable(proxyTable, "a", "b"), tableOf(dockerTable, "c"))
	s := newFakeNativeStandby(k)
	set := setup{guarded: k, nativeStandby: s}
	if change != nil {
		change(&set)
	}
	fake := loadedFake(t, "nft")
	r := run(t, fake, set)
	r.after(5 * time.Second)
	r.wantReady()
	return r, k, s
}

// wantNativeStandby fails unless status and metrics say state of kube-proxy's table, and the gate
// is open only if that is the state.
func (r *rig) wantNativeStandby(s *fakeNativeStandby, state api.StandbyState) {
	r.t.Helper()
	for _, row := range r.d.Status().Native {
		if row.Table != proxyTable.NFT() {
			continue
		}
		if row.Standby == nil || row.Standby.State != state || (state == api.StandbyOpen) == row.Standby.OpenSince.IsZero() {
			r.t.Errorf("the status says %+v, want %s", row.Standby, state)
		}
	}
	name := fmt.Sprintf("native_standby{family=ip,state=%s,table=ip kube-proxy}", state)
	if shown := r.metrics("native_standby"); shown[name] != 1 || len(shown) != 2 { // with Docker's
		r.t.Errorf("the metrics have %v, want %s", shown, name)
	}
	if s.isOpen(proxyTable) != (state == api.StandbyOpen) {
		r.t.Errorf("the gate is open: %t, while the state is %s", s.isOpen(proxyTable), state)
	}
}
