package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
	"github.com/canaryd/canaryd/pkg/watch"
)

// The stories of this file are random: owners of native tables and flushers act at any point of
// canaryd's work. A ledger finds forbidden writes, silent losses and false records.
// test/interleavings has the same for iptables' tables.

const (
	storyEpisodes = 4
	// storyCalm is longer than each wait of canaryd for native tables: a contention, and the tries
	// after a refusal.
	storyCalm = 45 * time.Second
	// storyRestless is far longer than a world needs to become calm.
	storyRestless = 10 * time.Minute
	// turnsMost is how many points canaryd may pass in one moment.
	turnsMost = 2000
	// proxyPeriod is kube-proxy's syncPeriod.
	proxyPeriod = 30 * time.Second
)

// A nativeStory is the world of one seed. One goroutine at a time uses it: canaryd's loop, or the
// test while the loop waits.
type nativeStory struct {
	met     atomic.Int64 // see meet
	t       *testing.T
	seed    uint64
	rng     *rand.Rand
	k       *fakeNative
	r       *rig
	fake    *iptablestest.Fake
	setup   setup
	owners  []*nativeOwner
	flusher nativeFlusher
	ledger  *nativeLedger
	mutant  bool // the kernel does not compare the genid
	began   time.Time

	density, naps, deaf float64
	budget              int
	still               int
	driving, hinted     bool
	dozing              time.Time
	dozed               time.Duration
	version             int
	pid                 uint32
	author              watch.Writer // of the next commit
	delay               time.Duration
	refused             bool // the kernel refuses a rule, or did in this episode
	missedAny           bool // canaryd has missed commits
	turnAt              time.Time
	turns               int // points at turnAt
	lines               []string
	acts, within        int
	tables              map[rules.Family]rules.Ruleset
}

func (w *nativeStory) tell(format string, args ...any) {
	w.lines = append(w.lines, time.Now().Format("04:05.000000 ")+fmt.Sprintf(format, args...))
}

func (w *nativeStory) guards(id tableid.TableID) bool {
	return id.Family != tableid.ARP && !strings.HasPrefix(id.Name, native.WitnessName)
}

func (w *nativeStory) owner(id tableid.TableID) *nativeOwner {
	return w.owners[slices.IndexFunc(w.owners, func(o *nativeOwner) bool { return o.id == id })]
}

// awake is a clock that stops while canaryd's loop is within a step.
func (w *nativeStory) awake() time.Duration {
	now := time.Now()
	if !w.dozing.IsZero() {
		now = w.dozing
	}
	return now.Sub(w.began) - w.dozed
}

// by sets the process of the next commit.
func (w *nativeStory) by(pid uint32, command string, ancestors ...string) {
	w.k.pid = pid
	w.author = watch.Writer{PID: pid, Comm: "nft", Command: command, Origin: watch.Origin{Ancestors: ancestors}}
}

// committed notes a commit to native tables, as watch does, and gives a hint.
func (w *nativeStory) committed(c nft.Commit) {
	if c.Own {
		w.tell("canaryd commits, genid %d", c.Genid)
		w.ledger.canaryd()
		w.author = watch.Writer{PID: c.PID, Comm: "canaryd"}
	}
	note := w.author
	note.Time, note.Genid, note.Own = time.Now(), c.Genid, c.Own
	writers := w.r.writers
	if w.delay > 0 {
		time.AfterFunc(w.delay, func() { writers.Note(note) })
	} else {
		writers.Note(note)
	}
	w.hint()
}

func (w *nativeStory) hint() {
	switch {
	case w.rng.Float64() < w.deaf: // only the poll is left
	case w.driving:
		w.hinted = true
	default:
		w.r.hints.Give(watch.SourceNFT)
	}
}

// meet is called before a goroutine sleeps and after another one woke up. By the bubble's clock
// only one of them runs at a time. The race detector must still see that one reads the other's
// writes.
func (w *nativeStory) meet() { w.met.Add(1) }

// after waits for so long, and then until canaryd waits.
func (w *nativeStory) after(d time.Duration) {
	w.meet()
	w.r.after(d)
	w.meet()
}

// point is a place at which another process may act.
func (w *nativeStory) point(where string) {
	w.meet()
	defer w.meet()
	if w.still > 0 {
		return
	}
	w.watchTurns(where)
	if w.rng.Float64() < w.naps {
		most := []time.Duration{time.Millisecond, 20 * time.Millisecond, 300 * time.Millisecond, 2 * time.Second}[min(3, int(w.rng.ExpFloat64()))]
		w.dozing = time.Now()
		nap := time.Duration(w.rng.Int64N(int64(most)))
		w.meet()
		time.Sleep(nap)
		w.meet()
		w.dozing, w.dozed = time.Time{}, w.dozed+nap
	}
	for w.budget > 0 && w.rng.Float64() < w.density {
		w.budget--
		w.within++
		w.act(where)
	}
}

// watchTurns finds a loop that works on and on in the same moment.
func (w *nativeStory) watchTurns(where string) {
	if now := time.Now(); now.After(w.turnAt) {
		w.turnAt, w.turns = now, 0
	}
	if w.turns++; w.turns == turnsMost {
		w.ledger.violation("canaryd takes no rest %s", where)
	}
	if w.turns >= turnsMost {
		w.meet()
		time.Sleep(time.Second)
		w.meet()
	}
}

// act makes an owner, the flusher or the node's trouble take one step.
func (w *nativeStory) act(where string) {
	w.still++
	defer func() { w.still-- }()
	w.acts++
	n := w.rng.IntN(100)
	switch {
	case n < 52:
		o := w.owners[w.rng.IntN(len(w.owners))]
		w.tell("%s of %s: %s (%s)", o.comm, o.id.NFT(), o.act(w), where)
	case n < 57:
		w.by(700, "nft add rule arp other c accept", "bash")
		w.k.again(tableOf(tableid.ARP.Table("other"), fmt.Sprint(w.acts)))
		w.ledger.eachChange(func(tableid.TableID, string, string, string) {})
		w.tell("a stranger writes its table (%s)", where)
	case n < 75:
		w.tell("flusher: %s (%s)", w.flusher.act(w), where)
	case n < 82:
		w.tell("node: %s (%s)", w.trouble(), where)
	default:
		w.lull(where)
	}
}

// lull lets canaryd finish its work.
func (w *nativeStory) lull(where string) {
	if w.driving {
		w.driving, w.still = false, w.still-1
		w.r.hints.Give(watch.SourceNFT)
		budget := w.budget
		w.budget = 0
		w.after(1500 * time.Millisecond)
		w.budget = budget
		w.driving, w.still = true, w.still+1
		w.tell("a lull")
	}
}

// ownerCommits commits the edit of an owner.
func (w *nativeStory) ownerCommits(o *nativeOwner, e *nativeEdit, touched map[string]string) error {
	w.by(o.pid, "nft -f -", o.comm)
	w.author.Unread = false
	if err := e.commit(w.k); err != nil {
		return err
	}
	w.ledger.wrote(o, touched, e.was == nil && len(touched) < len(partsOf(o.wanted())))
	return nil
}

// trouble changes a fault of the node.
func (w *nativeStory) trouble() string {
	broken := func(is *error, err error, name string) string {
		if *is != nil {
			*is = nil
			return name + " works again"
		}
		*is = err
		return name + " fails"
	}
	w.k.mu.Lock()
	defer w.k.mu.Unlock()
	switch w.rng.IntN(8) {
	case 0, 1:
		w.k.dropping = !w.k.dropping
		w.missedAny = true
		w.ledger.goBlind(w.k.dropping || w.ledger.blind)
		return fmt.Sprintf("notifications are dropped: %t", w.k.dropping)
	case 2:
		return broken(&w.k.brokenReads, errNativeBroken, "each read")
	case 3:
		said := broken(&w.k.brokenHears, errNativeBroken, "each hearing")
		w.missedAny = true
		w.ledger.goBlind(w.k.brokenHears != nil || w.ledger.blind)
		return said
	case 4:
		return broken(&w.k.brokenWrites, &nft.RefusedError{Errno: syscall.ENOMEM}, "each write")
	case 5:
		w.delay = []time.Duration{0, 5 * time.Millisecond, 400 * time.Millisecond}[w.rng.IntN(3)]
		return fmt.Sprintf("processes are noted after %s", w.delay)
	case 6:
		w.k.takes = []time.Duration{0, 3 * time.Millisecond, 60 * time.Millisecond}[w.rng.IntN(3)]
		return fmt.Sprintf("a read takes %s", w.k.takes)
	}
	w.k.alone = !w.k.alone
	return fmt.Sprintf("a transaction of several tables is refused: %t", w.k.alone)
}

// noTrouble ends all faults.
func (w *nativeStory) noTrouble() {
	w.density, w.naps, w.deaf, w.delay = 0, 0, 0, 0
	w.k.with(func() {
		w.k.dropping, w.k.brokenReads, w.k.brokenHears, w.k.brokenWrites, w.k.takes, w.k.alone = false, nil, nil, nil, 0, false
	})
}

// hears reports whether canaryd hears of each commit.
func (w *nativeStory) hears() (is bool) {
	w.k.with(func() { is = !w.k.dropping && w.k.brokenHears == nil && !w.k.missed })
	return is
}

// A storyKernel is the kernel for the loop: the fake, with points.
type storyKernel struct {
	*fakeNative
	w *nativeStory
}

func (s *storyKernel) Genid() (uint32, error) {
	s.w.point("before a genid")
	return s.fakeNative.Genid()
}

func (s *storyKernel) Hear(genid uint32) ([]native.Commit, bool, error) {
	s.w.point("before a hearing")
	defer s.w.point("after a hearing")
	return s.fakeNative.Hear(genid)
}

func (s *storyKernel) Follow(wanted func(nft.Table) bool) (*native.Ruleset, error) {
	s.w.point("before a read")
	defer s.w.point("after a read")
	return s.fakeNative.Follow(wanted)
}

func (s *storyKernel) Capture(wanted func(nft.Table) bool) (*native.Ruleset, error) {
	s.w.point("before a capture")
	defer s.w.point("after a capture")
	return s.fakeNative.Capture(wanted)
}

func (s *storyKernel) Probe(id tableid.TableID, parts []native.Change) (native.Probe, error) {
	s.w.point("before a probe")
	defer s.w.point("after a probe")
	return s.fakeNative.Probe(id, parts)
}

func (s *storyKernel) Witness(family tableid.Family) (native.Witness, error) {
	s.w.point("before a look at a witness")
	defer s.w.point("after a look at a witness")
	return s.fakeNative.Witness(family)
}

func (s *storyKernel) Write(genid uint32, repairs []native.Repair, witnesses map[tableid.Family]string) ([]string, error) {
	s.w.point("before a write")
	defer s.w.point("after a write")
	if s.w.mutant {
		genid = s.w.fake.Genid()
	}
	left, err := s.fakeNative.Write(genid, repairs, witnesses)
	for _, r := range repairs {
		s.w.tell("canaryd's write of %s, remedy %d: %v", r.Want.ID.NFT(), r.Remedy, err)
	}
	return left, err
}

func (s *storyKernel) Append(b *nft.Batch, repairs []native.Repair, witnesses map[tableid.Family]string) ([]string, error) {
	s.w.point("before a ride")
	defer s.w.point("after the plan of a ride")
	return s.fakeNative.Append(b, repairs, witnesses)
}

func (s *storyKernel) RequestFullSync(genid uint32, t *native.Table) error {
	s.w.point("before the request of a full sync")
	defer s.w.point("after the request of a full sync")
	err := s.fakeNative.RequestFullSync(genid, t)
	s.w.tell("canaryd requests a full sync of %s: %v", t.ID.NFT(), err)
	return err
}

// storyTables are iptables' tables for the loop, with points.
type storyTables struct {
	*iptablestest.Fake
	w *nativeStory
}

func (s *storyTables) Stamp(ctx context.Context, f rules.Family) (iptables.Stamp, error) {
	s.w.point("before a stamp")
	return s.Fake.Stamp(ctx, f)
}

func (s *storyTables) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	s.w.point("before a read of iptables")
	defer s.w.point("after a read of iptables")
	return s.Fake.Read(ctx, f)
}

func (s *storyTables) Begin(ctx context.Context) (iptables.Session, error) {
	s.w.point("before a session")
	session, err := s.Fake.Begin(ctx)
	return &storySession{session, s.w}, err
}

type storySession struct {
	iptables.Session
	w *nativeStory
}

func (s *storySession) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	s.w.point("before a guarded read of iptables")
	defer s.w.point("after a guarded read of iptables")
	return s.Session.Read(ctx, f)
}

func (s *storySession) Restore(ctx context.Context, payloads ...iptables.Payload) map[rules.Family]iptables.Written {
	s.w.point("before a restore of iptables")
	defer s.w.point("after a restore of iptables")
	return s.Session.Restore(ctx, payloads...)
}

// A nativeFlusher takes the rules of others.
type nativeFlusher struct {
	saved   map[tableid.TableID]*native.Table
	pending []func(w *nativeStory) string
}

// act is the flusher's next step.
func (f *nativeFlusher) act(w *nativeStory) string {
	if len(f.pending) > 0 {
		next := f.pending[0]
		f.pending = f.pending[1:]
		return next(w)
	}
	w.pid++
	pid := w.pid
	flush := func(command string, do func()) string {
		who := w.identify(pid, command)
		do()
		w.ledger.took(pid, false)
		return command + who
	}
	var stand []*nativeOwner
	for _, o := range w.owners {
		if w.k.standing(o.id) != nil {
			stand = append(stand, o)
		}
	}
	if len(stand) == 0 {
		return flush("nft flush ruleset", w.k.flushRuleset)
	}
	o := stand[w.rng.IntN(len(stand))]
	table := w.k.standing(o.id)
	switch n := w.rng.IntN(20); {
	case n < 4:
		said := flush("nft flush ruleset", w.k.flushRuleset)
		if w.rng.IntN(3) == 0 {
			must(w.t, w.fake.FlushRuleset())
			said += ", iptables' tables too"
		}
		return said
	case n < 6:
		return flush("nft delete table "+o.id.NFT(), func() { w.k.deleteTable(o.id) })
	case n < 9:
		return flush("nft flush table "+o.id.NFT(), func() { w.k.flushTable(o.id) })
	case n < 11 && o.kind != remakes && len(table.Chains) > 0:
		c := table.Chains[w.rng.IntN(len(table.Chains))]
		return flush("nft flush chain "+o.id.NFT()+" "+c.Name, func() { w.k.flushChain(o.id, c.Name) })
	case n < 13 && o.kind != remakes && o.kind != leavers && len(table.Sets) > 0 && len(table.Sets[0].Elements) > 0:
		return flush("nft flush map "+o.id.NFT()+" "+services, func() { w.k.flushSet(o.id, services) })
	case n < 16:
		if f.saved == nil || w.rng.IntN(3) == 0 {
			w.k.with(func() { f.saved = maps.Clone(w.k.tables) })
			return "saves all tables to a file"
		}
		who := w.identify(pid, "nft -f /etc/nftables.conf")
		w.k.restoreFile(f.saved)
		w.ledger.took(pid, true)
		return "restores the file" + who
	case n < 18:
		f.pending = append(f.pending, func(w *nativeStory) string {
			if w.k.standing(o.id) == nil {
				return "nothing is left to delete"
			}
			return flush("nft delete table "+o.id.NFT()+" (second step)", func() { w.k.deleteTable(o.id) })
		})
		return flush("nft flush table "+o.id.NFT()+" (first step)", func() { w.k.flushTable(o.id) })
	default:
		other := stand[w.rng.IntN(len(stand))]
		return flush("nft -f - deletes "+o.id.NFT()+" and "+other.id.NFT(), func() { w.k.deleteTables(o.id, other.id) })
	}
}

// identify makes the flusher the process of the next commits: a shell's, a unit's, or a
// process that ended before it could be read.
func (w *nativeStory) identify(pid uint32, command string) string {
	switch w.rng.IntN(3) {
	case 0:
		w.by(pid, command, "bash")
		return " (shell)"
	case 1:
		w.by(pid, command)
		w.author.Origin.Unit = "nftables.service"
		return " (nftables.service)"
	}
	w.by(pid, "")
	w.author.Unread = true
	return " (unread)"
}

// deleteTables deletes tables in one commit.
func (k *fakeNative) deleteTables(ids ...tableid.TableID) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
		for _, id := range ids {
			deed(id).Deleted = true
			delete(k.tables, id)
		}
	})
}

// restoreFile runs "nft -f" with a file that flushes the ruleset and writes these tables.
func (k *fakeNative) restoreFile(saved map[tableid.TableID]*native.Table) {
	k.commit(false, func(deed func(tableid.TableID) *native.Deed, c *native.Commit) {
		for id := range k.tables {
			*deed(id) = native.Deed{Genid: c.Genid, Deleted: true}
			delete(k.tables, id)
		}
		for family := range k.witness {
			c.WitnessLost[family] = true
		}
		clear(k.witness)
		for _, t := range saved {
			k.put(t)
			deed(t.ID).Made = k.handle
		}
	})
}

// A storyResult is the outcome of a story.
type storyResult struct {
	violations   []string
	lines        []string
	log          string
	acts, within int
	records      int
	excuses      map[string]int
	heals        int
}

func tellNativeStory(t *testing.T, seed uint64, mutant bool) (result storyResult) {
	synctest.Test(t, func(t *testing.T) { result = nativeStoryInBubble(t, seed, mutant) })
	return result
}

func nativeStoryInBubble(t *testing.T, seed uint64, mutant bool) storyResult {
	w := &nativeStory{t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 9)), k: newFakeNative(), owners: nativeCast(), mutant: mutant, began: time.Now(), pid: 900, version: 3}
	w.ledger = &nativeLedger{w: w, chapters: map[tableid.TableID]map[string]*nativeChapter{}, last: map[tableid.TableID]*native.Table{},
		harmed: map[tableid.TableID]map[string]time.Duration{}, takings: map[tableid.TableID][]nativeTaking{}, filed: map[tableid.TableID]bool{}, excuses: map[string]int{}, outage: map[tableid.TableID]bool{}, made: map[tableid.TableID]time.Duration{}}
	for _, o := range w.owners {
		w.k.put(o.wanted())
		w.ledger.wrote(o, partsOf(o.wanted()), false)
	}
	w.fake = loadedFake(t, iptables.NFT)
	w.setup = setup{deaf: true, cpu: func() time.Duration { return 0 }, guarded: w.k, interposed: &storyKernel{w.k, w}, kernel: &storyTables{w.fake, w}}
	if seed%4 == 0 {
		dir := t.TempDir()
		w.setup.nativeStore = nativestore.New(dir, nativestore.Identity{BootID: "b", NetNS: "n", Release: "6.18"})
	}
	w.fake.OnCommit(func(c nft.Commit) {
		w.r.writers.Note(watch.Writer{Time: time.Now(), Genid: c.Genid, PID: c.PID, Comm: c.Comm, Command: c.Comm + " -F", Own: c.Own})
		w.hint()
	})
	w.start()
	if err := w.r.d.Status().Ready(); err != nil {
		t.Fatalf("not ready after the start: %v\n%s", err, w.r.log)
	}
	w.tables = w.r.tables()
	w.ledger.eachChange(func(tableid.TableID, string, string, string) {})
	w.ledger.capture()
	for episode := range storyEpisodes {
		w.tell("episode %d", episode+1)
		w.play()
		if len(w.ledger.violations) == 0 {
			w.settle()
		}
		if len(w.ledger.violations) > 0 {
			break
		}
		if w.setup.nativeStore != nil && episode < storyEpisodes-1 {
			w.restart()
		}
	}
	result := storyResult{violations: w.ledger.violations, lines: w.lines, log: w.r.log.String(), acts: w.acts, within: w.within,
		records: len(w.r.d.Status().Flushes), excuses: w.ledger.excuses, heals: w.k.count().heals}
	w.meet()
	w.r.stop()
	w.meet()
	return result
}

// start runs a daemon.
func (w *nativeStory) start() {
	w.r = configure(w.t, w.fake, w.setup)
	w.k.with(func() { w.k.onCommit, w.k.unheard, w.k.missed = w.committed, nil, false })
	w.r.begin()
	w.after(3 * time.Second)
}

// restart ends the daemon and runs another one. Others act meanwhile.
func (w *nativeStory) restart() {
	w.tell("canaryd ends")
	w.meet()
	w.r.stop()
	w.meet()
	w.missedAny = true
	w.ledger.goBlind(true)
	w.driving = true
	for range w.rng.IntN(4) {
		w.act("while canaryd is down")
	}
	w.driving, w.hinted = false, false
	w.noTrouble()
	w.tell("canaryd starts")
	w.start()
}

// play plays one episode: all act until the budget is used up.
func (w *nativeStory) play() {
	w.density = []float64{0.02, 0.1, 0.3}[w.rng.IntN(3)]
	w.naps = []float64{0, 0.02, 0.2}[w.rng.IntN(3)]
	w.deaf = []float64{0, 0, 0.3}[w.rng.IntN(3)]
	w.budget = 5 + w.rng.IntN(40)
	pace := []time.Duration{time.Millisecond, 30 * time.Millisecond, 700 * time.Millisecond}[w.rng.IntN(3)]
	for w.budget > 0 {
		w.after(time.Duration(w.rng.ExpFloat64() * float64(pace)))
		for range 1 + w.rng.IntN(3) {
			w.budget--
			w.drive(func() { w.act("while canaryd waits") })
		}
		w.look()
	}
	w.budget = 0
}

// drive runs do on the test's goroutine, and then gives canaryd the hints.
func (w *nativeStory) drive(do func()) {
	w.driving = true
	do()
	w.driving = false
	if w.hinted {
		w.hinted = false
		w.r.hints.Give(watch.SourceNFT)
	}
	w.meet()
	synctest.Wait()
	w.meet()
}

// look compares canaryd's claims with the world.
func (w *nativeStory) look() {
	s := w.r.d.Status()
	if !w.dozing.IsZero() || s.Ready() != nil {
		return
	}
	if w.hears() { // it has read each table since
		w.ledger.goBlind(false)
	}
	if list := w.ledger.unsaid(3 * time.Second); len(list) > 0 {
		w.ledger.violation("canaryd says that it is healthy, and these parts are lost: %s", strings.Join(list, ", "))
	}
}

// settle lets all finish. In the end the world must be right.
func (w *nativeStory) settle() {
	w.noTrouble()
	w.tell("no new trouble")
	w.rest()
	if s := w.r.d.Status(); s.Ready() != nil && slices.ContainsFunc(s.Flushes, func(f api.Flush) bool { return f.Outcome == api.AwaitingDecision }) {
		w.decide()
		w.rest()
	}
	w.judge()
	clear(w.ledger.filed)
	for id := range w.ledger.harmed {
		delete(w.ledger.harmed, id)
	}
}

// rest lets the owners and the flusher finish their work, and canaryd its tries.
func (w *nativeStory) rest() {
	for len(w.flusher.pending) > 0 {
		w.drive(func() { w.still++; w.tell("flusher: %s (to the end)", w.flusher.act(w)); w.still-- })
	}
	start := time.Now()
	for quiet := time.Duration(0); quiet < storyCalm; quiet += proxyPeriod / 4 {
		if time.Since(start) > storyRestless {
			w.ledger.violation("nothing new happens, and the owners do not come to rest")
			return
		}
		w.after(proxyPeriod / 4)
		w.look()
		for _, o := range w.owners {
			if o.kind == proxies {
				w.drive(func() {
					w.still++
					if !o.idle() {
						quiet = 0
					}
					w.tell("%s of %s: %s (to the end)", o.comm, o.id.NFT(), o.sync(w))
					w.still--
				})
			}
		}
	}
}

// decide makes an operator, or the owners, decide about the losses that wait.
func (w *nativeStory) decide() {
	if w.rng.IntN(2) == 0 {
		reply, err := w.r.d.Restore(w.t.Context(), api.RestoreRequest{})
		w.tell("an operator restores: %+v, %v", reply.Native, err)
		return
	}
	list, err := w.r.d.Dismiss(w.t.Context())
	w.tell("an operator dismisses %+v, %v", list, err)
	clear(w.ledger.harmed)
	w.rest()
	for _, o := range w.owners {
		if !o.gone {
			w.drive(func() { w.still++; w.tell("%s: %s (after the decision)", o.id.NFT(), o.remake(w)); w.still-- })
		}
	}
}

// judge records the final violations.
func (w *nativeStory) judge() {
	l, s := w.ledger, w.r.d.Status()
	l.eachChange(func(id tableid.TableID, p, was, is string) {
		l.violation("%s %s changed unseen from %s to %s", id.NFT(), p, was, is)
	})
	excused := false
	for _, d := range l.differences() {
		if strings.Contains(d, "(excused") {
			l.excuses["differs at rest"]++
			excused = true
			w.tell("%s", d)
		} else {
			l.violation("at rest %s", d)
		}
	}
	if err := s.Ready(); err != nil || !s.Healthy || !s.LossSince.IsZero() {
		l.violation("at rest canaryd is not ready: %v, loss since %v", err, s.LossSince)
	}
	l.judgeRecords(s.Flushes)
	if len(l.violations) == 0 && excused { // the owners write everything
		for _, o := range w.owners {
			if !o.gone {
				w.drive(func() { w.still++; w.tell("%s: %s (excused)", o.id.NFT(), o.remake(w)); w.still-- })
			}
		}
		w.rest()
	}
	l.capture()
}

// storySeed and storyLength name the environment variables for one story, and for a duration.
const (
	storySeed   = "CANARYD_SEED"
	storyLength = "CANARYD_SOAK"
)

func (s storyResult) fail(t *testing.T, seed uint64) {
	t.Helper()
	if len(s.violations) == 0 {
		return
	}
	t.Errorf("%s=%d go test ./internal/daemon -run '%s$' plays it again:\n%s", storySeed, seed, t.Name(), strings.Join(s.violations, "\n"))
	if os.Getenv(storySeed) != "" || os.Getenv(storyLength) != "" { // another run may differ
		t.Logf("the story:\n%s\ncanaryd's log:\n%s", strings.Join(s.lines, "\n"), s.log)
	}
}

// TestNativeStories plays random stories of native tables, their owners and flushers.
func TestNativeStories(t *testing.T) {
	if text := os.Getenv(storySeed); text != "" {
		var seed uint64
		if _, err := fmt.Sscan(text, &seed); err != nil {
			t.Fatal(errors.Join(err, errNativeBroken))
		}
		tellNativeStory(t, seed, false).fail(t, seed)
		return
	}
	var all storyResult
	all.excuses = map[string]int{}
	runs, start := 0, time.Now()
	one := func(seed uint64) {
		s := tellNativeStory(t, seed, false)
		runs++
		all.acts, all.within, all.records, all.heals = all.acts+s.acts, all.within+s.within, all.records+s.records, all.heals+s.heals
		for why, n := range s.excuses {
			all.excuses[why] += n
		}
		s.fail(t, seed)
	}
	if text := os.Getenv(storyLength); text != "" {
		long, err := time.ParseDuration(text)
		must(t, err)
		seed := uint64(time.Now().Unix()) * 1000
		for range testkit.During(t, long, "how long stories are told") {
			one(seed)
			seed++
		}
	} else {
		for seed := range uint64(testkit.Size(20, 200)) {
			one(seed)
		}
	}
	t.Logf("%d stories in %s: %d acts, %d within a step of canaryd's, %d replays, %d records, excused: %v",
		runs, time.Since(start).Round(time.Millisecond), all.acts, all.within, all.heals, all.records, all.excuses)
}

// TestNativeStoriesFindAMissingGuard: without the comparison of the genid canaryd overwrites newer
// writes, and the ledger finds that.
func TestNativeStoriesFindAMissingGuard(t *testing.T) {
	const from, most = 70, 60
	for seed := uint64(from); seed < from+most; seed++ {
		s := tellNativeStory(t, seed, true)
		if i := slices.IndexFunc(s.violations, func(v string) bool { return strings.Contains(v, "over the newest") }); i >= 0 {
			t.Logf("found by seed %d: %s", seed, s.violations[i])
			return
		}
	}
	t.Errorf("%d seeds found nothing", most)
}
