package daemon

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
)

const (
	// calmFor is how long the last replay must stay in place for a contention to be over.
	// Replays are limited to one in 1.5 to 10 s.
	calmFor = 10 * time.Second
	// undoneKept is how many replays in a row may be undone within calmFor before that counts
	// as a contention. Replays that cost much are limited before.
	undoneKept = 10
	// jumpsDeletedKept is how often jumps may be deleted by name, again as soon as they are
	// repaired, before that counts as a contention. Each round takes --jump-grace, so that it
	// needs no limit.
	jumpsDeletedKept = 2
)

// contention is the loop's knowledge of a process that undoes its replays.
type contention struct {
	limit        *reload.Limiter
	since        time.Time     // zero: replays stay in place
	replays      int           // since then
	work         time.Duration // CPU time of the loop's steps that the limit does not know of
	calmAt       time.Time     // when it is over if nothing happens; zero: there is none
	healed       time.Time     // when the last replay ended
	undone       int           // replays in a row that were undone within calmFor
	jumpsDeleted int           // repairs in a row of jumps that were deleted by name
	displaced    bool          // another process owns the declared chains, for the rest of the run
}

// contended reports whether another process keeps undoing replays.
func (c *contention) contended() bool { return !c.since.IsZero() || c.displaced }

// heals reports whether a loss is answered by a replay.
func (st *state) heals() bool { return st.mode == api.Heal && !st.pause.on() }

// cpu returns the CPU time that this process and its children have used so far; 0 if it is not
// measured.
func (d *Daemon) cpu() time.Duration {
	if d.cfg.CPU == nil {
		return 0
	}
	return d.cfg.CPU()
}

// limited reports whether a replay would follow too soon after many others, and then puts it
// off: heal does nothing yet. The first time that begins a contention.
func (d *Daemon) limited(ctx context.Context, st *state) bool {
	now := time.Now()
	wait := st.contention.limit.Wait(now)
	if wait == 0 {
		return false
	}
	if st.contention.since.IsZero() {
		l := *st.loss // the replay blames again, with the commits until then
		d.blame(ctx, st, &l)
		st.contention.start(ctx, &l)
	}
	st.loss.retry.At = now.Add(wait)
	return true
}

// start begins a contention with the loss that shows it: its record names the process that
// undoes replays.
func (c *contention) start(ctx context.Context, l *loss) {
	c.since, c.replays = time.Now(), 0
	// It ends also if the rules' owner, and no replay, is the last to put them back.
	c.calmAt = c.since.Add(calmFor)
	severity.Warnings(klog.FromContext(ctx)).Info("A process keeps undoing the replays; until it stops, canaryd limits them and does not log each",
		"flush", l.record.ID, "by", flushes.CulpritsText(l.record))
}

// spend charges the limit with the cost of a replay, which began when the daemon had used that
// much CPU time. In a contention it adds the loop's steps since the last replay, and the
// sweeps. The cost of HTTP clients between steps does not count: a client that polls the status
// would delay replays. A sweep next to a step counts twice, which errs to the side of the node.
func (d *Daemon) spend(st *state, used time.Duration) {
	c := &st.contention
	cost := d.cpu() - used
	work := c.work + time.Duration(d.swept.Swap(0))
	c.work = -cost // the step that replays is counted when it ends
	if !c.since.IsZero() {
		cost += work
	}
	c.limit.Spend(time.Now(), cost)
}

// step runs a chore, and notes its cost: in a contention it counts against the limit of
// replays.
func (d *Daemon) step(ctx context.Context, st *state, c *chore) {
	used := d.cpu()
	d.work(ctx, c.name, c.limit, func() { c.do(ctx, st) })
	st.contention.work += d.cpu() - used
}

// countReplay counts a replay that ended, and begins a contention if too many were undone.
func (d *Daemon) countReplay(ctx context.Context, st *state, l *loss) {
	c, now := &st.contention, time.Now()
	stood := now.Sub(c.healed) // for ever, if this is the first
	c.undone++
	if stood > calmFor {
		c.undone = 0
	}
	c.jumpsDeleted++
	if !l.jumpsDeleted || stood > d.cfg.JumpGrace+calmFor {
		c.jumpsDeleted = 0
	}
	c.healed = now
	c.replays++
	if c.since.IsZero() && (c.undone >= undoneKept || c.jumpsDeleted >= jumpsDeletedKept) {
		c.start(ctx, l)
	}
	if c.since.IsZero() {
		return
	}
	c.calmAt = now.Add(calmFor)
	if c.jumpsDeleted > 0 {
		c.calmAt = c.calmAt.Add(d.cfg.JumpGrace)
	}
}

// endContention ends a contention, because the last replay has stayed in force until calmAt.
func (d *Daemon) endContention(ctx context.Context, st *state) {
	c := &st.contention
	severity.Notices(klog.FromContext(ctx)).Info("Replayed rules stay in place again; canaryd no longer limits replays",
		"lasted", pace.Latest(c.healed, c.since).Sub(c.since).Round(time.Millisecond), "replays", c.replays)
	c.since, c.calmAt, c.jumpsDeleted, c.undone = time.Time{}, time.Time{}, 0, 0
}

// flushLog returns the log for lines about one flush. In a contention only -v=2 shows them. A
// drill under way keeps them for its reply.
func (st *state) flushLog(ctx context.Context) klog.Logger {
	log := klog.FromContext(ctx)
	if x := st.drills.Under; x != nil {
		log = x.Tee(log)
	}
	if !st.contention.since.IsZero() {
		return log.V(2)
	}
	return log
}
