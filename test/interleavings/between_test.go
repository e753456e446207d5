package interleavings

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/internal/here"
	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// An intruded is a kernel in which an owner commits between each read of canaryd and its write.
type intruded struct {
	*iptables.Kernel
	stage  *stage
	path   path
	mutant mutant
	rng    *rand.Rand
	budget atomic.Int64 // number of further commits
	found  atomic.Bool  // there is a violation

	// The loop owns the following fields until the daemon has ended.
	commits, waited, stale, raced int
	violations                    []string
}

// An intrudedSession is a session of the kernel. A mutant's inner session begins at its write.
type intrudedSession struct {
	iptables.Session
	kernel *intruded
	late   chan struct{} // closed when an owner that waits for the lock is done; nil: none waits
}

func (k *intruded) Begin(ctx context.Context) (iptables.Session, error) {
	if k.mutant == unlocked {
		return &intrudedSession{kernel: k}, nil
	}
	inner, err := k.Kernel.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &intrudedSession{Session: inner, kernel: k}, nil
}

// intrude makes an owner of the rules commit right before canaryd writes them. If canaryd holds
// the lock, the owner must wait.
func (s *intrudedSession) intrude(payloads []iptables.Payload) {
	k := s.kernel
	owners := slices.DeleteFunc(slices.Clone(k.stage.owners), func(o *owner) bool {
		return !slices.ContainsFunc(payloads, func(p iptables.Payload) bool { return hurts(p[o.family]) })
	})
	if len(owners) == 0 || k.budget.Add(-1) < 0 {
		return
	}
	k.commits++
	done, o, rng := make(chan struct{}), owners[k.rng.IntN(len(owners))], rand.New(rand.NewPCG(k.rng.Uint64(), 10))
	go func() { o.commit(rng); close(done) }()
	if k.path != legacy || k.mutant == unlocked {
		<-done
		return
	}
	s.late = done
	k.waited++
	testkit.Pass(k.stage, 20*time.Millisecond, "that the owner waits for the lock; Close looks again")
	select {
	case <-done:
		k.violations = append(k.violations, "an owner wrote while canaryd held the lock")
	default:
	}
}

// hurts reports whether scripts write the chains that kube-proxy writes in each sync.
func hurts(scripts []iptables.Script) bool {
	return slices.ContainsFunc(scripts, func(s iptables.Script) bool {
		return s.Table == rules.Nat && slices.Contains(s.Declare, "KUBE-SERVICES")
	})
}

func (s *intrudedSession) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	if s.kernel.mutant == unlocked {
		return s.kernel.Kernel.Read(ctx, f)
	}
	return s.Session.Read(ctx, f)
}

func (s *intrudedSession) Restore(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
	s.intrude(payloads)
	k := s.kernel
	newest := k.newest()
	var written map[rules.Family]iptables.Written
	switch k.mutant {
	case unguarded:
		written = silently(s.Session.RestoreAnyway(ctx, payloads...))
	case unlocked:
		inner, err := k.Kernel.Begin(ctx)
		if err != nil {
			return map[rules.Family]iptables.Written{rules.IPv4: {Err: err}, rules.IPv6: {Err: err}}
		}
		defer inner.Close()
		for _, f := range rules.Families() {
			_, _ = inner.Read(ctx, f) // the restore fails with the same error
		}
		written = silently(inner.RestoreAnyway(ctx, payloads...))
	default:
		written = s.Session.Restore(ctx, payloads...)
	}
	k.compare(newest, written)
	return written
}

func (s *intrudedSession) RestoreAnyway(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
	if s.kernel.mutant == unlocked {
		return s.Restore(ctx, payloads...)
	}
	s.intrude(payloads)
	newest := s.kernel.newest()
	written := s.Session.RestoreAnyway(ctx, payloads...)
	s.kernel.compare(newest, written)
	return written
}

// silently removes the reports of races.
func silently(written map[rules.Family]iptables.Written) map[rules.Family]iptables.Written {
	for f, w := range written {
		w.Raced = false
		written[f] = w
	}
	return written
}

// newest returns the chains of nat that are as kube-proxy wrote them last.
func (k *intruded) newest() map[place][]rules.Rule {
	found := map[place][]rules.Rule{}
	for _, o := range k.stage.owners {
		if !o.mu.TryLock() {
			continue // that owner waits for the lock
		}
		set, err := savefile.Parse(section(rules.Nat, o.wanted()[rules.Nat]...))
		o.mu.Unlock()
		if err != nil {
			k.violations = append(k.violations, err.Error())
			continue
		}
		now := k.nat(o.family)
		for _, c := range set[rules.Nat].Chains {
			if standing := content(now.Chain(c.Name)); len(standing) > 0 && rules.EqualRules(standing, c.Rules) {
				found[place{o.family, rules.Nat, c.Name}] = standing
			}
		}
	}
	return found
}

func (k *intruded) nat(f rules.Family) *rules.Table {
	set, err := scenario.Tables(context.Background(), k.stage.Programs, f)
	if err != nil {
		k.violations = append(k.violations, err.Error())
		return nil
	}
	return set[rules.Nat]
}

// compare records a violation if a restore overwrote the newest rules and reported no race.
func (k *intruded) compare(newest map[place][]rules.Rule, written map[rules.Family]iptables.Written) {
	for f, w := range written {
		if errors.Is(w.Err, nft.ErrStale) {
			k.stale++
		}
		if w.Raced {
			k.raced++
			continue
		}
		now := k.nat(f)
		for p, before := range newest {
			if after := content(now.Chain(p.chain)); p.family == f && !rules.EqualRules(before, after) {
				k.found.Store(true)
				k.violations = append(k.violations, fmt.Sprintf("a newer write was written over, and nothing reported a race: %s:\n  was %s\n  is  %s", p, texts(before), texts(after)))
			}
		}
	}
}

// Close lets an owner continue that waits for the lock.
func (s *intrudedSession) Close() error {
	if s.Session == nil {
		return nil
	}
	if s.late == nil {
		return s.Session.Close()
	}
	select {
	case <-s.late:
		s.kernel.violations = append(s.kernel.violations, "an owner wrote while canaryd held the lock")
	default:
	}
	err := s.Session.Close()
	<-s.late
	return err
}

// run runs canaryd's loop and its watchers in this process until the returned function is
// called.
func (k *intruded) run() (d *daemon.Daemon, stop func() string) {
	n := k.stage
	n.Helper()
	selector, err := protect.NewSelector(scenario.Protect)
	n.Must(err)
	hints, writers := watch.NewHints(), &watch.Writers{}
	d = daemon.New(daemon.Config{
		Kernel: k, Hints: hints, Writers: writers,
		Metrics: metrics.NewMetrics(prometheus.NewRegistry(), metrics.MetricsOptions{Families: rules.Families(), Sources: []string{"snapshot"}}),
		Mode:    api.Heal, Source: "snapshot", Protection: selector.Protection(), Canary: canary.DefaultChain,
		PollInterval: 250 * time.Millisecond, Settle: 20 * time.Millisecond, JumpGrace: jumpGrace, MaxStoredAge: 10 * time.Minute,
		Uptime: here.Uptime,
	})
	var log bytes.Buffer
	ctx, cancel := context.WithCancel(klog.NewContext(n.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log)))))
	var all sync.WaitGroup
	all.Go(func() {
		if err := d.Run(ctx); err != nil {
			n.Errorf("Run ended with %v", err)
		}
	})
	run := (&watch.LockWatcher{Path: "/run/xtables.lock", Hints: hints, Writers: writers}).Run
	if k.path != legacy {
		run = (&watch.CommitWatcher{Hints: hints, Writers: writers, Subscribe: func() (watch.CommitSource, error) { return k.Subscribe() }}).Run
	}
	all.Go(func() { _ = run(ctx) }) // it returns nil
	return d, func() string {
		cancel()
		all.Wait()
		n.Must(k.Close())
		return log.String()
	}
}

// intrudes runs episodes in which an owner commits between a read of canaryd and its write, a
// few times in each. It returns the kernel with its counts.
func intrudes(n *nodetest.Node, p path, m mutant, few int) *intruded {
	n.Helper()
	s := newStage(n)
	kernel, err := iptables.Open(n.Context(), iptables.Config{Backend: p.backend(), Canary: canary.DefaultChain, Replay: p.replay()})
	n.Must(err)
	k := &intruded{Kernel: kernel, stage: s, path: p, mutant: m, rng: rand.New(rand.NewPCG(1, 11))}
	s.enough = k.found.Load
	d, stop := k.run()
	defer func() {
		if log := stop(); n.Failed() {
			n.Logf("canaryd's log:\n%s", log)
		}
	}()
	rest := func() error {
		status := d.Status()
		if status.Generation.Rules == 0 || !status.LearningPendingSince.IsZero() {
			return errLags
		}
		return status.Ready()
	}
	n.Until("canaryd to learn", rest)
	s.episodes(few, func(seed uint64) {
		rng := rand.New(rand.NewPCG(seed, 12))
		k.budget.Store(int64(2 + rng.IntN(8)))
		for _, f := range rules.Families() {
			_ = n.Programs.Flush(n.Context(), f, rules.Nat, "") // nft refuses it without a table
			_ = n.Programs.DeleteChains(n.Context(), f, rules.Nat)
		}
		for range rng.IntN(3) {
			s.flush(rng)
		}
	}, rest)
	return k
}

// TestCommitsBetweenReadAndWrite: an owner commits at the worst moment. canaryd overwrites
// nothing newer without reporting it, and in the end all rules are their owner's newest.
func TestCommitsBetweenReadAndWrite(t *testing.T) {
	t.Parallel()
	for _, p := range kernelPaths() {
		t.Run(string(p), func(t *testing.T) {
			nodetest.On(t, p.backend(), func(n *nodetest.Node) {
				k := intrudes(n, p, whole, 2)
				n.Logf("%d commits between a read and a write, %d of them had to wait for the lock; %d stale restores, %d reported as raced", k.commits, k.waited, k.stale, k.raced)
				for _, v := range k.violations {
					n.Error(v)
				}
				if k.commits == 0 || p != legacy && k.stale == 0 {
					n.Error("no writer came in between")
				}
			})
		})
	}
}

// TestTheKernelFindsMissingGuards: without the comparison of the genid, or without the lock,
// canaryd overwrites a commit, and the same checker finds that.
func TestTheKernelFindsMissingGuards(t *testing.T) {
	t.Parallel()
	for m, p := range map[mutant]path{unguarded: nftDirect, unlocked: legacy} {
		t.Run(string(m), func(t *testing.T) {
			nodetest.On(t, p.backend(), func(n *nodetest.Node) {
				k := intrudes(n, p, m, 20) // the first one usually finds it
				if len(k.violations) == 0 {
					n.Errorf("%d commits between a read and a write, and nothing is wrong with canaryd %s", k.commits, m)
				}
			})
		})
	}
}
