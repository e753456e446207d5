package interleavings

import (
	"context"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A mutant is canaryd without one of its guards. The checker must find each.
type mutant string

const (
	whole     mutant = ""          // all guards are in place
	unguarded mutant = "unguarded" // nft: canaryd does not look for writes since its read
	unlocked  mutant = "unlocked"  // legacy: canaryd does not hold the lock from read to proof
)

// An unlockedSession compares a family's content before it writes, without the lock. Other
// actors write between the comparison and the restore.
type unlockedSession struct {
	world  *world
	digest map[rules.Family]uint64
}

func (s *unlockedSession) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	s.world.point("before a guarded read")
	defer s.world.point("after a guarded read")
	snapshot, err := s.world.Fake.Read(ctx, f)
	s.digest[f] = snapshot.Digest
	return snapshot, err
}

func (s *unlockedSession) Writes(rule rules.Rule) bool {
	_, opaque := rule.Opaque()
	return !opaque
}

func (s *unlockedSession) Text(_ rules.Family, rule rules.Rule) rules.Rule { return rule }

func (s *unlockedSession) Prepare(context.Context, ...iptables.Payload) {}

func (s *unlockedSession) Carry(*iptables.Rider) {}

func (s *unlockedSession) Restore(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
	return iptables.EachStage(payloads, func(_ int, p iptables.Payload) map[rules.Family]iptables.Written { return s.restore(ctx, p) })
}

func (s *unlockedSession) restore(ctx context.Context, payload iptables.Payload) map[rules.Family]iptables.Written {
	written := map[rules.Family]iptables.Written{}
	for _, f := range rules.Families() {
		scripts, ok := payload[f]
		if !ok {
			continue
		}
		now, err := s.world.Fake.Probe(ctx, f, nil)
		if err == nil && now.Digest != s.digest[f] {
			err = nft.ErrStale
		}
		if err != nil {
			written[f] = iptables.Written{Err: err}
			continue
		}
		s.world.point("between the check and the restore")
		written[f] = s.atonce(ctx, f, scripts)
		if now, err := s.world.Fake.Probe(ctx, f, nil); err == nil {
			s.digest[f] = now.Digest
		}
	}
	s.world.ended(written)
	return written
}

func (s *unlockedSession) RestoreAnyway(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
	written := iptables.InStages(payloads, func(f rules.Family, scripts []iptables.Script) iptables.Written {
		return s.atonce(ctx, f, scripts)
	})
	s.world.ended(written)
	return written
}

// atonce writes as a program that takes the lock for itself.
func (s *unlockedSession) atonce(ctx context.Context, f rules.Family, scripts []iptables.Script) iptables.Written {
	s.world.still++
	defer func() { s.world.still-- }()
	inner, err := s.world.Fake.Begin(ctx)
	if err != nil {
		return iptables.Written{Err: err}
	}
	defer inner.Close()
	one := inner.RestoreAnyway(ctx, iptables.Payload{f: scripts})[f]
	one.Raced = false
	return one
}

func (s *unlockedSession) Close() error {
	s.world.session = false
	return nil
}
