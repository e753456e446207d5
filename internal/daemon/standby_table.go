package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A StandbyOnNFT is the Standby of a Kernel on nft. OpenStandby opens one, and Close ends it. Only
// the loop's step calls its methods; the limits of gates run next to that.
type StandbyOnNFT struct {
	kernel *iptables.Kernel
	tables *standby.Standby
	conn   *nft.Conn // for probes, so that none waits for a read of the mirror's

	room   func() int64  // how much memory is free; nil: that does not matter
	limit  time.Duration // how long a gate may be open
	mu     sync.Mutex
	limits map[tableid.TableID]*gateLimit // that shut a gate by themselves
	// pending are copies that may be newer than what is written. Only the loop's step has them.
	pending map[rules.Family]*standby.Copy
	// natives are the same of native tables, next to what they were made of.
	natives map[tableid.TableID]nativePending
	ending  sync.WaitGroup // of those that run

	misses  *standby.Misses // nil: none are heard of
	hearing sync.WaitGroup  // of misses
}

// OpenStandby opens the sockets of a Standby. It writes nothing. Its commits count as the kernel's
// own. room returns how many bytes of memory the process may still use; nil: as many as it wants.
// missed is called, by a goroutine that Close ends, for a packet that nat did not translate and the
// copy would; nil, or a kernel without nfnetlink_log: never.
func OpenStandby(kernel *iptables.Kernel, room func() int64, missed func()) (*StandbyOnNFT, error) {
	conn, err := nft.Dial()
	if err != nil {
		return nil, err
	}
	s := &StandbyOnNFT{kernel: kernel, conn: conn, room: room, limit: standbyMost + time.Second, limits: map[tableid.TableID]*gateLimit{}}
	if missed != nil {
		s.listen(missed)
	}
	if err := s.dial(); err != nil {
		return nil, errors.Join(err, conn.Close(), s.deafen())
	}
	return s, nil
}

// listen begins to listen to misses. Without them the end of the flusher's commit is waited for.
func (s *StandbyOnNFT) listen(missed func()) {
	misses, err := standby.ListenMisses()
	if err != nil {
		klog.Background().Info("The standby opens only when a flusher's commit is done: missed packets cannot be heard of", "reason", err)
		return
	}
	s.misses = misses
	s.hearing.Go(func() {
		for {
			if err := misses.Receive(); err != nil {
				if !errors.Is(err, net.ErrClosed) {
					severity.Warnings(klog.Background()).Error(err, "The standby opens only when a flusher's commit is done from now on")
				}
				return
			}
			missed()
		}
	})
}

// deafen ends what listen began.
func (s *StandbyOnNFT) deafen() error {
	if s.misses == nil {
		return nil
	}
	err := s.misses.Close()
	s.hearing.Wait()
	return err
}

// dial opens the socket that owns the tables. It is done again if the library had to close it,
// because a gate could be shut in no other way.
func (s *StandbyOnNFT) dial() error {
	cfg := standby.Config{Unheard: s.kernel.Unheard, Room: s.room}
	if s.misses != nil {
		cfg.Misses = s.misses.Group()
	}
	tables, err := standby.Dial(cfg)
	if err != nil {
		return err
	}
	s.tables, s.pending, s.natives = tables, map[rules.Family]*standby.Copy{}, map[tableid.TableID]nativePending{}
	s.kernel.AlsoOwn(tables.Port())
	return nil
}

// Close ends the standby; the kernel removes its tables.
func (s *StandbyOnNFT) Close() error {
	s.mu.Lock()
	for _, limit := range s.limits {
		if limit.timer.Stop() {
			s.ending.Done()
		}
	}
	clear(s.limits)
	s.mu.Unlock()
	s.ending.Wait()
	return errors.Join(s.tables.Close(), s.conn.Close(), s.deafen())
}

// Follow implements Standby. All families are translated before one is written, because each write
// moves the genid.
func (s *StandbyOnNFT) Follow(ctx context.Context, nat map[rules.Family]StandbyNat) map[rules.Family]StandbyCopy {
	all := map[rules.Family]StandbyCopy{}
	for f, n := range nat {
		if n.Known && s.pending[f] != nil {
			all[f] = StandbyCopy{}
			continue
		}
		c, err := s.translate(ctx, f, n)
		switch {
		case err == nil:
			s.pending[f] = c
		case errors.Is(err, standby.ErrUnavailable):
			err = errors.Join(err, s.Release(f))
		case !errors.Is(err, ErrStandbyMoved):
			err = fmt.Errorf("%w: %w", ErrStandbyUnread, err)
		}
		all[f] = StandbyCopy{Err: err}
	}
	for f, n := range nat {
		switch {
		case !n.Write || all[f].Err != nil:
		case s.pending[f] == nil: // it went with the socket, just now
			all[f] = StandbyCopy{Err: net.ErrClosed}
		default:
			all[f] = s.write(f)
		}
	}
	return all
}

// write brings a family's copy into the kernel. After an error there is none, and it takes no
// memory: it is built again at the next try.
func (s *StandbyOnNFT) write(f rules.Family) StandbyCopy {
	id := f.Table(rules.Nat)
	more, err := s.tables.PutPiece(s.pending[f])
	if errors.Is(err, net.ErrClosed) {
		err = errors.Join(err, s.dial())
	}
	switch {
	case err != nil:
		err = errors.Join(err, s.Release(f))
	case !more:
		s.pending[f] = s.tables.Held(id) // without the rules, which the kernel has now
	}
	now := s.tables.Status(id)
	return StandbyCopy{Chains: now.Chains, Uncopied: now.LeftOut, Unfinished: more, Err: err}
}

// translate makes a family's copy of what the mirror holds, if that is what was examined.
func (s *StandbyOnNFT) translate(ctx context.Context, f rules.Family, nat StandbyNat) (c *standby.Copy, err error) {
	protected := make(map[string]bool, len(nat.Section.Chains))
	for _, chain := range nat.Section.Chains {
		protected[chain.Name] = !nat.Section.IsLedTo(chain.Name)
	}
	id := f.Table(rules.Nat)
	err = s.kernel.RawTable(ctx, id, func(raw nft.RawTable) error {
		if uint64(raw.Genid) != nat.Digest {
			return ErrStandbyMoved
		}
		var err error
		c, err = standby.Translate(standby.Source{RawTable: raw, Protects: func(chain string) bool { return protected[chain] }}, s.tables.Held(id))
		return err
	})
	return c, err
}

// Gate implements Standby. A gate that is open for so long that the loop must be hanging is shut
// all the same.
func (s *StandbyOnNFT) Gate(f rules.Family, order GateOrder) (got StandbyGate, err error) {
	id := f.Table(rules.Nat)
	before := s.tables.Commits()
	if order != ShutGate {
		got, err = s.open(f, s.tables.OpenHooks(id), order)
	} else {
		got.Shut, err = s.shut(id)
	}
	got.Open = len(s.tables.OpenHooks(id)) > 0
	got.Commits = int(s.tables.Commits() - before)
	return got, err
}

// shut shuts a gate; limit is when its limit did so before. Without a table the error is
// standby.ErrNotBuilt.
func (s *StandbyOnNFT) shut(id tableid.TableID) (limit time.Time, err error) {
	limit = s.endLimit(id)
	if err = s.tables.Shut(id); err == nil && s.tables.Held(id) == nil {
		err = standby.ErrNotBuilt
	}
	return limit, err
}

// open opens the hooks whose path lost something and that may be opened, and says why others stay
// shut. Where one of those is open it shuts all: what stands in nat has changed.
func (s *StandbyOnNFT) open(f rules.Family, already []standby.Hook, order GateOrder) (got StandbyGate, err error) {
	id := f.Table(rules.Nat)
	held := s.tables.Held(id)
	if held == nil {
		return got, standby.ErrNotBuilt
	}
	losses, err := held.Probe(s.conn)
	if err != nil {
		return got, fmt.Errorf("asking what became of nat's base chains: %w", err)
	}
	hooks, shut := held.Openable(losses)
	got.Barred = map[string]string{}
	for h, why := range shut {
		got.Barred[h.String()] = why
	}
	if slices.ContainsFunc(already, func(h standby.Hook) bool { return shut[h] != "" }) {
		_, err = s.shut(id)
		return got, s.orNotBuilt(id, err)
	}
	if !slices.ContainsFunc(hooks, func(h standby.Hook) bool { return !slices.Contains(already, h) }) {
		return got, nil
	}
	got.Outdated, err = s.openHooks(id, hooks, s.pending[f], nil, order)
	if err == nil && got.Outdated == nil {
		s.pending[f] = s.tables.Held(id) // the kernel has it now
	}
	return got, err
}

// openHooks opens hooks of a copy with what is pending, or without that if it cannot be written or,
// as refused says, translated; outdated is why. With OpenCurrent it opens nothing then. If the
// table is gone after an error, that is standby.ErrNotBuilt, too.
func (s *StandbyOnNFT) openHooks(id tableid.TableID, hooks []standby.Hook, pending *standby.Copy, refused error, order GateOrder) (outdated, err error) {
	if pending == s.tables.Held(id) {
		pending = nil
	}
	if outdated = refused; outdated == nil {
		outdated = s.tables.Open(id, hooks, pending)
	}
	switch {
	case outdated == nil:
	case pending == nil && refused == nil, errors.Is(outdated, standby.ErrNotBuilt):
		return nil, s.orNotBuilt(id, outdated)
	case order == OpenCurrent:
		return nil, fmt.Errorf("%w: %w", ErrStandbyOutdated, outdated)
	default:
		if err := s.tables.Open(id, hooks, nil); err != nil {
			return nil, s.orNotBuilt(id, err)
		}
	}
	s.beginLimit(id)
	return outdated, nil
}

// orNotBuilt adds to an error that the table went with it, if it did.
func (s *StandbyOnNFT) orNotBuilt(id tableid.TableID, err error) error {
	if err != nil && s.tables.Held(id) == nil && !errors.Is(err, standby.ErrNotBuilt) {
		return errors.Join(err, standby.ErrNotBuilt)
	}
	return err
}

// A gateLimit shuts the gate of one copy.
type gateLimit struct {
	timer *time.Timer
	shut  time.Time // when it did; zero: it did not yet
}

// beginLimit shuts the gate of a table's copy a little after the loop should have done so.
func (s *StandbyOnNFT) beginLimit(id tableid.TableID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if limit := s.limits[id]; limit != nil && limit.shut.IsZero() {
		return
	}
	tables, limit := s.tables, &gateLimit{}
	s.limits[id] = limit
	s.ending.Add(1)
	limit.timer = time.AfterFunc(s.limit, func() {
		defer s.ending.Done()
		s.mu.Lock()
		ended := s.limits[id] != limit
		s.mu.Unlock()
		if ended { // just now
			return
		}
		_ = tables.Shut(id) // if the kernel refuses, the table is removed, which the step sees
		s.mu.Lock()
		defer s.mu.Unlock()
		limit.shut = time.Now()
	})
}

// endLimit ends what beginLimit began, and returns when it shut the gate; zero if it did not.
func (s *StandbyOnNFT) endLimit(id tableid.TableID) (shut time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if limit := s.limits[id]; limit != nil {
		if shut = limit.shut; limit.timer.Stop() {
			s.ending.Done()
		}
	}
	delete(s.limits, id)
	return shut
}

// Release implements Standby.
func (s *StandbyOnNFT) Release(f rules.Family) error {
	s.endLimit(f.Table(rules.Nat))
	delete(s.pending, f)
	return s.tables.Remove(f.Table(rules.Nat))
}
