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

// contention is the loop's knowledge of a process that undoes its replays of one kind of table.
type contention struct {
	of           string // the kind for the log: iptables or native
	limit        *reload.Limiter
	since        time.Time     // zero: replays stay in place
	replays      int           // since then
	work         time.Duration // CPU time of the loop's steps that the limit does not know of
	spent        time.Duration // CPU time of the present step that the limit knows of
	calmAt       time.Time     // when it is over if nothing happens; zero: there is none
	healed       time.Time     // when the last replay ended
	undone       int           // replays in a row that were undone within calmFor
	jumpsDeleted int           // repairs in a row of jumps that were deleted by name
	displaced    bool          // another process owns the declared chains, for the rest of the run
}

func newContention(of string) contention { return contention{of: of, limit: reload.NewLimiter()} }

// contended reports whether another process keeps undoing replays.
func (c *contention) contended() bool { return !c.since.IsZero() || c.displaced }

// contended reports whether another process keeps undoing replays of any kind of table, for the
// status and for drills.
func (st *state) contended() bool {
	return st.contention.contended() || st.native.contention.contended()
}

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

// limited reports whether a replay would follow too soon after many others, and then puts the
// loss's next try off. If something undid a replay (undone), and not perhaps the owner alone, that
// begins a contention with the accused.
func (c *contention) limited(ctx context.Context, retry *pace.Retry, undone bool, accused func() api.Flush) bool {
	now := time.Now()
	wait := c.limit.Wait(now)
	if wait <= 0 {
		return false
	}
	if retry.At = now.Add(wait); undone && c.since.IsZero() {
		c.start(ctx, accused())
	}
	return true
}

// blamedNow returns the record of the open loss with the processes that may have caused it, for the
// log. The replay blames again, with the commits until then.
func (d *Daemon) blamedNow(ctx context.Context, st *state) api.Flush {
	l := *st.loss
	l.openRecord = &openRecord{record: l.record}
	d.blame(ctx, st, &l)
	return l.record
}

// start begins a contention with the loss that shows it: its record names the process that
// undoes replays.
func (c *contention) start(ctx context.Context, record api.Flush) {
	c.since, c.replays = time.Now(), 0
	// It ends also if the rules' owner, and no replay, is the last to put them back.
	c.calmAt = c.since.Add(calmFor)
	severity.Warnings(klog.FromContext(ctx)).Info("A process keeps undoing the replays; until it stops, canaryd limits them and does not log each",
		"flush", record.ID, "tables", c.of, "by", flushes.CulpritsText(record))
}

// spend charges the limit of one kind of table with the cost of a replay. The replay began when
// the daemon had used that much CPU time. In a contention it adds the loop's steps since the last
// replay, and the sweeps. The cost of HTTP clients between steps does not count: a client that
// polls the status would delay replays. A sweep next to a step counts twice, which errs to the
// side of the node.
func (d *Daemon) spend(c *contention, used time.Duration) {
	cost := d.cpu() - used
	c.spent += cost // the step that replays is counted when it ends
	work := c.work + time.Duration(d.elsewhere.Swap(0))
	if c.work = 0; !c.since.IsZero() {
		cost += work
	}
	c.limit.Spend(time.Now(), cost)
}

// step runs a chore, and notes its cost: in a contention it counts against the limit of
// replays.
func (d *Daemon) step(ctx context.Context, st *state, c *chore) {
	used := d.cpu()
	d.work(ctx, c.name, c.limit, func() { c.do(ctx, st) })
	cost := d.cpu() - used
	for _, c := range []*contention{&st.contention, &st.native.contention} {
		c.work, c.spent = c.work+cost-c.spent, 0
	}
}

// countReplay counts a replay that ended, and begins a contention if too many were undone.
// byName means that it put back jumps that were deleted by name, after grace (--jump-grace).
func (c *contention) countReplay(ctx context.Context, record api.Flush, byName bool, grace time.Duration) {
	now := time.Now()
	stood := now.Sub(c.healed) // for ever, if this is the first
	c.undone++
	if stood > calmFor {
		c.undone = 0
	}
	c.jumpsDeleted++
	if !byName || stood > grace+calmFor {
		c.jumpsDeleted = 0
	}
	c.healed = now
	c.replays++
	if c.since.IsZero() && (c.undone >= undoneKept || c.jumpsDeleted >= jumpsDeletedKept) {
		c.start(ctx, record)
	}
	if c.since.IsZero() {
		return
	}
	c.calmAt = now.Add(calmFor)
	if c.jumpsDeleted > 0 {
		c.calmAt = c.calmAt.Add(grace)
	}
}

// end ends a contention, because the last replay has stayed in force until calmAt.
func (c *contention) end(ctx context.Context) {
	severity.Notices(klog.FromContext(ctx)).Info("Replayed rules stay in place again; canaryd no longer limits replays",
		"tables", c.of, "lasted", pace.Latest(c.healed, c.since).Sub(c.since).Round(time.Millisecond), "replays", c.replays)
	c.since, c.calmAt, c.jumpsDeleted, c.undone = time.Time{}, time.Time{}, 0, 0
}

// log returns the log for lines about one flush. In a contention only -v=2 shows them.
func (c *contention) log(log klog.Logger) klog.Logger {
	if !c.since.IsZero() {
		return log.V(2)
	}
	return log
}

// flushLog returns the log for lines about one flush of iptables' tables.
func (st *state) flushLog(ctx context.Context) klog.Logger {
	return st.contention.log(st.drillLog(ctx, false))
}

// drillLog returns the log for lines about one flush of native tables, or of iptables' tables. A
// drill that is at such tables keeps them for its reply.
func (st *state) drillLog(ctx context.Context, native bool) klog.Logger {
	if x := st.drills.Under; x.At(native) {
		return x.Tee(klog.FromContext(ctx))
	}
	return klog.FromContext(ctx)
}
