package iptables

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/rules"
)

// Begin begins a guarded read-and-write; see Session. On legacy it takes the
// xtables lock and returns ErrLocked if somebody else keeps it for
// Config.LockWait; on nft it never waits. The Session must be closed.
func (k *Kernel) Begin(ctx context.Context) (Session, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	base := session{kernel: k, noted: map[rules.Family]uint64{}, read: map[rules.Family]bool{}, lock: -1}
	if k.info.Backend == NFT && !k.info.ExecProbe {
		return &genidSession{base}, nil
	}
	if k.info.Backend == Legacy {
		lock, err := takeLock(ctx, k.cfg.LockFile, k.cfg.LockWait)
		if err != nil {
			return nil, err
		}
		base.lock = lock
	}
	return &contentSession{base}, nil
}

var errClosed = errors.New("the session is closed")

// A session is what both kinds share.
type session struct {
	kernel *Kernel
	// noted is, for each family, the digest that its next Restore must find.
	// A family that is not in it must be read first.
	noted  map[rules.Family]uint64
	read   map[rules.Family]bool // which families were read before
	lock   int                   // -1 if none is held
	closed bool
}

func (s *session) Read(ctx context.Context, family rules.Family) (Snapshot, error) {
	if s.closed {
		return Snapshot{}, errClosed
	}
	want, noted := s.noted[family]
	delete(s.noted, family)
	snapshot, err := s.kernel.Read(ctx, family)
	if err != nil {
		return Snapshot{}, err
	}
	snapshot.Moved = s.read[family] && (!noted || snapshot.Digest != want)
	s.noted[family], s.read[family] = snapshot.Digest, true
	return snapshot, nil
}

// renew notes what is there now, so that the next Restore finds it.
func (s *session) renew(ctx context.Context, family rules.Family) error {
	if s.closed {
		return errClosed
	}
	if err := s.kernel.ready(ctx, family); err != nil {
		return err
	}
	digest, err := s.kernel.reader.digest(ctx, family)
	if err == nil {
		s.noted[family] = digest
	}
	return err
}

func (s *session) Close() error {
	if s.closed {
		return nil
	}
	s.closed = true
	if s.lock < 0 {
		return nil
	}
	return unix.Close(s.lock)
}

// guard returns the current digest, or ErrStale if it is not the noted one.
func (s *session) guard(ctx context.Context, family rules.Family) (uint64, error) {
	if s.closed {
		return 0, errClosed
	}
	if err := s.kernel.ready(ctx, family); err != nil {
		return 0, err
	}
	want, ok := s.noted[family]
	if !ok {
		return 0, fmt.Errorf("%w: %v was not read since the last failure", ErrStale, family)
	}
	got, err := s.kernel.reader.digest(ctx, family)
	if err != nil {
		return 0, err
	}
	if got != want {
		return 0, ErrStale
	}
	return got, nil
}

// A genidSession is guarded by nf_tables' genid, which counts every commit of
// the network namespace, whichever family it is for.
type genidSession struct{ session }

// Read implements Session. The genid costs nothing to ask for once more, so
// what was written while the read went on is noticed too.
func (s *genidSession) Read(ctx context.Context, family rules.Family) (Snapshot, error) {
	snapshot, err := s.session.Read(ctx, family)
	if err != nil {
		return Snapshot{}, err
	}
	after, err := s.kernel.reader.digest(ctx, family)
	if err != nil {
		return Snapshot{}, err
	}
	snapshot.Moved = snapshot.Moved || after != snapshot.Digest
	return snapshot, nil
}

// RestoreAnyway implements Session.
func (s *genidSession) RestoreAnyway(ctx context.Context, family rules.Family, payload []byte) error {
	if err := s.renew(ctx, family); err != nil {
		return err
	}
	_, err := s.Restore(ctx, family, payload)
	return err
}

// Restore implements Session. Our own commits are counted: one for each
// section of the payload that writes anything. More than those were somebody
// else's. A section that changes nothing makes no commit, so a foreign commit
// at that moment can go unseen. A section that renews marks always writes; one
// that only puts back hooks or chains does, unless somebody else did so first.
func (s *genidSession) Restore(ctx context.Context, family rules.Family, payload []byte) (raced bool, err error) {
	before, err := s.guard(ctx, family)
	if err != nil {
		return false, err
	}
	if err := s.kernel.restore(ctx, family, payload); err != nil {
		// How many commits were ours is not known: everything must be read
		// again.
		clear(s.noted)
		return false, err
	}
	after, err := s.kernel.reader.digest(context.WithoutCancel(ctx), family)
	if err != nil {
		clear(s.noted)
		return true, fmt.Errorf("the rules were written, but: %w", err)
	}
	moved := uint32(after) - uint32(before) // the counter wraps
	if moved > sections(payload) {
		clear(s.noted)
		return true, nil
	}
	for f, id := range s.noted {
		s.noted[f] = uint64(uint32(id) + moved)
	}
	return false, nil
}

// A contentSession is guarded by the xtables lock and, because a program may
// ignore or move that lock, by the digest of the family's whole content.
type contentSession struct{ session }

// Restore implements Session. What somebody who ignores the lock writes during
// the restore itself cannot be told from our own writing: raced is never set.
func (s *contentSession) Restore(ctx context.Context, family rules.Family, payload []byte) (raced bool, err error) {
	if _, err := s.guard(ctx, family); err != nil {
		return false, err
	}
	delete(s.noted, family)
	if err := s.kernel.restore(ctx, family, payload); err != nil {
		return false, err
	}
	after, err := s.kernel.reader.digest(context.WithoutCancel(ctx), family)
	if err != nil {
		return false, fmt.Errorf("the rules were written, but: %w", err)
	}
	s.noted[family] = after
	return false, nil
}

// RestoreAnyway implements Session.
func (s *contentSession) RestoreAnyway(ctx context.Context, family rules.Family, payload []byte) error {
	if err := s.renew(ctx, family); err != nil {
		return err
	}
	_, err := s.Restore(ctx, family, payload)
	return err
}
