package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"sync"
	"time"

	"github.com/canaryd/canaryd/internal/netns"
	"github.com/canaryd/canaryd/internal/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/test/internal/cluster"
)

const (
	calm       = 3 * time.Second // of load before the first flush
	recoversIn = time.Minute     // longer than any hook grace, on a busy machine too
)

// A healer puts rules back.
type healer interface {
	// learn lets the rules' owner write, and waits until the healer knows what
	// it wrote: a flush in the very instant after it is not what is tried here.
	learn(ctx context.Context, write func() error) error
	// settled waits until everything is in force.
	settled(ctx context.Context) error
	// between is called when a flush has had its time.
	between(ctx context.Context) error
	// stop ends it and returns the processor time that it took.
	stop() (time.Duration, error)
}

// A lab is one node at work.
type lab struct {
	plan
	*cluster.Cluster
	programs scenario.Programs
	dice     *rand.Rand
	healer   healer
	owner    sync.Mutex // kube-proxy writes one thing at a time; guards Cluster's endpoints
	truth    truth
	windows  []window
	problems []string
}

// runNode plays one node's part and prints its result as JSON.
func runNode(ctx context.Context, text string) error {
	var p plan
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return fmt.Errorf("the plan: %w", err)
	}
	if err := netns.Setup(); err != nil {
		return err
	}
	l := &lab{plan: p, programs: scenario.Programs{With: p.Backend}, dice: rand.New(rand.NewPCG(p.Seed, 0))}
	r, err := l.soak(ctx)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

func (l *lab) soak(ctx context.Context) (result, error) {
	var err error
	if l.Cluster, err = cluster.New(ctx, l.Services()); err != nil {
		return result{}, err
	}
	serving, done := context.WithCancel(ctx)
	wait, err := l.Serve(serving)
	if err != nil {
		done()
		return result{}, err
	}
	defer wait()
	defer done()
	if err := l.load(ctx); err != nil {
		return result{}, err
	}
	for i := range l.Cluster.Services() {
		l.truth.First = append(l.truth.First, l.Endpoints(i))
	}
	for i := range cluster.HostPorts {
		l.truth.First = append(l.truth.First, []netip.Addr{cluster.HostPod(i)})
	}
	switch l.Healer {
	case byCanaryd:
		l.healer, err = startDaemon(ctx, l)
	case byMonitor:
		l.healer = startMonitor(ctx, l)
	case byStale:
		l.healer, err = startStale(l)
	default:
		err = fmt.Errorf("there is no healer %q", l.Healer)
	}
	if err != nil {
		return result{}, err
	}
	client, err := l.startClient(ctx)
	if err != nil {
		return result{}, err
	}
	err = l.flushes(ctx)
	attempts, skipped, clientErr := client.end()
	if err = errors.Join(err, clientErr); err == nil {
		err = l.everybodyAnswers(ctx)
	}
	if err != nil {
		l.problems = append(l.problems, err.Error())
	}
	used, err := l.healer.stop()
	if err != nil {
		l.problems = append(l.problems, err.Error())
	}
	return l.result(attempts, skipped, used), nil
}

// Services returns how many are asked for, before there is a cluster too.
func (l *lab) Services() int { return l.plan.Services }

// load writes the node's rules.
func (l *lab) load(ctx context.Context) error {
	text, err := l.Rules()
	if err != nil {
		return err
	}
	return l.programs.RestoreNoflush(ctx, rules.IPv4, text)
}

// flushes flushes in every way, in an order of the seed's, and lets services
// change their pods in between.
func (l *lab) flushes(ctx context.Context) error {
	kinds, err := flushKinds(l.Backend, l.Kinds)
	if err == nil {
		err = sleep(ctx, calm)
	}
	if err != nil {
		return err
	}
	end := time.Now().Add(l.For)
	for n := 0; time.Now().Before(end); n++ {
		if n%len(kinds) == 0 {
			l.dice.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
		}
		kind := kinds[n%len(kinds)]
		if n%2 == 0 {
			if err := l.healer.learn(ctx, func() error { return l.change(ctx) }); err != nil {
				return err
			}
		}
		if err := errors.Join(l.healer.settled(ctx), sleep(ctx, l.moment(time.Second))); err != nil {
			return err
		}
		l.windows = append(l.windows, window{Kind: kind.name, From: clock()})
		err := kind.do(ctx, l.programs)
		l.windows[len(l.windows)-1].Done = clock()
		if err == nil {
			err = errors.Join(sleep(ctx, time.Second+l.moment(time.Second)), l.healer.between(ctx))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", kind.name, err)
		}
	}
	return l.healer.settled(ctx)
}

// moment returns a time below limit, of the seed's.
func (l *lab) moment(limit time.Duration) time.Duration {
	return time.Duration(l.dice.Int64N(int64(limit)))
}

// change lets two services have one pod of each other's, as kube-proxy writes
// it. From then on, who brings back older rules leads connections to pods of
// another service.
func (l *lab) change(ctx context.Context) error {
	n := l.Cluster.Services()
	i := l.dice.IntN(n)
	j := (i + 1 + l.dice.IntN(n-1)) % n
	l.owner.Lock()
	defer l.owner.Unlock()
	before, err := l.Chains()
	if err != nil {
		return err
	}
	l.Swap(i, j)
	after, err := l.Chains()
	if err != nil {
		return err
	}
	text, err := l.Sync(slices.DeleteFunc(before, func(c string) bool { return slices.Contains(after, c) }))
	if err != nil {
		return err
	}
	begin := clock()
	if err := l.programs.RestoreNoflush(ctx, rules.IPv4, text); err != nil {
		return fmt.Errorf("two services change their pods: %w", err)
	}
	end := clock()
	for _, s := range []int{i, j} {
		l.truth.Changes = append(l.truth.Changes, change{begin, end, s, l.Endpoints(s)})
	}
	return nil
}

// everybodyAnswers asks at every target once, when all is over: eventually
// everything is as it was.
func (l *lab) everybodyAnswers(ctx context.Context) error {
	one := l.clientLoad()
	var errs []error
	for n := range 2 * max(len(one.Services), len(one.HostPorts)) {
		var a attempt
		for start := time.Now(); a.Outcome != answered && time.Since(start) < recoversIn && ctx.Err() == nil; {
			if err := l.In(cluster.Client, func() error { a = one.connect(n); return nil }); err != nil {
				return err
			}
		}
		if _, at := one.target(n); a.Outcome != answered || !l.truth.right(a) {
			errs = append(errs, fmt.Errorf("in the end %s is %s %s", at, a.Outcome, a.Pod))
		}
	}
	return errors.Join(errs...)
}

func (l *lab) clientLoad() load {
	one := load{Rate: l.Rate}
	for i := range l.Cluster.Services() {
		one.Services = append(one.Services, cluster.Service(i))
	}
	for i := range cluster.HostPorts {
		one.HostPorts = append(one.HostPorts, cluster.HostPort(i))
	}
	return one
}

// A client is the process that opens connections.
type client struct {
	cmd      *exec.Cmd
	stdin    io.Closer
	reading  sync.WaitGroup
	attempts []attempt
	skipped  int
	err      error
	stderr   bytes.Buffer
}

func (l *lab) startClient(ctx context.Context) (*client, error) {
	text, err := json.Marshal(l.clientLoad())
	if err != nil {
		return nil, err
	}
	c := &client{cmd: exec.CommandContext(ctx, "/proc/self/exe")}
	c.cmd.Env = append(os.Environ(), clientMarker+"="+string(text))
	c.cmd.Stderr = &c.stderr
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := l.In(cluster.Client, c.cmd.Start); err != nil {
		return nil, fmt.Errorf("starting the client: %w", err)
	}
	c.reading.Go(func() {
		for scan := bufio.NewScanner(stdout); scan.Scan(); {
			if scan.Text() == "skipped" {
				c.skipped++
				continue
			}
			a, err := parseAttempt(scan.Text())
			c.err = errors.Join(c.err, err)
			c.attempts = append(c.attempts, a)
		}
	})
	return c, nil
}

// end stops the client and returns what it has seen, in the order of the
// starts.
func (c *client) end() ([]attempt, int, error) {
	_ = c.stdin.Close() // then it ends; if not, the context's end kills it
	c.reading.Wait()
	if err := c.cmd.Wait(); err != nil {
		return nil, 0, fmt.Errorf("the client: %w: %s", err, c.stderr.String())
	}
	slices.SortFunc(c.attempts, func(a, b attempt) int { return cmp.Compare(a.Start, b.Start) })
	return c.attempts, c.skipped, c.err
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
