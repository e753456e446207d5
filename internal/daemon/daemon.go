// Package daemon is canaryd without its flags: one loop that notices a flush, replays the lost
// rules, and proves them.
//
// [New] makes a [Daemon] from a [Config], and [Daemon.Run] runs it until its context ends.
// [Daemon.Status], [Daemon.Look], [Daemon.Watch] and [Daemon.Flush] report; [Daemon.Restore],
// [Daemon.Pause], [Daemon.Drill], [Daemon.Dismiss] and [Daemon.Cleanup] act. [Daemon.Alive] says
// whether the loop hangs. The servers of internal/control, internal/web and internal/sdnotify call
// these methods.
//
// The loop is one goroutine with one state. The table of chores (newChores) lists its steps in the
// order of their urgency, and the loop runs the first step that is due. A flush takes this way:
//
//   - A hint of pkg/watch or the poll interval wakes the loop, and lookEverywhere probes the marks.
//   - take receives the finding of each table and sets its verdict. A loss opens a flush record
//     (openLoss).
//   - The standby opens its copy of nat, so that new connections reach their services meanwhile.
//   - heal waits until the flusher is quiet (settle). Then a reload.Replayer reads, writes and
//     proves all tables of iptables; healNative does the same for native tables; small ones that
//     were deleted go into the first transaction (rider).
//   - concludeHeal takes up the result: it closes the record, or plans another try.
//   - examine reads the tables again and learns the changes of their owners, rotate gives the marks
//     new nonces, and save writes generation and marks to disk.
//
// In observe mode and in a pause heal records the loss and writes nothing.
//
// A problem of a step is logged and tried again, and the status shows it; Run returns nil when its
// context ends. Requests return the errors of internal/api, such as [api.ErrNoGeneration]. Run a
// Daemon once. Any goroutine may call its other methods: they hand requests to the loop, or read
// the published status.
package daemon

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/journal"
	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/internal/onrequest"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/pods"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// A Reader reads a family in full.
type Reader interface {
	Read(context.Context, rules.Family) (iptables.Snapshot, error)
}

// A Kernel is what the daemon watches and writes: *iptables.Kernel or
// *iptablestest.Fake.
type Kernel interface {
	// Stamp, ProbeOnly and Probe look at a family for next to nothing.
	Stamp(context.Context, rules.Family) (iptables.Stamp, error)
	ProbeOnly(context.Context, rules.Family, []iptables.Place) (iptables.Probed, error)
	Probe(context.Context, rules.Family, []iptables.Place) (iptables.Probed, error)
	Reader
	reload.Beginner
	BackendChecker
	onrequest.TableRemover
	// Own reports whether a writer is this process or a child of it.
	Own(pid uint32) bool
	// Takings returns what the last commits took from the tables, on nft.
	Takings(context.Context) iptables.Takings
	// Before returns, by table, a family as it stood right before a commit that may be a part of a
	// flush and that a read with this digest shows, on nft. Each is returned once.
	Before(f rules.Family, digest uint64) map[rules.TableName]iptables.Snapshot
	Info() iptables.Info
	Families() []rules.Family
}

// A Config is what a Daemon is made with. All of it must be set, unless a field says
// otherwise.
type Config struct {
	Kernel  Kernel
	Hints   *watch.Hints
	Writers *watch.Writers
	// LockHolder finds the process that holds the xtables lock; nil: that is not known.
	LockHolder func() (watch.Writer, bool)
	Metrics    *metrics.Metrics
	Mode       api.Mode
	Source     string // the label of the generation's source
	// Declared is what the declared sources say at the start, nil if there
	// are none. Declarations brings what they say later.
	Declared     *Declaration
	Declarations <-chan Declaration
	// BrokenSources is what is wrong with their files at the start. SourceErrors brings what
	// is wrong later.
	BrokenSources []api.SourceError
	SourceErrors  <-chan []api.SourceError
	Protection    rules.Protection // what is protected besides what sources declare
	Protect       string           // the value of --protect, for people
	Canary        string           // the canary chain's name

	PollInterval time.Duration
	Settle       time.Duration // how long a loss must be quiet before it is judged
	JumpGrace    time.Duration
	DrillEvery   time.Duration // time between two drills by schedule; 0: there are none
	MaxStoredAge time.Duration
	// Pace estimates how long a rule takes to write, until replays have shown it. The zero
	// value is what is usual.
	Pace reload.Pace
	// Uptime returns how long the machine has been up: the function Uptime, but for
	// tests.
	Uptime func() time.Duration

	// FreeMemory, unless it is nil, is called when the daemon has nothing to do any
	// more after it has read or written: it gives memory back.
	FreeMemory func()

	// CPU returns the CPU time that this process and those that it executed have
	// used; nil: replays are limited by their number only.
	CPU func() time.Duration

	// ListenRequired: the node is not healthy while the HTTP address cannot be had.
	ListenRequired bool

	Store   *reload.Store    // nil: nothing is kept
	Journal *journal.Journal // nil: flush records are kept in memory only
	Flows   Tracker          // nil: flows are left alone
	// Attachments are libcni's files; nil: they are not read.
	Attachments pods.Attachments
	Keeper      Keeper                  // nil: a flush may break established connections
	Standby     StandbyConfig           // what translates while nat's rules are missing
	Sets        Sets                    // nil: only chains are put back, not the ipsets that rules depend on
	Disabled    map[rules.Family]string // families that are not there, with the reason

	// LeftOut names the chains of which the rules are not read, because they are too many; nil:
	// there are none.
	LeftOut func() []iptables.LeftOut
	// NativeTables names the native tables that are not to be guarded; nil: they are not known.
	NativeTables func(context.Context) ([]string, error)
	// Native is what is guarded of those.
	Native NativeConfig
	// Node is how Kubernetes calls this node; empty: that is not known.
	Node string
	// Elsewhere opens the backend that is not guarded, to see what became of the rules
	// that an earlier run guarded there; nil: that is never looked at. close ends it.
	Elsewhere func(context.Context, iptables.Backend) (r Reader, close func(), err error)
}

// A Daemon is the one loop. Run it once; every other method may be called from
// any goroutine.
type Daemon struct {
	cfg            Config
	requests       chan request
	sweeps         chan sweep
	status         atomic.Pointer[api.Status]
	made           time.Time    // when it was made; what is counted from it no clock that is set can move
	turned         atomic.Int64 // when the loop last turned, in nanoseconds since made
	edition        int          // of the generation that status describes
	chores         []chore
	running        atomic.Pointer[running] // the step that the loop is at; nil: none
	journalTrouble pace.Shared             // why the last flush record is not on disk
	listenTrouble  pace.Shared             // why HTTP is not served
	// baselineTaken is closed once the loop has what the disk says of the baseline.
	baselineTaken chan struct{}
	confirming    sync.Mutex   // held while a request changes the baseline
	watchers      watchers     // clients that follow the status
	swept         atomic.Int64 // CPU time of sweeps in ns that the limit of replays does not know of
}

// A request is something that the control socket asks of the loop.
type request struct {
	do   step
	done chan struct{}
}

// New returns a Daemon that has not looked at anything yet.
func New(cfg Config) *Daemon {
	d := &Daemon{
		cfg:      cfg,
		requests: make(chan request),
		sweeps:   make(chan sweep, 1),
		made:     time.Now(),

		baselineTaken: make(chan struct{}),
	}
	d.chores = d.newChores()
	d.publish(d.newState())
	return d
}

// Status returns what is known now.
func (d *Daemon) Status() api.Status { return *d.status.Load() }

// ReportListening takes up why HTTP cannot be served, or with nil that it is. Any goroutine
// may call it.
func (d *Daemon) ReportListening(err error) {
	d.listenTrouble.Take(err, time.Now())
}

// begin returns the state with which a run begins: what is configured, and what the last run
// left.
func (d *Daemon) begin(ctx context.Context) *state {
	st := d.newState()
	st.mode, st.declared.broken = d.cfg.Mode, d.cfg.BrokenSources
	if first := d.cfg.Kernel.Evidence(); first.Mixed {
		logBothBackends(ctx, first, first.Backend)
	}
	if d.cfg.Declared != nil {
		st.declare(*d.cfg.Declared, time.Now())
	}
	d.recall(ctx, st)
	d.recallNative(ctx, st)
	recallGuards(st)
	d.recallFlushes(ctx, st)
	st.settleEarlier()
	d.scheduleDrill(st, time.Now())
	d.cfg.Metrics.SetBackend(d.cfg.Kernel.Info())
	return st
}

// Run looks, heals and learns until ctx ends. It leaves canaries, witnesses
// and rules in place, and what it knows on disk.
func (d *Daemon) Run(ctx context.Context) error {
	st := d.begin(ctx)
	ctx, stop := context.WithCancel(ctx)
	var background sync.WaitGroup
	defer background.Wait() // ctx has ended by then
	if d.cfg.Journal != nil {
		background.Go(func() { d.cfg.Journal.Run(func(err error) { d.reportJournal(ctx, err) }) })
		defer d.cfg.Journal.Close()
	}
	found := make(chan iptables.Evidence)
	check := backendCheck{kernel: d.cfg.Kernel, last: d.cfg.Kernel.Evidence(), wait: checkBackendEvery}
	background.Go(func() { check.run(ctx, found) })
	defer close(d.sweeps)
	background.Go(func() { d.runSweeps(ctx) })
	baselines := make(chan baseline.Known, 1)
	go func() { baselines <- d.loadBaseline() }()
	defer stop() // first of all: a step that panics is to end canaryd, not to wait for the background

	tick := time.NewTicker(d.cfg.PollInterval)
	defer tick.Stop()
	wake := time.NewTimer(0)
	defer wake.Stop()
	for {
		hints := d.cfg.Hints.C()
		if st.looking.woken {
			hints = nil // the looks that are planned answer them
		}
		hinted := false // a hint alone changes nothing that is published
		select {
		case <-ctx.Done():
			d.work(ctx, "save", diskLimit, func() { d.finish(context.WithoutCancel(ctx), st) })
			return nil
		case <-hints:
			hinted = true
			st.looking.hint(time.Now())
		case <-tick.C:
			d.cfg.Hints.Count(watch.SourcePoll)
			st.looking.plan(time.Now())
			d.hintNative(st, time.Now())
		case next := <-d.cfg.Declarations:
			st.declare(next, time.Now())
		case st.declared.broken = <-d.cfg.SourceErrors:
		case evidence := <-found:
			d.takeEvidence(ctx, st, evidence)
		case read := <-baselines:
			d.takeBaseline(ctx, st, read)
		case <-wake.C:
		case r := <-d.requests:
			d.work(ctx, "answer a request", d.settleLimit(), func() { r.do(ctx, st) })
			close(r.done)
		}
		c := d.next(st)
		if c == nil && !hinted {
			d.publish(st)
		}
		for ; c != nil && ctx.Err() == nil; c = d.next(st) {
			d.step(ctx, st, c)
			d.takeLeftOut(ctx, st)
			takeLedTo(ctx, st)
			d.takeLeadsOut(ctx, st)
			d.completeRecords(ctx, st)
			d.closeUnanswered(ctx, st)
			d.publish(st)
		}
		wake.Reset(until(d.wakeAt(st), d.cfg.PollInterval))
		d.beat()
	}
}

// until returns how long the loop may sleep until that time, at most so long.
func until(at time.Time, most time.Duration) time.Duration {
	if at.IsZero() {
		return most
	}
	return min(max(time.Until(at), 0), most)
}

// beat notes for Alive that the loop turns.
func (d *Daemon) beat() { d.turned.Store(int64(time.Since(d.made))) }

// job returns what a replay starts from now.
func (d *Daemon) job(st *state, families ...rules.Family) reload.Job {
	j := reload.Job{
		Families: families, Generation: st.want(), Marks: st.marks.current,
		Quiet: map[rules.Family]bool{}, Claimed: st.own().Claims,
		Quarantine: st.quarantine.rules, Sets: st.sets.known, Pace: st.pace,
	}
	j.LeaveAbsent = func(f rules.Family, t rules.TableName) bool { return d.spares(st, f, t) }
	now := time.Now()
	j.Robbed = st.pods.RobbedNow(now)
	j.Over = func(id rules.TableID, h rules.Jump) bool { return d.graceOver(st, id, h, now) }
	if st.loss != nil {
		j.Memory = st.loss.memory
	}
	j.Purged = func() func(rules.TableID, string, string) bool { return d.purged(st) }
	return j
}

// spares reports whether a table that does not exist gets no marks: on legacy, to write
// to it loads modules, and the kernel takes each packet through it from then on. On nft an
// empty table is all but free, but few nodes have raw and security. Declared rules have to be
// written.
func (d *Daemon) spares(st *state, f rules.Family, t rules.TableName) bool {
	return (d.cfg.Kernel.Info().Backend == iptables.Legacy || protect.OnDemand(t)) && st.declared.now.Generation[f.Table(t)].Bare()
}

// ask runs do between the loop's steps and waits for it.
func (d *Daemon) ask(ctx context.Context, do step) error {
	r := request{do: do, done: make(chan struct{})}
	select {
	case d.requests <- r:
	case <-ctx.Done():
		return ctx.Err()
	}
	<-r.done
	return nil
}
