package main

import (
	"context"
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A stale healer brings back the rules of the start, regardless of later writes by their owner.
// It shows that this program notices that.
type stale struct {
	lab  *lab
	text string
}

func startStale(l *lab) (*stale, error) {
	text, err := l.Rules()
	return &stale{l, text}, err
}

func (s *stale) learn(_ context.Context, write func() error) error { return write() }

func (s *stale) settled(context.Context) error { return nil }

func (s *stale) startOver(context.Context) error { return nil }

func (s *stale) heals(ctx context.Context) error {
	if err := scenario.Wipe(ctx, s.lab.programs, rules.IPv4); err != nil {
		return fmt.Errorf("restoring what is stale: %w", err)
	}
	return s.lab.programs.RestoreNoflush(ctx, rules.IPv4, s.text)
}

func (s *stale) stop() (time.Duration, error) { return 0, nil }
