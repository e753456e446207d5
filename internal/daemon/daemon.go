// Package daemon is canaryd without its flags: one loop that notices a flush, replays the lost
// rules, and proves them.
//
// [New] makes a [Daemon] from a [Config], and [Daemon.Run] runs it until its context ends.
// [Daemon.Status], [Daemon.Look], [Daemon.Watch] and [Daemon.Flush] report; [Daemon.Restore],
// [Daemon.Pause], [Daemon.Drill], [Daemon.Dismiss] and [Daemon.Cleanup] act. [Daemon.Alive]
// says whether the loop hangs. The servers of internal/control, internal/web and
// internal/sdnotify call these methods.
//
// The loop is one goroutine (Run) with one state (state.go). newChores (chores.go) lists its
// steps in the order of their urgency, and the loop runs the first step that is due. A flush of
// iptables' tables passes these functions:
//
//   - Hint: a hint of pkg/watch, or the poll interval, makes lookEverywhere due (look.go).
//     askStamps reads the families' stamps. Where a process may have written, probeUrgent and
//     probe read the marks, and judgeMarks judges them.
//   - Loss: take sets the verdict of each lost table (finding.go). openLossNow opens a flush
//     record, the loss of the state (loss.go).
//   - Standby: openStandby opens the gate of nat's copy, if there is one (standby_gate.go). The
//     copy translates new connections until the proof.
//   - Wait: after many replays limited delays the heal (contention.go). heal (heal.go) waits in
//     settle until the flusher is quiet (settle.go). blame names the processes that may be the
//     flusher (blame.go).
//   - Replay: heal makes a reload.Job (job) and a reload.Replayer (replayer). Replayer.Heal reads
//     all families under guard and composes the lost rules. On nft it does so during the wait. It
//     calls back: beforeWrite saves the new marks (save.go), and rider adds small native tables
//     that were deleted (native_ride.go). Then it writes.
//   - Proof: Replayer.Heal reads again and compares. sweepAfter starts a sweep, which ends the
//     flows that began while nat was lost (flows.go).
//   - Record: concludeHeal takes the result. recordLosses puts the losses into the record
//     (record.go), applyResult updates the tables' state (result.go), and shutStandby shuts the
//     gate. recovered closes the record, and journal keeps it in memory and on disk (history.go).
//     After a failure healFailed plans the next try instead.
//   - Afterwards: examine reads the tables (examine.go), and learn takes their owners' changes into
//     the generation (finding.go). rotate gives the marks new nonces (marks.go). save writes
//     generation and marks to disk (save.go).
//
// A loss can leave the marks in place. Then examine finds it, and takeExamined opens the record
// (examine.go). A jump that was deleted by name first waits for its owner (missing.go). In observe
// mode heal calls observe (observe.go), and in a pause recordPaused (pause.go): both record the
// loss and write no rules.
//
// Native tables have functions of their own, mostly in native_*.go, in this order: lookNative,
// readNative, judgeNative, loseNative, healNative, settleNative, planNative, recordNative,
// writeNative, proveNative, nativeRecovered.
//
// A problem of a step is logged and tried again, and the status shows it; Run returns nil when
// its context ends. Requests return the errors of internal/api, such as [api.ErrNoGeneration].
// Run a Daemon once. Any goroutine may call its other methods: they hand requests to the loop,
// or read the published status.
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

// A Kernel reads, watches and writes the tables: *iptables.Kernel or *iptablestest.Fake.
type Kernel interface {
	// Stamp, ProbeOnly and Probe look at a family for next to nothing.
	Stamp(context.Context, rules.Family) (iptables.Stamp, error)
	ProbeOnly(context.Context, rules.Family, []iptables.Place) (iptables.Probed, error)
	Probe(context.Context, rules.Family, []iptables.Place) (iptables.Probed, error)
	Reader
	reload.Beginner
	BackendChecker
	onrequest.TableRemover
	// Own reports whether a writer is this process or its child.
	Own(pid uint32) bool
	// Takings returns the chains and rules that the last commits took from the tables, on nft.
	Takings(context.Context) iptables.Takings
	// Before returns, by table, a family's states right before commits that may be parts of a
	// flush, on nft. A read with this digest must show the commits. Each state is returned once.
	Before(f rules.Family, digest uint64) map[rules.TableName][]iptables.Snapshot
	Info() iptables.Info
	Families() []rules.Family
}

// A Config holds the settings of a Daemon and the objects that it uses. All fields must be set,
// unless their comments say otherwise.
type Config struct {
	Kernel  Kernel
	Hints   *watch.Hints
	Writers *watch.Writers
	// LockHolder finds the process that holds the xtables lock; nil: that is not known.
	LockHolder func() (watch.Writer, bool)
	Metrics    *metrics.Metrics
	Mode       api.Mode
	Source     string // the label of the generation's source
	// Declared is the content of the declared sources at the start, nil if there are none.
	// Declarations delivers each later content.
	Declared     *Declaration
	Declarations <-chan Declaration
	// BrokenSources are the errors in their files at the start. SourceErrors delivers the
	// errors of later times.
	BrokenSources []api.SourceError
	SourceErrors  <-chan []api.SourceError
	Protection    rules.Protection // protected rules, besides declared ones
	Protect       string           // the value of --protect, for people
	Canary        string           // the canary chain's name

	PollInterval time.Duration
	Settle       time.Duration // how long a loss must be quiet before it is judged
	JumpGrace    time.Duration
	DrillEvery   time.Duration // time between two drills by schedule; 0: there are none
	MaxStoredAge time.Duration
	// Pace estimates how long a rule takes to write, until replays have shown it. The zero
	// value is the usual pace.
	Pace reload.Pace
	// Uptime returns how long the machine has been up: here.Uptime, but for tests.
	Uptime func() time.Duration

	// FreeMemory, unless it is nil, gives memory back. The loop calls it after reads and
	// writes, once it has nothing more to do.
	FreeMemory func()

	// CPU returns the CPU time that this process and its children have used; nil: replays are
	// limited by their number only.
	CPU func() time.Duration

	// ListenRequired: the node is not healthy while HTTP cannot be served.
	ListenRequired bool

	Store   *reload.Store    // nil: nothing is kept
	Journal *journal.Journal // nil: flush records are kept in memory only
	Flows   Tracker          // nil: flows are left alone
	// Attachments are libcni's files; nil: they are not read.
	Attachments pods.Attachments
	Keeper      Keeper                  // nil: a flush may break established connections
	Standby     StandbyConfig           // translates while nat's rules are missing
	Sets        Sets                    // nil: only chains are put back, not the ipsets that rules depend on
	Disabled    map[rules.Family]string // families that are not there, with the reason

	// LeftOut returns the chains whose rules are not read, because they are too many; nil:
	// there are none.
	LeftOut func() []iptables.LeftOut
	// NativeTables names the native tables that are not to be guarded; nil: they are not known.
	NativeTables func(context.Context) ([]string, error)
	// Native says which native tables are guarded.
	Native NativeConfig
	// Node is this node's name in Kubernetes; empty: it is not known.
	Node string
	// Elsewhere opens the backend that is not guarded: canaryd looks there for the rules that
	// an earlier run guarded; nil: it never looks. close ends it.
	Elsewhere func(context.Context, iptables.Backend) (r Reader, close func(), err error)
}

// A Daemon is the one loop. Run it once; any goroutine may call its other methods.
type Daemon struct {
	cfg            Config
	requests       chan request
	sweeps         chan sweep
	copier         *worker // writes the standby's copies
	saver          *worker // writes generations and native tables to disk
	status         atomic.Pointer[published]
	made           time.Time         // when New made it; durations since then ignore a clock that is set
	turned         atomic.Int64      // when the loop last turned, in nanoseconds since made
	edition        int               // of the generation that status describes
	generationID   func() string     // of that generation
	words          []protect.OwnWord // of --protect that name rules themselves
	chores         []chore
	running        atomic.Pointer[running] // the step that the loop is at; nil: none
	journalTrouble pace.Shared             // why the last flush record is not on disk
	listenTrouble  pace.Shared             // why HTTP is not served
	// baselineTaken is closed once the loop has read the baseline from disk.
	baselineTaken chan struct{}
	confirming    sync.Mutex // held while a request changes the baseline
	watchers      watchers   // clients that follow the status
	// elsewhere is CPU time in ns of sweeps, copies and saves that no replay was charged for.
	elsewhere atomic.Int64
}

// A request is a step that another goroutine hands to the loop, such as the control socket's.
type request struct {
	do   step
	done chan struct{}
}

// New returns a Daemon that has not looked at anything yet. Requests wait until Run takes them.
func New(cfg Config) *Daemon {
	d := &Daemon{
		cfg:      cfg,
		requests: make(chan request),
		sweeps:   make(chan sweep, 1),
		copier:   newWorker("write the standby's copy", writeLimit),
		saver:    newWorker("write to disk", diskLimit),
		made:     time.Now(),

		baselineTaken: make(chan struct{}),
	}
	if words, err := protect.Split(cfg.Protect); err == nil {
		d.words = protect.OwnWords(words)
	}
	d.chores = d.newChores()
	d.publish(d.newState())
	return d
}

// Status returns the status that the loop published last.
func (d *Daemon) Status() api.Status { return d.status.Load().complete() }

// ReportListening notes why HTTP cannot be served; nil: it is served. Any goroutine may call
// it.
func (d *Daemon) ReportListening(err error) {
	d.listenTrouble.Take(err, time.Now())
}

// begin returns the state at the start of a run: the configuration, and the stored state of the
// last run.
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

// Run looks, heals and learns until ctx ends. It leaves canaries, witnesses and rules in place,
// and saves its knowledge to disk.
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
	for _, w := range []*worker{d.copier, d.saver} {
		defer close(w.todo)
		background.Go(func() { d.runWorker(w) })
	}
	baselines := make(chan baseline.Known, 1)
	go func() { baselines <- d.loadBaseline() }()
	defer stop() // first: a step that panics must end canaryd, not wait for the background

	tick := time.NewTicker(d.cfg.PollInterval)
	defer tick.Stop()
	wake := time.NewTimer(0)
	defer wake.Stop()
	for {
		hints := d.cfg.Hints.C()
		if st.looking.woken {
			hints = nil // the planned looks answer them
		}
		hinted := false // a hint alone changes nothing that is published
		select {
		case <-ctx.Done():
			d.work(ctx, "save", diskLimit, func() { d.finish(context.WithoutCancel(ctx), st) })
			return nil
		case <-d.copier.done:
			d.work(ctx, "take up written copies", briefLimit, func() { d.endCopying(ctx, st) })
		case <-d.saver.done:
			d.work(ctx, "take up a save", diskLimit, func() { d.endSaving(ctx, st) })
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
			d.work(ctx, "answer a request", d.settleLimit(), func() {
				d.awaitCopying(ctx, st)
				d.awaitSaving(ctx, st)
				r.do(ctx, st)
			})
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
			d.closeUnanswered(ctx, st)
			d.publish(st)
		}
		wake.Reset(until(d.wakeAt(st), d.cfg.PollInterval))
		d.beat()
	}
}

// until returns how long the loop may sleep: until that time, but for most at the longest. A
// zero time means that no chore is planned.
func until(at time.Time, most time.Duration) time.Duration {
	if at.IsZero() {
		return most
	}
	return min(max(time.Until(at), 0), most)
}

// beat notes for Alive that the loop turns.
func (d *Daemon) beat() { d.turned.Store(int64(time.Since(d.made))) }

// job returns a Job for these families, with the present generation, marks, quarantine and
// graces. A Replayer writes by it, and an Examiner judges reads by it.
func (d *Daemon) job(st *state, families ...rules.Family) reload.Job {
	j := reload.Job{
		Families: families, Generation: st.want(), Marks: st.marks.current,
		Quiet: map[rules.Family]bool{}, Claimed: st.own().Claims,
		Quarantine: st.quarantine.Rules(), Sets: st.sets.known, Pace: st.pace,
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

// spares reports whether a missing table gets no marks. On legacy a write to it loads modules,
// and the kernel takes each packet through it from then on. On nft an empty table costs almost
// nothing, but few nodes have raw and security. Declared rules must be written.
func (d *Daemon) spares(st *state, f rules.Family, t rules.TableName) bool {
	return (d.cfg.Kernel.Info().Backend == iptables.Legacy || protect.OnDemand(t)) && st.declared.now.Generation[f.Table(t)].Bare()
}

// ask runs do between the loop's steps and waits for it. It returns an error only if ctx ends
// before the loop takes the request.
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
