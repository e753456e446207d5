package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/canaryd/canaryd/hack/bench/internal/measure"
	"github.com/canaryd/canaryd/internal/testkit/canaryd"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
)

const (
	// settle is canaryd's --settle: how long the tables must be quiet after a flush. It does
	// not count as part of a heal.
	settle = 20 * time.Millisecond
	// askEvery is the time between status requests if the answers measure the time; idleEvery
	// is that time if a flush record does. Then answers are rare, because they take processor
	// time from the heal.
	askEvery  = 5 * time.Millisecond
	idleEvery = 100 * time.Millisecond
	// atMost is how long one step may take, on a busy machine and with the slowest restore.
	atMost = 3 * time.Minute
	// quietFor is how long a step must be quiet until it counts as finished.
	quietFor = time.Second
)

// A process is a running canaryd.
type process struct {
	*canaryd.Process
}

// start starts canaryd like an operator, and returns when it has learned the rules and is idle.
// learned reports whether it has learned them.
func start(ctx context.Context, program, dir string, backend iptables.Backend, learned func(scenario.Status) bool, more ...string) (*process, error) {
	flags := append(append(canaryd.Flags(backend, dir), "--settle="+settle.String()), more...)
	p, err := canaryd.Start(exec.CommandContext(ctx, program, flags...), filepath.Join(dir, "canaryd.log"))
	if err != nil {
		return nil, err
	}
	d := &process{p}
	if err := d.calm(ctx, learned); err != nil {
		return nil, errors.Join(fmt.Errorf("waiting for canaryd to be ready: %w\n%s", err, d.Tail()), d.stop())
	}
	return d, nil
}

// contentOf identifies the content that canaryd has learned.
func contentOf(s scenario.Status) string {
	id := s.Generation.ID
	for _, t := range s.Native {
		id += " " + t.Generation
	}
	return id
}

// stop ends canaryd and waits for its end.
func (d *process) stop() error { return d.Stop(time.Minute) }

// until requests canaryd's status at these intervals until it is good.
func (d *process) until(ctx context.Context, every time.Duration, good func(scenario.Status) bool) (scenario.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	for {
		select {
		case <-d.Ended():
			return scenario.Status{}, fmt.Errorf("canaryd ended: %w", d.Err())
		case <-ctx.Done():
			return scenario.Status{}, fmt.Errorf("waiting for canaryd's status: %w", ctx.Err())
		case <-time.After(every):
		}
		var status scenario.Status
		text, err := canaryd.Get(ctx, "/api/v1/status")
		if err != nil {
			continue // it does not listen yet
		}
		if err := json.Unmarshal(text, &status); err != nil {
			return status, fmt.Errorf("canaryd's status: %w", err)
		}
		if good(status) {
			return status, nil
		}
	}
}

// calm waits until canaryd is healthy, up to date and good, and stays so.
func (d *process) calm(ctx context.Context, good func(scenario.Status) bool) error {
	var since time.Time
	var id string
	_, err := d.until(ctx, idleEvery, func(s scenario.Status) bool {
		if !s.Healthy || !s.LearningPendingSince.IsZero() || !good(s) || contentOf(s) != id {
			since, id = time.Now(), contentOf(s)
			return false
		}
		return time.Since(since) > quietFor
	})
	return err
}

// spent measures canaryd's use of resources while happen runs. The caller sets Seconds.
func (d *process) spent(happen func() error) (measure.Use, error) {
	pid := d.PID()
	if err := measure.ForgetPeak(pid); err != nil {
		return measure.Use{}, err
	}
	user, system, err := measure.Times(pid)
	if err != nil {
		return measure.Use{}, err
	}
	if err := happen(); err != nil {
		return measure.Use{}, fmt.Errorf("%w\n%s", err, d.Tail())
	}
	user2, system2, err := measure.Times(pid)
	if err != nil {
		return measure.Use{}, err
	}
	_, peak, err := measure.Memory(pid)
	return measure.Use{UserSeconds: user2 - user, SystemSeconds: system2 - system, MiB: peak}, err
}

// learn measures the time from the end of an owner's write until the status has another
// generation.
func (d *process) learn(ctx context.Context, write func() error) (measure.Use, error) {
	before, err := d.until(ctx, askEvery, func(scenario.Status) bool { return true })
	if err != nil {
		return measure.Use{}, err
	}
	var took time.Duration
	use, err := d.spent(func() error {
		if err := write(); err != nil {
			return err
		}
		written := time.Now()
		_, err := d.until(ctx, askEvery, func(s scenario.Status) bool { return contentOf(s) != contentOf(before) })
		took = time.Since(written)
		return err
	})
	use.Seconds = took.Seconds()
	if err != nil {
		return use, err
	}
	return use, d.calm(ctx, func(scenario.Status) bool { return true })
}

// A rush is a writer that commits 20 times a second, as in a busy cluster.
const (
	rushEvery = 50 * time.Millisecond
	rushFor   = 3 * time.Second
)

// rush measures the longest time without a new generation while an owner keeps writing. That is
// the age of a change when canaryd learns it, apart from the time of the read. The rest of the
// Use is for the whole rush.
func (d *process) rush(ctx context.Context, write func(turn int) error) (measure.Use, error) {
	var longest time.Duration
	use, err := d.spent(func() error {
		ctx, cancel := context.WithTimeout(ctx, rushFor)
		defer cancel()
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error {
			for turn := 0; ctx.Err() == nil; turn++ {
				next := time.Now().Add(rushEvery)
				if err := write(turn); err != nil {
					return err
				}
				time.Sleep(time.Until(next))
			}
			return nil
		})
		group.Go(func() error {
			last, id := time.Now(), ""
			_, err := d.until(ctx, askEvery, func(s scenario.Status) bool {
				longest = max(longest, time.Since(last))
				if s.Generation.ID != id {
					last, id = time.Now(), s.Generation.ID
				}
				return false
			})
			if errors.Is(err, context.DeadlineExceeded) {
				return nil // the rush is over
			}
			return err
		})
		return group.Wait()
	})
	use.Seconds = longest.Seconds()
	if err != nil {
		return use, err
	}
	return use, d.calm(ctx, func(scenario.Status) bool { return true })
}

// rest measures a quiet second, and the memory that is resident then.
func (d *process) rest(ctx context.Context) (measure.Use, error) {
	const second = time.Second
	use, err := d.spent(func() error {
		select {
		case <-ctx.Done():
		case <-time.After(second):
		}
		return ctx.Err()
	})
	if err != nil {
		return use, err
	}
	use.Seconds = second.Seconds()
	use.MiB, _, err = measure.Memory(d.PID())
	return use, err
}

// A healing has the costs of putting rules back. all is everything without the settle time.
// notice is the part until the loss was noticed, and inForce the part until the rules were in
// force, with the settle time. kernel is the kernel's part of that for transactions. proof is
// the proof. replay is the replay of IPv4 alone as canaryd itself measures it, from its guarded
// read to its proof.
type healing struct{ all, notice, inForce, kernel, proof, replay measure.Use }

// heal measures from the flush command's end to the last proof.
func (d *process) heal(ctx context.Context, flush func() error) (healing, error) {
	before, err := replaySeconds(ctx)
	if err != nil {
		return healing{}, err
	}
	known, err := d.until(ctx, askEvery, func(scenario.Status) bool { return true })
	if err != nil {
		return healing{}, err
	}
	var h healing
	proved := func(s scenario.Status) bool {
		return s.Healthy && len(s.Flushes) > len(known.Flushes) && s.Flushes[0].Outcome != "pending"
	}
	var flushed time.Time
	h.all, err = d.spent(func() error {
		if err := flush(); err != nil {
			return err
		}
		flushed = time.Now()
		_, err := d.until(ctx, idleEvery, proved)
		return err
	})
	if err != nil {
		return h, err
	}
	if err := d.calm(ctx, proved); err != nil { // there may be more than one flush record
		return h, fmt.Errorf("%w\n%s", err, d.Tail())
	}
	status, err := d.until(ctx, idleEvery, proved)
	if err != nil {
		return h, err
	}
	first, last := status.Flushes[len(status.Flushes)-len(known.Flushes)-1], status.Flushes[0]
	h.notice.Seconds = max(0, after(first, first.NoticedSeconds).Sub(flushed)).Seconds()
	h.inForce.Seconds = max(0, after(last, last.WrittenSeconds).Sub(flushed)).Seconds()
	h.kernel.Seconds = last.KernelSeconds
	h.proof.Seconds = last.AbsentSeconds - last.WrittenSeconds
	h.all.Seconds = max(0, after(last, last.AbsentSeconds).Sub(flushed)-settle).Seconds()
	since, err := replaySeconds(ctx)
	h.replay.Seconds = since - before
	return h, err
}

// after returns a time that many seconds after a record's first evidence.
func after(r scenario.Record, seconds float64) time.Time {
	return r.Time.Add(time.Duration(seconds * float64(time.Second)))
}

// replaySeconds returns the total time of all replays of iptables' IPv4.
func replaySeconds(ctx context.Context) (float64, error) {
	text, err := canaryd.Get(ctx, "/metrics")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(strings.TrimSpace(line), `canaryd_replay_duration_seconds_sum{family="ipv4"} `); found {
			return strconv.ParseFloat(value, 64)
		}
	}
	return 0, errors.New("canaryd's metrics lack canaryd_replay_duration_seconds_sum")
}

// record records a profile of canaryd and its children with perf, until stop is called. Without
// a prefix it does nothing.
func (d *process) record(ctx context.Context, prefix string) (stop func() error, err error) {
	if prefix == "" {
		return func() error { return nil }, nil
	}
	cmd := exec.CommandContext(ctx, "perf", "record", "-q", "-F", "999", "-g", "--inherit", "-o", prefix+".perf",
		"-p", strconv.Itoa(d.PID()))
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	time.Sleep(300 * time.Millisecond) // perf does not report when it is attached
	return func() error {
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			return err
		}
		_ = cmd.Wait() // it ends with the signal's status
		report := exec.CommandContext(ctx, "perf", "report", "--stdio", "--no-children", "-g", "none", "--percent-limit=0.5", "-i", prefix+".perf")
		text, err := report.Output()
		if err != nil {
			return fmt.Errorf("perf report: %w", err)
		}
		return os.WriteFile(prefix+".txt", text, 0o600)
	}, nil
}
