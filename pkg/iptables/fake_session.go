package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// errFakeClosed is returned by a session after Close.
var errFakeClosed = errors.New("the session is closed")

// A fakeSession is the Fake's Session.
type fakeSession struct {
	f     *Fake
	seen  map[rules.Family]uint64 // the mark of each family's last read
	close func() error
	done  bool
}

// Begin opens a session. On legacy it takes the xtables lock for the session's
// life, or returns ErrLocked after LockWait; on nft it only fails if ctx is
// done.
func (f *Fake) Begin(ctx context.Context) (Session, error) {
	f.mu.Lock()
	f.counts.begins++
	wait := f.faults.lockWait
	f.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s := &fakeSession{f: f, seen: map[rules.Family]uint64{}}
	if f.backend() == Legacy {
		if err := f.takeLock(ctx, wait); err != nil {
			return nil, err
		}
	}
	s.close = sync.OnceValue(func() error {
		if f.backend() == Legacy {
			f.releaseLock()
		}
		return nil
	})
	return s, nil
}

// Read reads one family.
func (s *fakeSession) Read(ctx context.Context, family rules.Family) (Snapshot, error) {
	if s.done {
		return Snapshot{}, errFakeClosed
	}
	snap, mark, err := s.f.read(ctx, family, true)
	if err != nil {
		return Snapshot{}, err
	}
	s.seen[family] = mark
	return snap, nil
}

// Restore writes payload as "iptables-restore --noflush" would, faults
// permitting.
func (s *fakeSession) Restore(ctx context.Context, family rules.Family, payload []byte) (raced bool, err error) {
	if s.done {
		return false, errFakeClosed
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	f := s.f
	r := &fakeRun{
		f: f, family: family, noflush: true, lock: func() func() { return func() {} },
		by: Commit{PID: uint32(os.Getpid()), Comm: "iptables-nft-re"},
	}
	if family == rules.IPv6 {
		r.by.Comm = "ip6tables-nft-r"
	}
	was, fault, err := s.admit(family, payload)
	if err != nil {
		return false, err
	}
	if fault.before != nil {
		fault.before()
	}
	if err := fakeWait(ctx, fault.takes); err != nil {
		e := r.kernel(0)
		e.Exit, e.Stderr = -1, "killed: "+err.Error()
		return s.settle(family, was, 0), e
	}
	switch {
	case fault.restores != 0:
		err = r.refused(fault.reason)
	case fault.lies != 0:
	default:
		r.failAt = fault.partial
		err = r.run(string(payload))
	}
	return s.settle(family, was, r.commits), err
}

// admit checks that nobody wrote since the read, counts the restore and uses up
// the faults that count restores.
func (s *fakeSession) admit(family rules.Family, payload []byte) (was uint64, now fakeFaults, err error) {
	f := s.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.has(family) {
		return 0, fakeFaults{}, ErrNoFamily
	}
	was = f.mark(family)
	if seen, read := s.seen[family]; read && seen != was {
		return 0, fakeFaults{}, ErrStale
	}
	f.counts.restores++
	f.payloads[family] = append(f.payloads[family], strings.Clone(string(payload)))
	now = f.faults
	f.faults.partial = 0
	if f.faults.restores > 0 {
		f.faults.restores--
	}
	if now.restores == 0 && f.faults.lies > 0 {
		f.faults.lies--
	}
	return was, now, nil
}

// settle reports whether anybody else wrote since mark was, and takes our own
// commits into account so that they make no later restore stale.
func (s *fakeSession) settle(family rules.Family, was uint64, commits int) (raced bool) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	ours := was + uint64(commits)
	raced = s.f.mark(family) != ours
	for other, seen := range s.seen {
		if seen == was && (other == family || s.f.backend() == NFT) {
			s.seen[other] = ours
		}
	}
	return raced
}

// refused is what FailRestores asked for.
func (r *fakeRun) refused(reason Reason) *RestoreError {
	e := r.kernel(0)
	e.Reason = reason
	e.Exit = map[Reason]int{ReasonMissingChain: 2, ReasonMissingSet: 2, ReasonParse: 2, ReasonLock: 4, ReasonOther: 4, ReasonIncompatible: 1}[reason]
	e.Stderr = fmt.Sprintf("%s injected fault: %s", r.versioned(), reason)
	return e
}

func fakeWait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close lets go of the lock. It may be called more than once.
func (s *fakeSession) Close() error {
	s.done = true
	return s.close()
}
