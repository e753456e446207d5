package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"sync"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/cluster"
	"github.com/canaryd/canaryd/internal/testkit/netns"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	calm       = 3 * time.Second // of load before the first flush
	recoversIn = time.Minute     // longer than any jump grace, even on a busy machine
)

// A healer puts rules back.
type healer interface {
	// learn makes the rules' owner write, and waits until the healer has learned the rules. A
	// flush right after a write is not tested here.
	learn(ctx context.Context, write func() error) error
	// settled waits until everything is in force.
	settled(ctx context.Context) error
	// heals waits as long as the healer may need after a flush.
	heals(ctx context.Context) error
	// startOver repairs the rest after the healer. That ends the flush's window.
	startOver(ctx context.Context) error
	// stop ends the healer, and returns the processor time that it used.
	stop() (time.Duration, error)
}

// Traffic is the clients' work around the flushes.
type traffic interface {
	// before is called before a flush, and returns when the flush may begin.
	before(ctx context.Context) error
	// after is called after a flush, and returns when all of its effects were seen.
	after(ctx context.Context) error
	// end ends all clients.
	end() error
	// result returns the clients' results. used is the healer's processor time.
	result(used time.Duration) result
}

// A lab is one node during the run.
type lab struct {
	plan
	*cluster.Cluster
	programs scenario.Programs
	dice     *rand.Rand
	healer   healer
	used     time.Duration // processor time of healers that were stopped
	owner    sync.Mutex    // kube-proxy writes one thing at a time; guards Cluster's endpoints
	truth    truth
	windows  []window
	problems []string
	standby  string // --standby of the present canaryd
	costs    []cost
}

// runNode runs one node, and prints its result as JSON.
func runNode(ctx context.Context, text string) error {
	var p plan
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return fmt.Errorf("the plan: %w", err)
	}
	if err := netns.Setup(); err != nil {
		return err
	}
	l := &lab{plan: p, programs: scenario.Programs{With: p.Backend}, dice: rand.New(rand.NewPCG(p.Seed, 0)), standby: p.Standby}
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
	l.turn()
	for i := range l.Cluster.Services() {
		l.truth.First = append(l.truth.First, l.Endpoints(i))
	}
	for i := range cluster.HostPorts {
		l.truth.First = append(l.truth.First, []netip.Addr{cluster.HostPod(i)})
	}
	for i := range cluster.NodePorts {
		l.truth.First = append(l.truth.First, cluster.NodePortPods(i))
	}
	for i := range cluster.Hairpins {
		l.truth.First = append(l.truth.First, []netip.Addr{cluster.HairpinPod(i)})
	}
	if l.healer, err = l.startHealer(ctx); err != nil {
		return result{}, err
	}
	clients, err := l.clients(ctx)
	if err != nil {
		return result{}, err
	}
	err = errors.Join(l.flushes(ctx, clients), clients.end())
	if err == nil && l.ForwardDrop {
		err = l.forward(ctx, "ACCEPT") // for the host ports
	}
	if err == nil {
		err = l.allAnswer(ctx)
	}
	if err != nil {
		l.problems = append(l.problems, err.Error())
	}
	used, err := l.healer.stop()
	if err != nil {
		l.problems = append(l.problems, err.Error())
	}
	return clients.result(l.used + used), nil
}

func (l *lab) startHealer(ctx context.Context) (healer, error) {
	switch l.Healer {
	case byCanaryd:
		return l.startCanaryd(ctx)
	case byMonitor:
		return startMonitor(ctx, l), nil
	case byStale:
		return startStale(l)
	default:
		return nil, fmt.Errorf("there is no healer %q", l.Healer)
	}
}

// flushesPerDaemon is the number of flushes in the view after which canaryd is restarted. It
// takes ten flushes within ten seconds of each other for a fight, and delays its replays.
const flushesPerDaemon = 5

// renew restarts canaryd.
func (l *lab) renew(ctx context.Context) error {
	used, err := l.healer.stop()
	l.used += used
	if err == nil {
		l.turn()
		l.healer, err = l.startHealer(ctx)
	}
	return err
}

// clients starts the clients that the plan requests.
func (l *lab) clients(ctx context.Context) (traffic, error) {
	if l.View {
		return l.startView(ctx)
	}
	return l.startRate(ctx)
}

// Services returns the number of services in the plan. It is valid before there is a cluster.
func (l *lab) Services() int { return l.plan.Services }

// load writes the node's rules.
func (l *lab) load(ctx context.Context) error {
	if l.Mode == inNFTables {
		return errors.Join(l.programs.RestoreNoflush(ctx, rules.IPv4, l.HostPortRules()), runNFT(ctx, l.Native()))
	}
	text, err := l.Rules()
	if err != nil {
		return err
	}
	return l.programs.RestoreNoflush(ctx, rules.IPv4, text)
}

// flushes flushes in each way, in a random order, and changes pods of services in between.
func (l *lab) flushes(ctx context.Context, clients traffic) error {
	kinds, err := l.flushKinds()
	if err == nil {
		err = sleep(ctx, calm)
	}
	if err != nil {
		return err
	}
	end := time.Now().Add(l.For)
	more := func(n int) bool { return time.Now().Before(end) }
	if l.View {
		more = func(n int) bool { return n < len(kinds)*l.FlushesPerKind*l.settings() }
	}
	perDaemon := l.perDaemon(len(kinds))
	for n := 0; more(n); n++ {
		if l.View && l.Healer == byCanaryd && n > 0 && n%perDaemon == 0 {
			if err := l.renew(ctx); err != nil {
				return err
			}
		}
		if n%len(kinds) == 0 {
			l.dice.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
		}
		if n%2 == 0 {
			if err := l.healer.learn(ctx, func() error { return l.change(ctx) }); err != nil {
				return err
			}
		}
		kind := kinds[n%len(kinds)]
		if err := l.flush(ctx, kind, clients); err != nil {
			return fmt.Errorf("%s: %w", kind.name, err)
		}
	}
	return l.healer.settled(ctx)
}

// flush flushes once, while clients connect.
func (l *lab) flush(ctx context.Context, kind flushKind, clients traffic) error {
	err := l.healer.settled(ctx)
	if err == nil && l.ForwardDrop {
		err = l.forward(ctx, "DROP")
	}
	if err == nil {
		err = clients.before(ctx)
	}
	if err != nil {
		return err
	}
	l.windows = append(l.windows, window{Kind: kind.name, Standby: l.standby, From: clock()})
	err = kind.do(ctx, l.programs)
	l.windows[len(l.windows)-1].Done = clock()
	if err != nil {
		return err
	}
	return clients.after(ctx)
}

// forward sets the policy of FORWARD. A flush of rules keeps the policy, and the deletion of its
// table removes it.
func (l *lab) forward(ctx context.Context, policy string) error {
	if err := exec.CommandContext(ctx, "iptables-"+string(l.Backend), "-w", "5", "-P", "FORWARD", policy).Run(); err != nil {
		return fmt.Errorf("setting FORWARD's policy to %s: %w", policy, err)
	}
	return nil
}

// moment returns a random time below limit.
func (l *lab) moment(limit time.Duration) time.Duration {
	return time.Duration(l.dice.Int64N(int64(limit)))
}

// change makes two services exchange a pod, like a sync of kube-proxy. Older rules then lead
// connections to pods of another service.
func (l *lab) change(ctx context.Context) error {
	n := l.Cluster.Services()
	i := l.dice.IntN(n)
	j := (i + 1 + l.dice.IntN(n-1)) % n
	l.owner.Lock()
	defer l.owner.Unlock()
	begin := clock()
	if err := l.exchange(ctx, i, j); err != nil {
		return fmt.Errorf("two services change their pods: %w", err)
	}
	end := clock()
	for _, s := range []int{i, j} {
		l.truth.Changes = append(l.truth.Changes, change{begin, end, s, l.Endpoints(s)})
	}
	return nil
}

// exchange exchanges a pod of two services, like a sync of kube-proxy.
func (l *lab) exchange(ctx context.Context, i, j int) error {
	if l.Mode == inNFTables {
		l.Swap(i, j)
		return runNFT(ctx, l.NativeSync(i, j))
	}
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
	return l.programs.RestoreNoflush(ctx, rules.IPv4, text)
}

// allAnswer connects to each target once at the end, when all rules must be back.
func (l *lab) allAnswer(ctx context.Context) error {
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

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
