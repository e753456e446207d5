package copies

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
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// An OnNFT is the Standby of a Kernel on nft. OpenNFT opens one, and Close ends it. Only the
// loop's step calls its methods, but its Write and the limits of gates run concurrently.
type OnNFT struct {
	kernel *iptables.Kernel
	tables *standby.Standby
	conn   *nft.Conn // for probes, so that they need not wait for a read of the mirror

	room   func() int64  // returns the free memory; nil: unlimited
	limit  time.Duration // how long a gate may be open
	mu     sync.Mutex
	limits map[tableid.TableID]*gateLimit // they shut gates by themselves
	// pending are copies that may be newer than the written ones. Only the loop's step uses
	// them.
	pending map[tableid.TableID]pendingCopy
	writing *nftWrite      // not taken yet; nil: none is
	ending  sync.WaitGroup // counts running limits

	misses  *standby.Misses // nil: canaryd hears of none
	hearing sync.WaitGroup  // of misses
}

// A pendingCopy is a copy and, for a native table, the digest of its original.
type pendingCopy struct {
	copy *standby.Copy
	of   native.Digest
}

// OpenNFT opens the standby's sockets at the start and writes nothing; an error leaves
// nothing open. kernel counts the standby's commits as canaryd's own. room returns how many
// bytes the process may still use; nil: no limit. A goroutine calls missed (may be nil) for
// each packet that only the copy would translate, if the kernel has nfnetlink_log.
func OpenNFT(kernel *iptables.Kernel, room func() int64, missed func()) (*OnNFT, error) {
	conn, err := nft.Dial()
	if err != nil {
		return nil, err
	}
	s := &OnNFT{kernel: kernel, conn: conn, room: room, limit: Most + time.Second, limits: map[tableid.TableID]*gateLimit{}}
	if missed != nil {
		s.listen(missed)
	}
	if err := s.dial(); err != nil {
		return nil, errors.Join(err, conn.Close(), s.deafen())
	}
	return s, nil
}

// listen begins to listen to misses: each calls missed. If the kernel cannot report them, it
// only logs; canaryd then waits for the end of the flusher's commit before it opens a gate.
func (s *OnNFT) listen(missed func()) {
	misses, err := standby.ListenMisses()
	if err != nil {
		klog.Background().Info("canaryd cannot listen for missed packets; the standby opens only after a flusher's commit", "reason", err)
		return
	}
	s.misses = misses
	s.hearing.Go(func() {
		for {
			if err := misses.Receive(); err != nil {
				if !errors.Is(err, net.ErrClosed) {
					severity.Warnings(klog.Background()).Error(err, "canaryd can no longer listen for missed packets; the standby opens only after a flusher's commit")
				}
				return
			}
			missed()
		}
	})
}

// deafen ends the listening, and waits for its goroutine. OpenNFT calls it after an error, and
// Close at the end.
func (s *OnNFT) deafen() error {
	if s.misses == nil {
		return nil
	}
	err := s.misses.Close()
	s.hearing.Wait()
	return err
}

// dial opens the socket that owns the tables. canaryd dials again if the library had to close
// the socket, because that was the only way to shut a gate.
func (s *OnNFT) dial() error {
	cfg := standby.Config{Room: s.room}
	if s.misses != nil {
		cfg.Misses = s.misses.Group()
	}
	tables, err := standby.Dial(cfg)
	if err != nil {
		return err
	}
	s.tables, s.pending = tables, map[tableid.TableID]pendingCopy{}
	s.kernel.Mute(tables.Port())
	return nil
}

// Close ends the standby; the kernel removes its tables.
func (s *OnNFT) Close() error {
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

// Follow implements Standby. It translates all tables before one is written, because each write
// moves the genid.
func (s *OnNFT) Follow(ctx context.Context, wants ...Want) (map[tableid.TableID]Copy, Write) {
	all, w := map[tableid.TableID]Copy{}, &nftWrite{s: s, tables: s.tables}
	for _, want := range wants {
		err := s.prepare(ctx, want)
		writes := err == nil && (!want.isNat() || want.Nat.Write)
		if writes {
			w.pieces = append(w.pieces, &piece{id: want.ID, copy: s.pending[want.ID].copy})
		}
		all[want.ID] = Copy{Writing: writes, Err: err}
	}
	if len(w.pieces) == 0 {
		return all, nil
	}
	s.writing = w
	return all, w
}

// isNat reports whether the table is iptables' nat.
func (w Want) isNat() bool { return w.Native.Table == nil }

// prepare translates a table, unless that was done. If the loop knows that there is no copy,
// none takes memory.
func (s *OnNFT) prepare(ctx context.Context, want Want) error {
	if !want.isNat() {
		_, err := s.translateNative(want)
		return s.orReleased(want.ID, err)
	}
	if want.Nat.Known && s.pending[want.ID].copy != nil {
		return nil
	}
	c, err := s.translate(ctx, want)
	switch {
	case err == nil:
		s.pending[want.ID] = pendingCopy{copy: c}
	case errors.Is(err, standby.ErrUnavailable):
		return s.orReleased(want.ID, err)
	case !errors.Is(err, ErrMoved):
		return fmt.Errorf("%w: %w", ErrUnread, err)
	}
	return err
}

// orReleased releases a copy after an error, and adds the error of releasing; nil stays nil.
// prepare and write call it, so that no outdated copy can open and the next Follow builds it
// again.
func (s *OnNFT) orReleased(id tableid.TableID, err error) error {
	if err != nil {
		return errors.Join(err, s.Release(id))
	}
	return nil
}

// hold notes that the kernel has the pending copy, so that a copy of nat no longer holds its
// rules.
func (s *OnNFT) hold(id tableid.TableID) {
	s.pending[id] = pendingCopy{s.tables.Held(id), s.pending[id].of}
}

// translateNative returns the copy of a native table. It reuses the copy made from the same
// content. Content changes every 2 s where packets add to sets, and after each replay; an
// opening does not wait for such changes.
func (s *OnNFT) translateNative(want Want) (*standby.Copy, error) {
	if p := s.pending[want.ID]; p.copy != nil && p.of == want.Native.Digest {
		return p.copy, nil
	}
	c, err := standby.TranslateNative(want.Native.Table, s.tables.Held(want.ID))
	if err == nil {
		s.pending[want.ID] = pendingCopy{c, want.Native.Digest}
	}
	return c, err
}

// translate makes a family's copy from the mirror, if the mirror still has the examined
// content.
func (s *OnNFT) translate(ctx context.Context, want Want) (c *standby.Copy, err error) {
	nat := want.Nat
	protected := make(map[string]bool, len(nat.Section.Chains))
	for _, chain := range nat.Section.Chains {
		protected[chain.Name] = !nat.Section.IsLedTo(chain.Name)
	}
	err = s.kernel.RawTable(ctx, want.ID, func(raw nft.RawTable) error {
		if uint64(raw.Genid) != nat.Digest {
			return ErrMoved
		}
		var err error
		c, err = standby.Translate(standby.Source{RawTable: raw, Protects: func(chain string) bool { return protected[chain] }}, s.tables.Held(want.ID))
		return err
	})
	return c, err
}

// Gate implements Standby. If a gate is open for so long that the loop must be hanging, a limit
// shuts it.
func (s *OnNFT) Gate(want Want, order Order) (got Answer, err error) {
	before := s.tables.Commits()
	switch {
	case order == Shut:
		got.Shut, err = s.shut(want.ID)
	case s.tables.Held(want.ID) == nil:
		err = standby.ErrNotBuilt
	case want.isNat():
		got, err = s.openNat(want.ID, order)
	default: // all hooks: the table's one owner has no exemptions of others in it
		pending, refused := s.translateNative(want)
		got.Outdated, err = s.openHooks(want.ID, s.tables.Held(want.ID).Hooks(), pending, refused, order)
	}
	got.Open = len(s.tables.OpenHooks(want.ID)) > 0
	got.Commits = int(s.tables.Commits() - before)
	return got, err
}

// shut shuts a gate. limit is when the gate's limit shut it before. Without a table the error
// is standby.ErrNotBuilt.
func (s *OnNFT) shut(id tableid.TableID) (limit time.Time, err error) {
	limit = s.endLimit(id)
	if err = s.tables.Shut(id); err == nil && s.tables.Held(id) == nil {
		err = standby.ErrNotBuilt
	}
	return limit, err
}

// openNat opens the hooks of nat whose path lost something and that may be opened (Gate).
// KeptShut says why others stay shut. If one of these is open, openNat shuts all, because nat
// has changed.
func (s *OnNFT) openNat(id tableid.TableID, order Order) (got Answer, err error) {
	held, already := s.tables.Held(id), s.tables.OpenHooks(id)
	losses, err := held.Probe(s.conn)
	if err != nil {
		return got, fmt.Errorf("probing nat's base chains: %w", err)
	}
	hooks, shut := held.Openable(losses)
	got.KeptShut = map[string]string{}
	for h, why := range shut {
		got.KeptShut[h.String()] = why
	}
	if slices.ContainsFunc(already, func(h standby.Hook) bool { return shut[h] != "" }) {
		_, err = s.shut(id)
		return got, s.orNotBuilt(id, err)
	}
	if !slices.ContainsFunc(hooks, func(h standby.Hook) bool { return !slices.Contains(already, h) }) {
		return got, nil
	}
	got.Outdated, err = s.openHooks(id, hooks, s.pending[id].copy, nil, order)
	if err == nil && got.Outdated == nil && !s.writes(id) {
		s.hold(id)
	}
	return got, err
}

// openHooks opens hooks of a copy together with the pending changes. refused is why these could
// not be translated. If they cannot be translated or written, openHooks opens the hooks without
// them, and outdated is why; but with OpenCurrent it opens nothing. If the table is gone after
// an error, the error wraps standby.ErrNotBuilt, too.
func (s *OnNFT) openHooks(id tableid.TableID, hooks []standby.Hook, pending *standby.Copy, refused error, order Order) (outdated, err error) {
	if pending == s.tables.Held(id) || refused == nil && order != OpenCurrent && s.writes(id) {
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
		return nil, fmt.Errorf("%w: %w", ErrOutdated, outdated)
	default:
		if err := s.tables.Open(id, hooks, nil); err != nil {
			return nil, s.orNotBuilt(id, err)
		}
	}
	s.beginLimit(id)
	return outdated, nil
}

// orNotBuilt adds standby.ErrNotBuilt to an error if the table is gone, so that the loop builds
// the copy again. nil stays nil.
func (s *OnNFT) orNotBuilt(id tableid.TableID, err error) error {
	if err != nil && s.tables.Held(id) == nil && !errors.Is(err, standby.ErrNotBuilt) {
		return errors.Join(err, standby.ErrNotBuilt)
	}
	return err
}

// A gateLimit shuts the gate of one copy.
type gateLimit struct {
	timer *time.Timer
	shut  time.Time // the time when it did; zero: not yet
}

// beginLimit starts a limit after an opening. The limit shuts the gate of a copy a little later
// than the loop should, in case the loop hangs. A limit that still runs is not prolonged.
func (s *OnNFT) beginLimit(id tableid.TableID) {
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

// endLimit stops the limit of a copy's gate, before the gate is shut or the copy released. It
// returns when the limit itself shut the gate; zero if it did not.
func (s *OnNFT) endLimit(id tableid.TableID) (shut time.Time) {
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

// Release implements Standby: it deletes the copy of a table. Without a copy it does nothing.
func (s *OnNFT) Release(id tableid.TableID) error {
	s.endLimit(id)
	delete(s.pending, id)
	return s.tables.Remove(id)
}
