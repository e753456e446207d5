package interleavings

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// A path is a way of canaryd's writes to the tables.
type path string

const (
	nftDirect path = "nft-direct" // one transaction for all tables of all families
	nftText   path = "nft-text"   // iptables-restore, one transaction for each table
	nftMixed  path = "nft-mixed"  // some tables directly, the others by iptables-restore
	legacy    path = "legacy"     // iptables-restore under the xtables lock
)

func paths() []path { return []path{nftDirect, nftText, nftMixed, legacy} }

func (p path) backend() iptables.Backend {
	if p == legacy {
		return iptables.Legacy
	}
	return iptables.NFT
}

// A world is the kernel for canaryd: a Fake to which other programs write at any point. It
// decides that by its own random numbers, so that the same seed makes the same story. One
// goroutine at a time uses it: canaryd's loop, or the test while the loop waits.
type world struct {
	turns atomic.Int64 // see turn
	*iptablestest.Fake
	path   path
	mutant mutant
	seed   uint64
	rng    *rand.Rand
	ledger *ledger
	began  time.Time
	hints  *watch.Hints
	cast   []*actor

	density float64 // likelihood that an actor acts at a point
	budget  int     // number of further acts
	naps    float64 // likelihood that a point takes time
	deaf    float64 // likelihood that a hint is lost

	still   int           // above 0: no actor can act now
	driving bool          // the test's goroutine acts
	hinted  bool          // a hint is due when it is done
	dozing  time.Time     // since when canaryd's loop is within a step; zero: it is not
	dozed   time.Duration // the sum of such times before
	session bool          // canaryd has a session
	holds   bool          // canaryd holds the xtables lock
	queue   []*actor
	story   []string
	count   tally
	onRead  func(iptables.Snapshot) // receives canaryd's reads; nil: nothing does
}

// A tally has the counts of a world.
type tally struct {
	steps, within, between, restores, raced, stale, bridged, merged, noticed, replays, doubled, staged int
	told, untold                                                                                       int // flushes of saved rules that canaryd had read, or not
}

func (t *tally) add(o tally) {
	t.steps += o.steps
	t.within += o.within
	t.between += o.between
	t.restores += o.restores
	t.raced += o.raced
	t.stale += o.stale
	t.bridged += o.bridged
	t.merged += o.merged
	t.noticed += o.noticed
	t.replays += o.replays
	t.doubled += o.doubled
	t.staged += o.staged
	t.told += o.told
	t.untold += o.untold
}

// String returns the numbers for a closing note.
func (t tally) String() string {
	return fmt.Sprintf("%d steps of others (%d inside of a step of canaryd's, %d of them between its read and its proof), %d replays, %d restores (%d stale, %d in two stages), %d newer writes written over and reported as raced, %d chains bridged with older rules, %d with a pod that was added meanwhile, %d full syncs of kube-proxy after a flush, %d jumps doubled by an owner between its check and its insertion, %d flushes of saved rules that were read before and %d that were not",
		t.steps, t.within, t.between, t.replays, t.restores, t.stale, t.staged, t.raced, t.bridged, t.merged, t.noticed, t.doubled, t.told, t.untold)
}

func newWorld(p path, m mutant, seed uint64, protects func(string) bool) *world {
	w := &world{
		Fake: iptablestest.NewFake(p.backend()), path: p, mutant: m, seed: seed,
		rng: rand.New(rand.NewPCG(seed, 6)), hints: watch.NewHints(), began: time.Now(),
	}
	w.ledger = newLedger(w.Fake, protects, w.awake)
	source := watch.SourceNFT
	if p == legacy {
		source = watch.SourceLock
	}
	w.OnUnlock(func() { w.hint(source) })
	w.OnCommit(func(c nft.Commit) {
		w.hint(source)
		if c.PID == uint32(os.Getpid()) {
			w.ledger.observe(byCanaryd)
			w.point("after a commit of canaryd's")
		}
	})
	w.BeforeRestore(func() { w.point("between the check and the restore") })
	return w
}

// hint gives a hint. While the test acts it waits, because canaryd would wake up at the same
// time.
func (w *world) hint(source watch.Source) {
	switch {
	case w.rng.Float64() < w.deaf: // only the poll is left
	case w.driving:
		w.hinted = true
	default:
		w.hints.Give(source)
	}
}

// turn is called before a goroutine sleeps and after another one woke up. By the bubble's clock
// only one of them runs at a time. The race detector must still see that one reads the other's
// writes.
func (w *world) turn() { w.turns.Add(1) }

// point is a place at which another actor may act.
func (w *world) point(where string) {
	w.turn()
	if w.still > 0 {
		return
	}
	if w.rng.Float64() < w.naps {
		w.dozing = time.Now()
		nap := w.nap()
		time.Sleep(nap)
		w.turn()
		w.dozing, w.dozed = time.Time{}, w.dozed+nap
	}
	for w.budget > 0 && w.rng.Float64() < w.density {
		w.budget--
		w.count.within++
		if w.session {
			w.count.between++
		}
		w.act(w.pick(), where)
	}
}

// nap returns a duration for a step of canaryd: mostly milliseconds.
func (w *world) nap() time.Duration {
	most := []time.Duration{time.Millisecond, 20 * time.Millisecond, 300 * time.Millisecond, 3 * time.Second}[min(3, int(w.rng.ExpFloat64()))]
	return time.Duration(w.rng.Int64N(int64(most)))
}

// awake is a clock that stops while canaryd's loop is within a step.
func (w *world) awake() time.Duration {
	now := time.Now()
	if !w.dozing.IsZero() {
		now = w.dozing
	}
	return now.Sub(w.began) - w.dozed
}

// pick returns an actor that does not wait for the lock.
func (w *world) pick() *actor {
	free := slices.DeleteFunc(slices.Clone(w.cast), func(a *actor) bool { return slices.Contains(w.queue, a) })
	if len(free) == 0 {
		return nil
	}
	total := 0
	for _, a := range free {
		total += a.weight
	}
	n := w.rng.IntN(total)
	for _, a := range free {
		if n -= a.weight; n < 0 {
			return a
		}
	}
	return nil
}

// act makes an actor take one step, or wait for the lock with it.
func (w *world) act(a *actor, where string) {
	if a == nil || slices.Contains(w.queue, a) {
		return
	}
	s, ok := a.next(w)
	if !ok {
		return
	}
	if w.holds && !s.free {
		a.held = append(a.held, s)
		w.queue = append(w.queue, a)
		w.tell("%s (waits for the lock, %s)", s.name, where)
		return
	}
	w.do(a, s, where)
}

func (w *world) do(a *actor, s step, where string) {
	w.still++
	if w.session {
		w.ledger.observe(byCanaryd) // legacy's kernel announces no commits
	}
	err := s.do()
	w.ledger.observe(a.who)
	if a.pods != nil {
		w.ledger.once(a.pods.family)
	}
	w.still--
	w.count.steps++
	if err != nil {
		w.tell("%s: %v (%s)", s.name, err, where)
		return
	}
	w.tell("%s (%s)", s.name, where)
}

// released gives the lock to the actors that wait for it.
func (w *world) released() {
	waited := w.queue
	w.queue = nil
	for _, a := range waited {
		s := a.held[0]
		a.held = nil
		w.do(a, s, "once the lock was free")
	}
}

func (w *world) tell(format string, args ...any) {
	w.story = append(w.story, time.Now().Format("04:05.000000 ")+fmt.Sprintf(format, args...))
}

// Stamp implements daemon.Kernel.
func (w *world) Stamp(ctx context.Context, f rules.Family) (iptables.Stamp, error) {
	w.point("before a stamp")
	return w.Fake.Stamp(ctx, f)
}

// Probe implements daemon.Kernel.
func (w *world) Probe(ctx context.Context, f rules.Family, places []iptables.Place) (iptables.Probed, error) {
	w.point("before a probe")
	defer w.point("after a probe")
	return w.Fake.Probe(ctx, f, places)
}

// Read implements daemon.Kernel. The tables of one read may be of different moments.
func (w *world) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	w.point("before a read")
	first, err := w.Fake.Read(ctx, f)
	if err != nil {
		return first, err
	}
	w.point("in the middle of a read")
	second, err := w.Fake.Read(ctx, f)
	if err != nil {
		w.read(first)
		return first, nil
	}
	cut := w.rng.IntN(len(protect.Always()) + 1)
	for _, t := range protect.Always()[cut:] {
		if table := second.Tables[t]; table != nil {
			first.Tables[t] = table
		} else {
			delete(first.Tables, t)
		}
	}
	w.read(first)
	w.point("after a read")
	return first, nil
}

// read records a read of canaryd.
func (w *world) read(snapshot iptables.Snapshot) {
	w.ledger.read[snapshot.Family] = snapshot.Tables
	if w.onRead != nil {
		w.onRead(snapshot)
	}
}

// Begin implements daemon.Kernel.
func (w *world) Begin(ctx context.Context) (iptables.Session, error) {
	w.point("before a session")
	if w.path == legacy && w.mutant == unlocked {
		w.session = true
		return &unlockedSession{world: w, digest: map[rules.Family]uint64{}}, nil
	}
	inner, err := w.Fake.Begin(ctx)
	if err != nil {
		return nil, err
	}
	w.session, w.holds = true, w.path == legacy
	return &session{Session: inner, world: w}, nil
}

// A session is a session of the Fake, with points.
type session struct {
	iptables.Session
	world *world
}

func (s *session) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	s.world.point("before a guarded read")
	defer s.world.point("after a guarded read")
	snapshot, err := s.Session.Read(ctx, f)
	if err == nil {
		s.world.read(snapshot)
	}
	return snapshot, err
}

func (s *session) Restore(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
	restore := s.Session.Restore
	if s.world.mutant == unguarded && s.world.path != legacy {
		restore = func(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
			written := s.Session.RestoreAnyway(ctx, payloads...)
			for f, w := range written {
				w.Raced = false
				written[f] = w
			}
			return written
		}
	}
	return s.stages(ctx, payloads, restore)
}

func (s *session) RestoreAnyway(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
	return s.stages(ctx, payloads, s.Session.RestoreAnyway)
}

type restorer func(context.Context, ...iptables.Payload) map[rules.Family]iptables.Written

// stages writes payloads in turn.
func (s *session) stages(ctx context.Context, payloads []iptables.Payload, restore restorer) map[rules.Family]iptables.Written {
	s.world.point("before a restore")
	if len(payloads) > 1 {
		s.world.count.staged++
	}
	return iptables.EachStage(payloads, func(stage int, payload iptables.Payload) map[rules.Family]iptables.Written {
		if stage > 0 {
			s.world.point("between the stages of a restore")
		}
		return s.write(ctx, payload, restore)
	})
}

// write writes a payload the way that the world's path does.
func (s *session) write(ctx context.Context, payload iptables.Payload, restore restorer) map[rules.Family]iptables.Written {
	w := s.world
	w.count.restores++
	var written map[rules.Family]iptables.Written
	switch w.path {
	case nftDirect:
		written = s.atonce(ctx, payload, restore)
	case nftMixed:
		written = s.mixed(ctx, payload, restore)
	default:
		written = restore(ctx, payload)
	}
	w.ended(written)
	return written
}

func (w *world) ended(written map[rules.Family]iptables.Written) {
	w.ledger.observe(byCanaryd)
	w.ledger.ended(written)
	for f, one := range written {
		if errors.Is(one.Err, nft.ErrStale) {
			w.count.stale++
		}
		w.tell("canaryd's restore of %s: raced %t, %v", f, one.Raced, one.Err)
	}
	w.point("after a restore")
}

// atonce writes one transaction.
func (s *session) atonce(ctx context.Context, payload iptables.Payload, restore restorer) map[rules.Family]iptables.Written {
	s.world.still++
	defer func() { s.world.still-- }()
	return restore(ctx, payload)
}

// mixed writes some tables in one transaction, and then the others by iptables-restore. Then it
// is too late to find the read stale.
func (s *session) mixed(ctx context.Context, payload iptables.Payload, restore restorer) map[rules.Family]iptables.Written {
	direct, rest := iptables.Payload{}, iptables.Payload{}
	for _, f := range rules.Families() {
		for _, script := range payload[f] {
			if s.world.rng.IntN(2) == 0 {
				direct[f] = append(direct[f], script)
			} else {
				rest[f] = append(rest[f], script)
			}
		}
	}
	written := map[rules.Family]iptables.Written{}
	for f, one := range s.atonce(ctx, direct, restore) {
		written[f] = one
		if one.Err != nil {
			delete(rest, f)
		}
	}
	if len(written) > 0 {
		s.world.ledger.observe(byCanaryd)
	}
	for _, f := range rules.Families() {
		scripts, ok := rest[f]
		if !ok {
			continue
		}
		s.world.point("between the tables of a restore")
		one := restore(ctx, iptables.Payload{f: scripts})[f]
		if _, begun := written[f]; begun && errors.Is(one.Err, nft.ErrStale) {
			one = s.Session.RestoreAnyway(ctx, iptables.Payload{f: scripts})[f]
		}
		written[f] = one
	}
	return written
}

func (s *session) Close() error {
	s.world.point("before the end of a session")
	s.world.session, s.world.holds = false, false
	err := s.Session.Close()
	s.world.released()
	return err
}

// load writes the node's rules before canaryd starts.
func load(ctx context.Context, programs scenario.Flusher) error {
	text := `*filter
:corp - [0:0]
-A corp -j RETURN
-A INPUT -i lo -j ACCEPT
-A FORWARD -i tun0 -j ACCEPT
COMMIT
*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*nat
-A POSTROUTING -o wg0 -j MASQUERADE
COMMIT
`
	for _, f := range rules.Families() {
		if err := programs.RestoreNoflush(ctx, f, text); err != nil {
			return err
		}
	}
	return nil
}
