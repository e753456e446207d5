package daemon

import (
	"context"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// stepping is a Fake that reports each step of a guarded write before the step, with the open
// session. It also reports the ends of a restore and of the session.
type stepping struct {
	*iptablestest.Fake
	step func(what string, s iptables.Session)
}

func (k stepping) Begin(ctx context.Context) (iptables.Session, error) {
	k.step("begin", nil)
	s, err := k.Fake.Begin(ctx)
	return steppingSession{s, k.step}, err
}

type steppingSession struct {
	iptables.Session
	step func(what string, s iptables.Session)
}

func (s steppingSession) Read(ctx context.Context, family rules.Family) (iptables.Snapshot, error) {
	s.step("read", s.Session)
	return s.Session.Read(ctx, family)
}

func (s steppingSession) Restore(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
	s.step("restore", s.Session)
	// Like the Fake, this writes one family after the other.
	written := iptables.InStages(payloads, func(f rules.Family, scripts []iptables.Script) iptables.Written {
		w := s.Session.Restore(ctx, iptables.Payload{f: scripts})[f]
		s.step("written", s.Session)
		return w
	})
	s.step("restored", s.Session)
	return written
}

func (s steppingSession) RestoreAnyway(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
	s.step("restore", s.Session)
	written := s.Session.RestoreAnyway(ctx, payloads...)
	s.step("restored", s.Session)
	return written
}

func (s steppingSession) Close() error {
	s.step("close", s.Session)
	err := s.Session.Close()
	s.step("closed", s.Session)
	return err
}
