package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
)

const (
	address  = "127.0.0.1:9475"
	startsIn = 30 * time.Second
	stopsIn  = 15 * time.Second
)

// A daemon is the built canaryd as a healer.
type daemon struct {
	cmd   *exec.Cmd
	log   string
	ended chan error
}

func startDaemon(ctx context.Context, l *lab) (*daemon, error) {
	dir, err := os.MkdirTemp("/run", "soak") // the namespace's own /run: it goes away by itself
	if err != nil {
		return nil, err
	}
	d := &daemon{log: filepath.Join(dir, "canaryd.log"), ended: make(chan error, 1)}
	file, err := os.Create(d.log)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	d.cmd = exec.CommandContext(ctx, l.Canaryd, "run", "--backend="+string(l.Backend), "--state-dir="+filepath.Join(dir, "state"),
		"--socket="+filepath.Join(dir, "canaryd.sock"), "--metrics-bind-address="+address)
	d.cmd.Stdout, d.cmd.Stderr = file, file
	if err := d.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { d.ended <- d.cmd.Wait() }()
	return d, d.until(ctx, startsIn, "canaryd to learn the rules", d.quiet)
}

// learn waits until canaryd has another generation than before, and nothing
// more to learn. That it is quiet says nothing on a busy machine: it may not
// have looked yet.
func (d *daemon) learn(ctx context.Context, write func() error) error {
	before, err := d.status(ctx)
	if err == nil {
		err = write()
	}
	if err != nil {
		return err
	}
	return d.until(ctx, recoversIn, "canaryd to learn what the owner wrote", func(ctx context.Context) error {
		if now, err := d.status(ctx); err != nil {
			return err
		} else if now.Generation.ID == before.Generation.ID {
			return errors.New("the generation is that of before")
		}
		return d.quiet(ctx)
	})
}

func (d *daemon) settled(ctx context.Context) error {
	return d.until(ctx, recoversIn, "canaryd to put everything back", d.quiet)
}

func (d *daemon) heals(context.Context) error { return nil }

func (d *daemon) startOver(context.Context) error { return nil }

// steady is how long it must be so: a flush of many commands is repaired in
// between, too.
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
		case ended := <-d.ended:
			d.ended <- ended
			return fmt.Errorf("canaryd ended by itself: %v\n%s", ended, d.tail())
		default:
		}
		if time.Since(start) > limit {
			return fmt.Errorf("waited %s for %s: %w\n%s", limit, what, err, d.tail())
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// quiet returns nil if nothing is lost and the generation is up to date as far
// as canaryd knows.
func (d *daemon) quiet(ctx context.Context) error {
	s, err := d.status(ctx)
	switch {
	case err != nil:
		return err
	case !s.Healthy:
		return errors.New("not healthy")
	case s.Generation.Rules == 0:
		return errors.New("no generation")
	case !s.CapturePendingSince.IsZero():
		return errors.New("the generation lags behind")
	}
	return nil
}

func (d *daemon) status(ctx context.Context) (scenario.Status, error) {
	var s scenario.Status
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/api/v1/status", nil)
	if err != nil {
		return s, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return s, err
	}
	defer response.Body.Close()
	return s, json.NewDecoder(response.Body).Decode(&s)
}

// stop ends canaryd as a service manager does.
func (d *daemon) stop() (time.Duration, error) {
	_ = d.cmd.Process.Signal(syscall.SIGTERM) // an error says that it has ended
	var err error
	select {
	case err = <-d.ended:
	case <-time.After(stopsIn):
		_ = d.cmd.Process.Kill()
		err = errors.Join(fmt.Errorf("no end within %s of SIGTERM", stopsIn), <-d.ended)
	}
	if err != nil {
		err = fmt.Errorf("canaryd: %w\n%s", err, d.tail())
	}
	// Its children are in it: it waits for all of them.
	return d.cmd.ProcessState.UserTime() + d.cmd.ProcessState.SystemTime(), err
}

func (d *daemon) tail() string {
	text, err := os.ReadFile(d.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "\n")
}
