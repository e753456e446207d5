package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/canaryd"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
)

const (
	startsIn = 30 * time.Second
	stopsIn  = 15 * time.Second
)

// A daemon is canaryd as a healer.
type daemon struct {
	*canaryd.Process
	standby string // --standby
	native  bool   // kube-proxy's rules are in a native table
}

func startDaemon(ctx context.Context, l *lab) (*daemon, error) {
	dir, err := os.MkdirTemp("/run", "soak") // it ends with the namespace
	if err != nil {
		return nil, err
	}
	p, err := canaryd.Start(exec.CommandContext(ctx, l.Canaryd, append(canaryd.Flags(l.Backend, dir), "--standby="+l.standby)...), filepath.Join(dir, "canaryd.log"))
	if err != nil {
		return nil, err
	}
	d := &daemon{p, l.standby, l.Mode == inNFTables}
	return d, d.until(ctx, startsIn, "canaryd to learn the rules", d.quiet)
}

// learn waits until canaryd has another generation than before write, and nothing more to
// learn. It does not suffice to wait until canaryd is quiet, because on a busy machine it may
// not have noticed the write yet.
func (d *daemon) learn(ctx context.Context, write func() error) error {
	before, err := d.status(ctx)
	begin := time.Now()
	if err == nil {
		err = write()
	}
	if err != nil {
		return err
	}
	return d.until(ctx, recoversIn, "canaryd to learn what the owner wrote", func(ctx context.Context) error {
		now, err := d.status(ctx)
		switch {
		case err != nil:
			return err
		case d.native && !slices.ContainsFunc(now.Native, func(t scenario.NativeStatus) bool { return t.Captured.After(begin) }):
			return errors.New("the native table was not read again")
		case !d.native && now.Generation.ID == before.Generation.ID:
			return errors.New("the generation has not changed")
		}
		return d.quiet(ctx)
	})
}

func (d *daemon) settled(ctx context.Context) error {
	return d.until(ctx, recoversIn, "canaryd to put everything back", d.quiet)
}

func (d *daemon) heals(context.Context) error { return nil }

func (d *daemon) startOver(context.Context) error { return nil }

// steady is how long a state must last to count, because canaryd may also repair between two
// commands of a flush.
const steady = 300 * time.Millisecond

func (d *daemon) until(ctx context.Context, limit time.Duration, what string, is func(context.Context) error) error {
	var since time.Time
	for start := time.Now(); ; {
		err := is(ctx)
		switch {
		case err != nil:
			since = time.Time{}
		case since.IsZero():
			since = time.Now()
		case time.Since(since) > steady:
			return nil
		}
		select {
		case <-d.Ended():
			return fmt.Errorf("canaryd ended by itself: %v\n%s", d.Err(), d.Tail())
		default:
		}
		if time.Since(start) > limit {
			return fmt.Errorf("waited %s for %s: %w\n%s", limit, what, err, d.Tail())
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// quiet returns nil if canaryd reports no loss, and a generation that is up to date.
func (d *daemon) quiet(ctx context.Context) error {
	// The status has a hundred flush records after a while. Writing it 50 times a second would
	// take canaryd longer than all its other work.
	if _, err := canaryd.Get(ctx, "/readyz"); err != nil {
		return err
	}
	s, err := d.status(ctx)
	switch {
	case err != nil:
		return err
	case !s.Healthy:
		return errors.New("not healthy")
	case s.Generation.Rules == 0 || d.native && len(s.Native) == 0:
		return errors.New("no generation")
	case !s.LearningPendingSince.IsZero():
		return errors.New("the generation lags behind")
	}
	// A family or table without rules that translate has no standby.
	for family, standby := range s.Standby {
		if err := isReady(standby, family.String()); err != nil {
			return err
		}
	}
	for _, t := range s.Native {
		if t.Standby != nil {
			if err := isReady(*t.Standby, t.Table); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *daemon) status(ctx context.Context) (scenario.Status, error) {
	var s scenario.Status
	text, err := canaryd.Get(ctx, "/api/v1/status")
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(text, &s)
}

// stop ends canaryd like a service manager.
func (d *daemon) stop() (time.Duration, error) {
	err := d.Stop(stopsIn)
	if err != nil {
		err = fmt.Errorf("canaryd: %w\n%s", err, d.Tail())
	}
	return d.Used(), err
}

// isReady returns nil if a standby is armed, or if none is wanted.
func isReady(s scenario.StandbyStatus, of string) error {
	switch s.State {
	case "off", "idle", "armed":
		return nil
	case "unavailable":
		return fmt.Errorf("the standby of %s is unavailable: %s", of, s.Reason)
	}
	return fmt.Errorf("the standby of %s is %s", of, s.State)
}
