package daemon

import (
	"context"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// stepping is a Fake that tells each step of a guarded write before it is
// done; "restored" is between a restore and what follows.
type stepping struct {
	*iptables.Fake
	step func(what string)
}

func (k stepping) Begin(ctx context.Context) (iptables.Session, error) {
	k.step("begin")
	s, err := k.Fake.Begin(ctx)
	return steppingSession{s, k.step}, err
}

type steppingSession struct {
	iptables.Session
	step func(what string)
}

func (s steppingSession) Read(ctx context.Context, family rules.Family) (iptables.Snapshot, error) {
	s.step("read")
	return s.Session.Read(ctx, family)
}

func (s steppingSession) Restore(ctx context.Context, payload iptables.Payload) map[rules.Family]iptables.Written {
	s.step("restore")
	written := s.Session.Restore(ctx, payload)
	s.step("restored")
	return written
}

func (s steppingSession) RestoreAnyway(ctx context.Context, payload iptables.Payload) map[rules.Family]iptables.Written {
	s.step("restore")
	written := s.Session.RestoreAnyway(ctx, payload)
	s.step("restored")
	return written
}

func (s steppingSession) Close() error {
	s.step("close")
	return s.Session.Close()
}
