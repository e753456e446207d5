package interleavings

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

func TestMain(m *testing.M) {
	nodetest.SideBySide()
	os.Exit(nodetest.Main(m, nodetest.Race()...))
}

// kernelPaths are the paths that a caller can choose. On nft-mixed canaryd itself decides for
// each table.
func kernelPaths() []path { return []path{nftDirect, nftText, legacy} }

// replay returns the path in the notation of iptables.Config and --replay.
func (p path) replay() iptables.Replay {
	if p == nftText {
		return iptables.ReplayText
	}
	return iptables.ReplayAuto
}

// A stage is a network namespace in which a world's stand-ins write to the kernel's tables. A
// seed determines their numbers, and the kernel their order.
type stage struct {
	*nodetest.Node
	owners  []*owner
	pods    []*cni
	flusher *flusher
	count   stageTally
	enough  func() bool // says that no further episode is needed; nil: all are
}

// An owner is a kube-proxy that several goroutines advance.
type owner struct {
	mu sync.Mutex
	*proxy
	steps int
}

// A stageTally counts the deeds on a stage.
type stageTally struct{ episodes, steps, flushes int }

// newStage loads the tables before canaryd starts.
func newStage(n *nodetest.Node) *stage {
	n.Helper()
	s := &stage{Node: n, flusher: &flusher{programs: n.Programs, replaces: func(place) {}}}
	n.Must(load(n.Context(), n.Programs))
	for _, f := range rules.Families() {
		p := newProxy(f, n.Programs)
		for slot := range 3 {
			p.change(slot, false)
		}
		o := &owner{proxy: p}
		o.finish()
		c := &cni{family: f, programs: n.Programs}
		n.Must(c.begin(3))
		s.owners, s.pods = append(s.owners, o), append(s.pods, c)
	}
	if wrong := s.judge(); len(wrong) > 0 {
		n.Fatalf("before any flush:\n%s", strings.Join(wrong, "\n"))
	}
	return s
}

// finish does all of kube-proxy's work, or as much as many tries can.
func (o *owner) finish() {
	for range 300 {
		s, ok := o.next()
		if !ok {
			return
		}
		_ = s.do() // after an error kube-proxy tries again
		o.steps++
	}
}

// commit changes Services, with the partial sync for that.
func (o *owner) commit(rng *rand.Rand) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.change(rng.IntN(slots), rng.IntN(4) == 0)
	o.finish()
}

// podsDo finishes the work of the CNI plugins.
func (s *stage) podsDo() {
	for _, c := range s.pods {
		for _, step := range c.pending {
			_ = step.do() // -N fails if the chain exists
		}
		c.pending = nil
	}
}

// play makes owners, a flusher and a stranger work for a moment.
func (s *stage) play(seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 7))
	long := time.Duration(200+rng.IntN(600)) * time.Millisecond
	pace := []time.Duration{0, 5 * time.Millisecond, 60 * time.Millisecond}[rng.IntN(3)]
	var all sync.WaitGroup
	perform := func(pace time.Duration, act func(rng *rand.Rand)) {
		rng := rand.New(rand.NewPCG(rng.Uint64(), 8))
		all.Go(func() {
			for range testkit.During(s, long, "an episode's play") {
				testkit.Pass(s, time.Duration(rng.ExpFloat64()*float64(pace)), "the pause between two deeds")
				act(rng)
			}
		})
	}
	for _, o := range s.owners {
		perform(pace, func(rng *rand.Rand) {
			o.mu.Lock()
			defer o.mu.Unlock()
			if step, ok := proxyStep(o.proxy, rng); ok {
				_ = step.do() // after an error kube-proxy tries again
				o.steps++
			}
		})
	}
	perform(100*time.Millisecond, func(rng *rand.Rand) { s.flush(rng) })
	perform(200*time.Millisecond, func(rng *rand.Rand) {
		step, _ := stranger(s.Programs, rng)
		_ = step.do() // the rule to delete may be missing
	})
	all.Wait()
	s.flush(rng)
}

// flush runs one complete command of the flusher.
func (s *stage) flush(rng *rand.Rand) {
	for {
		step, _ := s.flusher.next(rng)
		_ = step.do() // nft cannot delete a missing chain
		s.count.flushes++
		if len(s.flusher.pending) == 0 {
			return
		}
	}
}

// renew removes a pod and adds another, in each family.
func (s *stage) renew(rng *rand.Rand) {
	for _, c := range s.pods {
		c.del(rng.IntN(len(c.pods)))
		c.add()
	}
	s.podsDo()
}

// calmFor is the time for which all rules must stay right.
const calmFor = 300 * time.Millisecond

// settle lets all actors finish and kube-proxy look at its canary, until all rules are right
// and stay so.
func (s *stage) settle(seed uint64, rest func() error) {
	s.Helper()
	var since time.Time
	s.Until(fmt.Sprintf("all to be as it ought to be after seed %d", seed), func() error {
		var wrong []string
		for _, o := range s.owners {
			o.mu.Lock()
			o.finish()
			_ = o.poll().do() // it returns none
			if !o.idle() {
				wrong = append(wrong, fmt.Sprintf("kube-proxy of %s is not done", o.family))
			}
			o.mu.Unlock()
		}
		if err := rest(); err != nil {
			wrong = append(wrong, fmt.Sprintf("canaryd is not at rest: %v", err))
		}
		wrong = append(wrong, s.judge()...)
		switch {
		case len(wrong) > 0:
			since = time.Time{}
			return errors.New(strings.Join(wrong, "\n"))
		case since.IsZero():
			since = time.Now()
		}
		if calm := time.Since(since); calm <= calmFor {
			return fmt.Errorf("all has been so for %s only", calm)
		}
		return nil
	})
}

// judge lists the rules that differ from their owner's last write.
func (s *stage) judge() (wrong []string) {
	for i, o := range s.owners {
		set, err := scenario.Tables(s.Context(), s.Programs, o.family)
		if err != nil {
			return []string{err.Error()}
		}
		o.mu.Lock()
		for t, lines := range o.wanted() {
			wrong = append(wrong, o.notNewest(t, lines, set[t])...)
		}
		o.mu.Unlock()
		wrong = append(wrong, s.pods[i].wrong(set[rules.Nat])...)
	}
	return wrong
}

// wrong lists the rules of present pods that nat lacks, and its rules of removed pods.
func (c *cni) wrong(nat *rules.Table) []string {
	var want, got []string
	for _, n := range c.pods {
		want = append(want, podChain(n)+" with 1 rule", podRule(n))
	}
	for _, name := range scenario.ChainNames(nat) {
		chain := nat.Chain(name)
		if strings.HasPrefix(name, "CNI-DN-") {
			got = append(got, fmt.Sprintf("%s with %d rule", name, len(chain.Rules)))
		}
		if name == hostports {
			for _, r := range chain.Rules {
				got = append(got, r.Spec)
			}
		}
	}
	for _, from := range []string{"OUTPUT", "PREROUTING"} {
		want = append(want, from+" "+hostportJump)
		for _, r := range content(nat.Chain(from)) {
			if r.Target == hostports {
				got = append(got, from+" "+r.Spec)
			}
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if slices.Equal(want, got) {
		return nil
	}
	return []string{fmt.Sprintf("in the end the host ports of %s are\n      %s\n  not %s", c.family, strings.Join(got, "\n      "), strings.Join(want, "\n      "))}
}

// lengthOfSoak returns the duration that the environment requests, or 0.
func lengthOfSoak(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv(lengthVariable)
	if text == "" {
		return 0
	}
	long, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("%s: %v", lengthVariable, err)
	}
	return long
}

// episodes plays and settles a few episodes, or as many as the soak's time allows.
func (s *stage) episodes(few int, play func(seed uint64), rest func() error) {
	s.Helper()
	first := uint64(1)
	episode := func() (more bool) {
		seed := first + uint64(s.count.episodes)
		play(seed)
		s.settle(seed, rest)
		s.count.episodes++
		return !s.Failed() && (s.enough == nil || !s.enough())
	}
	if long := lengthOfSoak(s.T); long > 0 {
		first = uint64(time.Now().UnixNano())
		for range testkit.During(s, long, "the soak") {
			if !episode() {
				break
			}
		}
	} else {
		for s.count.episodes < few && episode() {
		}
	}
	for _, o := range s.owners {
		s.count.steps += o.steps
	}
	s.Logf("%d episodes from seed %d: %d steps of owners, %d commands of flushers", s.count.episodes, first, s.count.steps, s.count.flushes)
}

var errLags = errors.New("the generation lags behind")
