package iptablestest

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A session is the Fake's Session.
type session struct {
	f     *Fake
	seen  map[rules.Family]uint64 // the digest that a family's Restore must find
	read  map[rules.Family]bool   // which families were read before
	rider *iptables.Rider         // of the next Restore
	close func() error
	done  bool
}

// Begin opens a session. On legacy it takes the xtables lock for the session's life, or returns
// ErrLocked after LockWait. On nft it fails only after the end of ctx.
func (f *Fake) Begin(ctx context.Context) (iptables.Session, error) {
	f.mu.Lock()
	f.counts.begins++
	wait := f.faults.lockWait
	f.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s := &session{f: f, seen: map[rules.Family]uint64{}, read: map[rules.Family]bool{}}
	if f.backend() == iptables.Legacy {
		if err := f.takeLock(ctx, wait); err != nil {
			return nil, err
		}
	}
	s.close = sync.OnceValue(func() error {
		if f.backend() == iptables.Legacy {
			f.releaseLock()
		}
		return nil
	})
	return s, nil
}

// Read reads one family.
func (s *session) Read(ctx context.Context, family rules.Family) (iptables.Snapshot, error) {
	if s.done {
		return iptables.Snapshot{}, iptables.ErrClosed
	}
	want, noted := s.seen[family]
	delete(s.seen, family)
	snap, err := s.f.read(ctx, family, true)
	if err == nil {
		snap.Moved = s.read[family] && (!noted || snap.Digest != want)
		s.seen[family], s.read[family] = snap.Digest, true
	}
	return snap, err
}

// Writes reports whether the rule has a text or bytes.
func (s *session) Writes(rule rules.Rule) bool {
	_, opaque := rule.Opaque()
	return !opaque || rule.HasBytes()
}

// Text returns the rule: a Fake tries no texts.
func (s *session) Text(_ rules.Family, rule rules.Rule) rules.Rule { return rule }

// Prepare does nothing: a Fake is quick.
func (s *session) Prepare(context.Context, ...iptables.Payload) {}

// RestoreAnyway writes even if another process wrote since the read.
func (s *session) RestoreAnyway(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
	s.rider = nil
	return iptables.InStages(payloads, func(family rules.Family, scripts []iptables.Script) iptables.Written {
		s.note(family)
		_, err := s.restore(ctx, family, scripts)
		return iptables.Written{Raced: true, Err: err}
	})
}

// note notes the present content of a family as read, for a write without a guard.
func (s *session) note(family rules.Family) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	if s.f.has(family) {
		s.seen[family] = s.f.digest(family)
	}
}

// Restore writes payloads as "iptables-restore --noflush" would, one run for each family, unless
// a fault applies. As with the kernel, a family must be read before its first restore and after
// every restore that failed or was raced. On legacy nothing is ever raced.
func (s *session) Restore(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
	commit := s.board()
	all := iptables.InStages(payloads, func(family rules.Family, scripts []iptables.Script) iptables.Written {
		raced, err := s.restore(ctx, family, scripts)
		return iptables.Written{Raced: raced, Err: err}
	})
	for _, w := range all {
		if w.Err != nil || w.Raced {
			return all
		}
	}
	commit()
	return all
}

func (s *session) restore(ctx context.Context, family rules.Family, scripts []iptables.Script) (raced bool, err error) {
	if s.done {
		return false, iptables.ErrClosed
	}
	var text strings.Builder
	if _, err := iptables.Scripts(scripts).WriteTo(&text); err != nil {
		return false, err
	}
	if !slices.ContainsFunc(scripts, func(s iptables.Script) bool { return !s.ByMarks }) {
		s.note(family)
	}
	before, fault, err := s.admit(ctx, family, text.String())
	if err != nil {
		return false, err
	}
	if fault.before != nil {
		fault.before()
	}
	time.Sleep(fault.takes)
	r := &run{
		f: s.f, family: family, noflush: true, lock: func() func() { return func() {} },
		by: nft.Commit{PID: uint32(os.Getpid()), Comm: cut(tool(family) + "-nft-restore"), Own: true},
	}
	switch {
	case fault.restores != 0:
		err = r.refused(fault.reason)
	case fault.lies != 0:
	case fault.swallow != "" && strings.Contains(text.String(), fault.swallow):
	default:
		r.failAt = fault.partial
		script := text.String()
		if fault.misread != "" {
			script = strings.ReplaceAll(script, fault.misread, fault.as)
		}
		err = r.run(script)
	}
	return s.settle(family, before, r.commits, err), err
}

// admit checks that no process wrote since the read. It counts the restore, and the faults that
// apply to a number of restores.
func (s *session) admit(ctx context.Context, family rules.Family, text string) (before uint64, now faults, err error) {
	f := s.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.has(family) {
		return 0, faults{}, iptables.ErrNoFamily
	}
	if err := ctx.Err(); err != nil {
		return 0, faults{}, err
	}
	before = f.digest(family)
	if seen, read := s.seen[family]; !read || seen != before {
		return 0, faults{}, nft.ErrStale
	}
	f.counts.restores++
	f.payloads[family] = append(f.payloads[family], text)
	now = f.faults
	f.faults.partial = 0
	if f.faults.restores > 0 {
		f.faults.restores--
	}
	if now.restores == 0 && f.faults.lies > 0 {
		f.faults.lies--
	}
	return before, now, nil
}

// settle reports whether another process wrote since before. It accounts for canaryd's own
// commits, so that they make no later restore stale.
func (s *session) settle(family rules.Family, before uint64, commits int, err error) (raced bool) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	now := s.f.digest(family)
	switch {
	case s.f.backend() == iptables.Legacy && err != nil:
		delete(s.seen, family)
	case s.f.backend() == iptables.Legacy:
		s.seen[family] = now
	case err != nil || now != before+uint64(commits):
		clear(s.seen)
		return err == nil
	default:
		for other := range s.seen {
			s.seen[other] += uint64(commits)
		}
	}
	return false
}

// refused returns the error of FailRestores.
func (r *run) refused(reason iptables.Reason) *iptables.RestoreError {
	exit := map[iptables.Reason]int{iptables.ReasonMissingChain: 2, iptables.ReasonMissingSet: 2, iptables.ReasonParse: 2, iptables.ReasonIncompatible: 1, iptables.ReasonLock: 4, iptables.ReasonOther: 4}
	return &iptables.RestoreError{
		Reason: reason, Program: r.program(), Exit: exit[reason],
		Stderr: r.versioned() + " injected fault: " + string(reason),
	}
}

// Close releases the lock. It may be called more than once.
func (s *session) Close() error {
	s.done = true
	return s.close()
}

// Own reports whether a commit of that process is a session's.
func (f *Fake) Own(pid uint32) bool { return pid == uint32(os.Getpid()) }
