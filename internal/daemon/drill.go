package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A drill takes canaryd's own canary away, and everything else is what a flush meets: the watchers
// give the hint, a look notices, a heal reads, writes and proves. The loop knows of the drill only
// when it names what happened.

// drillChain is the chain from which a drill for real takes the protected jumps.
const drillChain = "PREROUTING"

// drillPatience is how long a drill may take, besides two polls and the wait for quiet. A replay at
// 5,000 services takes 2 s, and 13 s by iptables-restore.
const drillPatience = 30 * time.Second

// errDrillForReal: the request wants another table or kind, and would not get it.
var errDrillForReal = errors.New("a drill for real takes the protected jumps of nat PREROUTING and nothing else: leave out --table and --kind")

// A drill is the one that is under way.
type drill struct {
	reply api.DrillReply
	taken canary.Marks // of the tables from which something was taken
	start time.Time    // when the kernel had that
	by    time.Time    // when it has failed
	done  chan struct{}
}

// Drill takes the canary of a table away, in every family, and returns when the loop has put it
// back and proved it, or has not within drillPatience. With r.ForReal it takes the protected jumps
// of nat PREROUTING. A drill that is refused is a reply. The drill goes on if ctx ends. An error
// means that nothing is known of it.
func (d *Daemon) Drill(ctx context.Context, r api.DrillRequest) (api.DrillReply, error) {
	var begun *drill
	var reply api.DrillReply
	err := d.askGuard(ctx, func(ctx context.Context, st *state) error {
		begun, reply = d.beginDrill(ctx, st, r, "it was asked for")
		return nil
	})
	if err != nil || begun == nil {
		return reply, err
	}
	select {
	case <-begun.done:
		return begun.reply, nil
	case <-ctx.Done():
		return api.DrillReply{}, fmt.Errorf("the drill goes on, and its result will be in the status: %w", ctx.Err())
	}
}

// scheduleDrill plans the next drill by --drill-every. The first one ever comes at a random time
// within the first period, since the canaryds of a fleet start together; each later one a period
// after the last drill of this node, also if that was on request.
func (d *Daemon) scheduleDrill(st *state, now time.Time) {
	every := d.cfg.DrillEvery
	switch last := cmp.Or(st.lastDrill, api.LastDrillOf(st.journal)); {
	case every == 0:
	case last == nil:
		st.drillAt = now.Add(rand.N(every))
	default:
		st.drillAt = pace.Latest(now.Add(d.drillRetry()), last.Time.Add(every))
	}
}

// drillRetry returns how long a drill by schedule waits after a start, or after it was refused.
func (d *Daemon) drillRetry() time.Duration { return min(d.cfg.DrillEvery/10, time.Hour) }

// drillBySchedule begins a drill, unless an operator has had one since.
func (d *Daemon) drillBySchedule(ctx context.Context, st *state) {
	now := time.Now()
	if last := st.lastDrill; last != nil && now.Before(last.Time.Add(d.cfg.DrillEvery)) {
		d.scheduleDrill(st, now)
		return
	}
	st.drillAt = now.Add(d.cfg.DrillEvery)
	if begun, _ := d.beginDrill(ctx, st, api.DrillRequest{}, "--drill-every"); begun == nil {
		st.drillAt = now.Add(d.drillRetry())
	}
}

// beginDrill takes the canary away. It returns nil and a reply if it did not.
func (d *Daemon) beginDrill(ctx context.Context, st *state, r api.DrillRequest, because string) (*drill, api.DrillReply) {
	next := &drill{done: make(chan struct{}), reply: api.DrillReply{
		DrillEnd: api.DrillEnd{Time: time.Now(), Sort: api.DrillCanary, Result: api.DrillRefused},
		Table:    r.Table, Kind: r.Kind, Alert: api.AlertOfFlush(r.ForReal),
	}}
	reply := &next.reply
	if reply.Table == "" {
		reply.Table = rules.Nat
	}
	if reply.Kind == "" {
		reply.Kind = canary.ChainDeleted
	}
	otherTable := r.ForReal && (reply.Table != rules.Nat || r.Kind != "" && r.Kind != canary.JumpsMissing)
	if r.ForReal {
		reply.Sort, reply.Table, reply.Kind = api.DrillForReal, rules.Nat, canary.JumpsMissing
	}
	err := d.drillRefused(st, *reply)
	if otherTable {
		err = errDrillForReal
	}
	if err == nil {
		err = d.takeCanary(ctx, st, next, because)
	}
	if err == nil {
		return next, api.DrillReply{}
	}
	reply.Reason = err.Error()
	d.cfg.Metrics.ObserveDrill(reply.Result)
	if reply.Result == api.DrillRefused {
		severity.Warnings(klog.FromContext(ctx)).Info("A drill was refused; nothing was taken", "reason", err)
		return nil, *reply
	}
	klog.FromContext(ctx).Error(err, "A drill has failed: whether anything was taken is not known; if it was, it is put back", "takes", takesText(*reply))
	next.by = time.Now().Add(drillPatience)
	st.doubt, st.lastDrill = next, &reply.DrillEnd
	return nil, *reply
}

// drillRefused returns why nothing may be taken now.
func (d *Daemon) drillRefused(st *state, r api.DrillReply) error {
	ready := d.Status().Ready()
	if st.loss != nil {
		ready = errors.Join(ready, fmt.Errorf("flush %s is being answered", st.loss.record.ID))
	}
	switch {
	case !slices.Contains(protect.Tables(), r.Table):
		return fmt.Errorf("%q is none of the tables that canaryd guards", r.Table)
	case r.Sort == api.DrillCanary && !slices.Contains(canary.DrillKinds(), r.Kind):
		return fmt.Errorf("%q is none of the kinds that cost nothing: %v", r.Kind, canary.DrillKinds())
	case st.drill != nil:
		return errors.New("another drill is under way")
	case d.Status().NothingProtected != nil:
		return errors.New("there is no rule to guard: a drill that passes would say nothing; canaryd detect shows what is there")
	case protect.OnDemand(r.Table) && !anyOf(st.families, func(fs *familyState) bool { return !fs.tables[r.Table].spared }):
		return fmt.Errorf("nothing is protected in %s, so that it has no canary", r.Table)
	case st.mode == api.Observe:
		return errors.New("in observe mode canaryd puts nothing back: a flush would be recorded and reported, and would last until the rules' owner writes them")
	case st.pause.on():
		return fmt.Errorf("replays are paused until %s: a flush would be recorded and reported, and put back then; canaryd resume ends the pause",
			st.pause.until.UTC().Format(time.RFC3339))
	case ready != nil:
		return fmt.Errorf("the node is not healthy, and a drill would hide that: %w", ready)
	case st.contention.contended() || st.contention.limit.Wait(time.Now()) > 0:
		return errors.New("replays are limited now, because there were many of them or a process keeps undoing them: see canaryd status")
	}
	return nil
}

// doubtAt returns the drill that may have taken what is found to be lost now; nil if there is none.
func (st *state) doubtAt(now time.Time) *drill {
	if st.doubt == nil || now.After(st.doubt.by) {
		return nil
	}
	return st.doubt
}

// takeCanary does what a drill begins with. After an error the drill does not go on: nothing was
// taken, or, if the reply says failed, something may have been.
func (d *Daemon) takeCanary(ctx context.Context, st *state, next *drill, because string) error {
	ctx, end := finishing(ctx)
	defer end()
	what := reload.Drill{Table: next.reply.Table, Kind: next.reply.Kind}
	if next.reply.Sort == api.DrillForReal {
		what.Chain = drillChain
	}
	severity.Notices(klog.FromContext(ctx)).Info("A drill begins", "takes", takesText(next.reply), "kind", next.reply.Kind, "because", because)
	done, err := d.replayer(ctx, st).Drill(ctx, d.job(st, d.cfg.Kernel.Families()...), what)
	next.taken = maps.Clone(done.Marks)
	for id, mark := range done.Tried {
		st.marks.current, next.taken = st.marks.current.With(id, mark), next.taken.With(id, *mark.Tried)
	}
	if len(done.Marks) == 0 {
		if len(done.Tried) > 0 {
			next.reply.Result = api.DrillFailed
		}
		st.looking.plan(time.Now())
		return err
	}
	if err != nil {
		severity.Warnings(klog.FromContext(ctx)).Error(err, "The drill may have taken less than was asked for")
	}
	for id, mark := range done.Marks {
		st.marks.current = st.marks.current.With(id, mark)
	}
	for _, f := range rules.Families() {
		if _, ok := done.Marks[f.Table(next.reply.Table)]; ok {
			next.reply.Families = append(next.reply.Families, f)
		}
	}
	st.disk.marksChanged(time.Now())
	next.start, next.reply.Time, next.reply.Jumps = done.Written, done.Written, done.Jumps
	next.by = done.Written.Add(drillPatience + 2*d.cfg.PollInterval + 10*d.cfg.Settle)
	next.step(done.Written, "canaryd has taken away "+takesText(next.reply))
	st.drill, st.doubt = next, nil
	return nil
}

// takesText says what a drill takes.
func takesText(r api.DrillReply) string {
	if r.Sort == api.DrillForReal {
		return fmt.Sprintf("the protected jumps of %s %s", r.Table, drillChain)
	}
	return fmt.Sprintf("its canary of table %s", r.Table)
}

// step adds a line to the timeline.
func (x *drill) step(at time.Time, what string) {
	x.reply.Steps = append(x.reply.Steps, api.DrillStep{Seconds: max(at.Sub(x.start), 0).Seconds(), What: what})
}

// drillTooLong ends a drill that was not answered in time. What was taken stays a loss, which is
// tried again, and which alerts report.
func (d *Daemon) drillTooLong(ctx context.Context, st *state) {
	result, reason := api.DrillFailed, fmt.Sprintf("nothing was noticed within %s", time.Since(st.drill.start).Round(time.Millisecond))
	if l := st.loss; l != nil {
		st.drill.timeline(l)
		st.drill.reply.Flush = l.record.ID
		why := cmp.Or(l.trouble.What, "the replay has not ended")
		if st.pause.on() {
			why = "replays were paused meanwhile"
		}
		reason = fmt.Sprintf("it is not back after %s: %s", time.Since(st.drill.start).Round(time.Millisecond), why)
		if l.recorded && l.record.Drill != st.drill.reply.Sort {
			result, reason = api.DrillVoid, "another process flushed rules meanwhile, which are not back either: see the flush record"
		}
	}
	d.endDrill(ctx, st, result, reason)
}

// drillAnswered ends the drill that is under way, if there is one, because a loss has ended.
func (d *Daemon) drillAnswered(ctx context.Context, st *state, l *loss) {
	x := st.drill
	if x == nil {
		return
	}
	x.reply.Flush = l.record.ID
	x.timeline(l)
	switch {
	case !l.recorded:
		x.reply.Flush = ""
		d.endDrill(ctx, st, api.DrillFailed, "the canary stood again when the tables were read under guard: another process put it back")
	case l.record.Drill != x.reply.Sort:
		d.endDrill(ctx, st, api.DrillVoid, "another process flushed rules meanwhile, and canaryd answered that: see the flush record")
	case l.record.Outcome == api.Drilled, l.record.Outcome == reload.Proved, l.record.Outcome == reload.Raced:
		d.endDrill(ctx, st, api.DrillPassed, "")
	default:
		d.endDrill(ctx, st, api.DrillFailed, fmt.Sprintf("the replay ended as %s: %s", l.record.Outcome, l.record.Detail))
	}
}

// timeline adds what the record of a loss says.
func (x *drill) timeline(l *loss) {
	r := l.record
	x.step(r.Time, "a hint: something was written")
	x.step(l.noticed, "noticed: "+l.hit.Text())
	if r.WrittenSeconds > 0 {
		x.step(r.Time.Add(api.Seconds(r.WrittenSeconds)), "no process wrote any more: put back")
	}
	if r.AbsentSeconds > 0 {
		x.step(r.Time.Add(api.Seconds(r.AbsentSeconds)), "proved by a read of all tables")
	}
}

// endDrill ends the drill that is under way, if there is one: it answers the request, and has the
// result in metrics, status and log.
func (d *Daemon) endDrill(ctx context.Context, st *state, result api.DrillResult, reason string) {
	x := st.drill
	if x == nil {
		return
	}
	x.reply.Result, x.reply.Reason = result, reason
	log := st.flushLog(ctx)
	if result == api.DrillPassed {
		severity.Notices(log).Info("The drill has passed", "flush", x.reply.Flush, "after", time.Since(x.start).Round(10*time.Microsecond))
	} else {
		severity.Warnings(log).Info("The drill has NOT passed", "result", result, "flush", x.reply.Flush, "reason", reason)
	}
	if l := st.loss; l != nil { // it lasts, and what the drill took is still no flush
		l.drill, l.record.DrillFailed = x, l.record.Drill != "" && result == api.DrillFailed
	}
	st.drill, st.lastDrill = nil, &x.reply.DrillEnd
	d.cfg.Metrics.ObserveDrill(result)
	d.publish(st)
	close(x.done)
}

// drills reports whether all that is known to be lost is what the drill took.
func (st *state) drills() bool {
	if st.drill == nil || st.drill.reply.Sort != api.DrillCanary {
		return false
	}
	for id := range st.losses() {
		if _, ok := st.drill.taken[id]; !ok {
			return false
		}
	}
	return true
}

// explains reports whether the drill took everything that a hit shows as lost.
func (x *drill) explains(id rules.TableID, h flushes.Hit) bool {
	if h.Finding.OnlyDrilled() {
		return true
	}
	if x == nil || x.reply.Sort != api.DrillForReal {
		return false
	}
	_, taken := x.taken[id]
	f := h.Finding
	return taken && f.Verdict == canary.JumpsMissing && slices.Equal(f.Witnesses, []string{drillChain}) && len(f.Emptied)+len(f.Missing) == 0
}

// tookToo reports whether another process took something from the chain of a drill for real as
// well: the same jumps are missing then, and rules that the drill did not touch.
func (d *Daemon) tookToo(ctx context.Context, st *state, id rules.TableID, h flushes.Hit) bool {
	q := d.inquire(ctx)
	if gone, _ := d.unprotectedGone(st, id, h, q); gone > 0 {
		return true
	}
	c := d.charge(st, id, h.Finding, h.Seen)
	return q.TookFrom(c, drillChain)
}

// nameDrill marks the open record as a drill's if a drill took all that was found, also one of
// before a restart. A record that was a drill's, and is not any more, begins again as a flush.
func (d *Daemon) nameDrill(ctx context.Context, st *state, found map[rules.TableID]flushes.Hit) {
	l := st.loss
	all := maps.Clone(found)
	maps.DeleteFunc(all, func(_ rules.TableID, h flushes.Hit) bool { return !h.Verdict.Loss() })
	if len(all) == 0 {
		return
	}
	sort, x := api.DrillCanary, cmp.Or(st.drill, l.drill)
	for id, h := range all {
		if !x.explains(id, h) || !h.Finding.OnlyDrilled() && d.tookToo(ctx, st, id, h) {
			if l.record.Drill != "" {
				l.record.Drill, l.record.DrillFailed, l.record.Lost, l.record.Kind = "", false, api.Lost{}, ""
				l.hit, l.recorded = flushes.Verdicts{}, false
			}
			return
		}
		if !h.Finding.OnlyDrilled() {
			sort = api.DrillForReal
		}
	}
	l.record.Drill, l.record.DrillFailed = sort, x != nil && x.reply.Result == api.DrillFailed
}

// onlyDrilled reports whether a replay answered a drill and nothing else. Such a replay does not
// count against the limit of replays: a flush that comes next must be answered at once.
func onlyDrilled(result reload.Result) bool {
	only := false
	for _, h := range hits(result) {
		if h.Verdict.Loss() && !h.Finding.OnlyDrilled() {
			return false
		}
		only = only || h.Verdict.Loss()
	}
	return only
}
