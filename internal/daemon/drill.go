package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/drill"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A drill deletes canaryd's own canary, or tables of its own (native_drill.go). Everything else is
// as in a flush: the watchers give the hint, a look notices, a heal reads, writes and proves. The
// loop considers the drill only when it names the loss.

// Drill deletes the canary of a table in every family, and then tables of its own next to guarded
// native tables. It returns when the loop has put them back and proved that, or when the drill's
// time is over. With r.ForReal it deletes the protected jumps of nat PREROUTING. A refused drill is
// a reply. The drill continues if ctx ends. An error means that its result is not known.
func (d *Daemon) Drill(ctx context.Context, r api.DrillRequest) (api.DrillReply, error) {
	var begun *drill.Drill
	var reply api.DrillReply
	err := d.askGuard(ctx, func(ctx context.Context, st *state) error {
		begun, reply = d.beginDrill(ctx, st, r, "it was asked for")
		return nil
	})
	if err != nil || begun == nil {
		return reply, err
	}
	select {
	case <-begun.Done:
		return begun.Reply, nil
	case <-ctx.Done():
		return api.DrillReply{}, fmt.Errorf("the drill continues, and its result will be in the status: %w", ctx.Err())
	}
}

// scheduleDrill plans the next drill by --drill-every. The first one ever is at a random time
// within the first period, since the canaryds of a fleet start together. Each later drill
// follows a period after the last drill of this node, also if that was on request.
func (d *Daemon) scheduleDrill(st *state, now time.Time) {
	st.drills.Plan(d.cfg.DrillEvery, api.LastDrillOf(st.journal), now)
}

// drillBySchedule begins a drill, unless an operator has had one since. If it cannot begin,
// drill.Again plans the next try.
func (d *Daemon) drillBySchedule(ctx context.Context, st *state) {
	now, every := time.Now(), d.cfg.DrillEvery
	if st.drills.Had(every, now) {
		d.scheduleDrill(st, now)
		return
	}
	st.drills.At = now.Add(every)
	if begun, _ := d.beginDrill(ctx, st, api.DrillRequest{}, "--drill-every"); begun == nil {
		st.drills.At = now.Add(drill.Again(every))
	}
}

// drillable says which kinds of tables have something to guard.
func (d *Daemon) drillable(st *state) drill.Guarded {
	return drill.Guarded{Iptables: !d.bareNow(st), Native: len(st.native.drillFamilies()) > 0}
}

// beginDrill deletes the canary, or a drill's native tables. It returns nil and a reply if the
// drill was refused or failed. because is the log's word for its cause.
func (d *Daemon) beginDrill(ctx context.Context, st *state, r api.DrillRequest, because string) (*drill.Drill, api.DrillReply) {
	next, err := drill.New(r, d.drillable(st))
	reply := &next.Reply
	if err == nil && st.drills.Under != nil {
		err = errors.New("another drill is under way")
	}
	if err == nil {
		err = d.drillRefused(st, next)
	}
	switch {
	case err != nil:
	case next.Native():
		err = d.takeDrillTables(ctx, st, next, because)
	default:
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
	klog.FromContext(ctx).Error(err, "A drill failed: its write failed and may have removed parts; canaryd puts missing parts back",
		"parts", next.Takes(), "kind", next.Kind(), "because", because, "advice", "run canaryd drill again; if it fails again, remove the cause in err")
	st.drills.Doubts(next, time.Now())
	return nil, *reply
}

// drillRefused returns why the drill x may take nothing now, for the reply; nil: it may take the
// parts that it is at.
func (d *Daemon) drillRefused(st *state, x *drill.Drill) error {
	ready := d.Status().Ready()
	for _, a := range st.answers() {
		ready = errors.Join(ready, fmt.Errorf("flush %s is being answered", a.record.ID))
	}
	table, kinds := x.Reply.Table, canary.DrillKinds()
	if x.Native() {
		kinds = drill.NativeKinds()
	}
	switch {
	case !x.Native() && !slices.Contains(protect.Tables(), table):
		return fmt.Errorf("%q is none of the tables that canaryd guards", table)
	case x.Reply.Sort == api.DrillCanary && !slices.Contains(kinds, x.Kind()):
		return fmt.Errorf("%q is none of the kinds that cost nothing: %v", x.Kind(), kinds)
	case d.Status().NothingProtected != nil:
		return errors.New("there is no rule to guard, so a drill would prove nothing; canaryd detect lists the rules of the node")
	case x.Native() && !d.drillable(st).Native:
		return errors.New("canaryd keeps no native table that it would put back, so a drill of them would prove nothing")
	case !x.Native() && protect.OnDemand(table) && !anyOf(st.families, func(fs *familyState) bool { return !fs.tables[table].spared }):
		return fmt.Errorf("nothing is protected in %s, so that it has no canary", table)
	case st.mode == api.Observe:
		return errors.New("in observe mode canaryd puts nothing back: a flush would be recorded and reported, and would last until the rules' owner writes them")
	case st.pause.on():
		return fmt.Errorf("replays are paused until %s: a flush would be recorded and reported, and put back then; canaryd resume ends the pause",
			st.pause.until.UTC().Format(time.RFC3339))
	case ready != nil:
		return fmt.Errorf("the node is not healthy, and a drill would hide that: %w", ready)
	case st.contended() || st.contention.limit.Wait(time.Now()) > 0 || x.Native() && st.native.contention.limit.Wait(time.Now()) > 0:
		return errors.New("replays are limited now, because there were many of them or a process keeps undoing them: see canaryd status")
	}
	return nil
}

// takeCanary does the deletion of a drill, and sets the time within which a loss must answer
// it. After an error the drill does not continue: nothing was deleted, or, if the reply says
// failed, something may have been.
func (d *Daemon) takeCanary(ctx context.Context, st *state, next *drill.Drill, because string) error {
	ctx, end := finishing(ctx)
	defer end()
	severity.Notices(klog.FromContext(ctx)).Info("A drill begins", "takes", next.Takes(), "kind", next.Kind(), "because", because)
	done, err := d.replayer(ctx, st).Drill(ctx, d.job(st, d.cfg.Kernel.Families()...), next.What())
	next.Took(done)
	for id, mark := range done.Tried {
		st.marks.current = st.marks.current.With(id, mark)
	}
	if len(done.Marks) == 0 {
		if len(done.Tried) > 0 {
			next.Reply.Result = api.DrillFailed
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
	st.disk.marksChanged(time.Now())
	st.drills.Begin(next, done, d.drillQuiet())
	return nil
}

// drillQuiet is how long a drill may take for two polls and the wait for quiet.
func (d *Daemon) drillQuiet() time.Duration { return 2*d.cfg.PollInterval + 10*d.cfg.Settle }

// drillTooLong ends a drill that was not answered in time. Its deletion stays a loss, which is
// tried again, and which alerts report.
func (d *Daemon) drillTooLong(ctx context.Context, st *state) {
	x := st.drills.Under
	result, reason := api.DrillFailed, fmt.Sprintf("nothing was noticed within %s", x.Lasted())
	course, why := drill.Course{}, ""
	switch l, n := st.loss, st.native.loss; {
	case !x.Native() && l != nil:
		course, why = l.course(), cmp.Or(l.trouble.What, "the replay has not ended")
	case x.Native() && n != nil && n.drill:
		course, why = n.course(st), cmp.Or(n.trouble.What, "the replay has not ended")
	}
	if why != "" && st.pause.on() {
		why = "replays were paused meanwhile"
	}
	if why != "" {
		result, reason = x.Lasts(course, why)
	}
	d.endDrill(ctx, st, result, reason)
}

// drillAnswered ends the drill that is at iptables' tables, if there is one, because the loss l
// has ended. Its record shows whether the drill succeeded.
func (d *Daemon) drillAnswered(ctx context.Context, st *state, l *loss) {
	if x := st.drills.Under; x.At(false) {
		result, reason := x.Answered(l.course())
		d.endDrill(ctx, st, result, reason)
	}
}

// drillUndone ends the drill that is at iptables' tables, if there is one, as void.
func (d *Daemon) drillUndone(ctx context.Context, st *state, why string) {
	if st.drills.Under.At(false) {
		d.endDrill(ctx, st, api.DrillVoid, why)
	}
}

// course returns the loss as a drill sees it.
func (l *loss) course() drill.Course {
	return drill.Course{Record: l.record, Recorded: l.shown(), Noticed: l.noticed, Lost: l.hit.Text()}
}

// endDrill ends the drill that is under way, if there is one: it answers the request, and puts
// the result into metrics, status and log. A drill that has passed may have native tables left to
// try.
func (d *Daemon) endDrill(ctx context.Context, st *state, result api.DrillResult, reason string) {
	x := st.drills.Under
	if x == nil || result == api.DrillPassed && x.MayGoOn(time.Now()) {
		return
	}
	log := st.flushLog(ctx)
	if x.Native() {
		log = st.nativeLog(ctx)
	}
	x.End(log, result, reason)
	if l := st.loss; l != nil && !x.Native() { // the loss lasts, and the drill's deletion is still no flush
		l.drill, l.record.DrillFailed = x, l.record.Drill != "" && result == api.DrillFailed
	}
	d.leaveDrillTables(ctx, st, result)
	st.drills.Under, st.drills.Last = nil, &x.Reply.DrillEnd
	d.cfg.Metrics.ObserveDrill(result)
	d.publish(st)
	close(x.Done)
}

// goOnDrill has a drill of iptables' tables, which has passed, go on to native tables.
func (d *Daemon) goOnDrill(ctx context.Context, st *state) {
	x := st.drills.Under
	x.GoOn()
	err := d.drillRefused(st, x)
	if err == nil {
		err = d.takeDrillTables(ctx, st, x, "iptables' tables are tried")
	}
	if err != nil {
		result := api.DrillVoid
		if x.Reply.Result == api.DrillFailed {
			result = api.DrillFailed
		}
		d.endDrill(ctx, st, result, fmt.Sprintf("table %s is tried, and native tables are not: %v", x.Reply.Table, err))
	}
}

// tookToo reports whether another process also took something from the chain of a drill for
// real: then the record is a flush's. The same jumps are missing, and rules that the drill did
// not touch.
func (d *Daemon) tookToo(ctx context.Context, st *state, id rules.TableID, h flushes.Hit) bool {
	q := d.inquire(ctx)
	if gone, _ := d.unprotectedGone(st, id, h, q); gone > 0 {
		return true
	}
	c := d.charge(st, id, h.Finding, h.Seen)
	return q.TookFrom(c, drill.Chain)
}

// nameDrill marks the open record as a drill's if a drill took the whole loss, also a drill
// before a restart. A record that is no longer a drill's begins again as a flush.
func (d *Daemon) nameDrill(ctx context.Context, st *state, found map[rules.TableID]flushes.Hit) {
	l := st.loss
	all := maps.Clone(found)
	maps.DeleteFunc(all, func(_ rules.TableID, h flushes.Hit) bool { return !h.Verdict.Loss() })
	if len(all) == 0 || len(l.record.Native) > 0 { // no drill takes both in one record
		return
	}
	sort, x := api.DrillCanary, cmp.Or(st.drills.Under, l.drill)
	for id, h := range all {
		if !x.Explains(id, h) || !h.Finding.OnlyDrilled() && d.tookToo(ctx, st, id, h) {
			if l.record.Drill != "" {
				l.record.Drill, l.record.DrillFailed, l.record.Lost, l.record.Kind = "", false, api.Lost{}, ""
				l.hit = flushes.Verdicts{}
			}
			return
		}
		if !h.Finding.OnlyDrilled() {
			sort = api.DrillForReal
		}
	}
	l.record.Drill, l.record.DrillFailed = sort, x != nil && x.Reply.Result == api.DrillFailed
}

// onlyDrilled reports whether a replay answered a drill and nothing else. Such a replay does
// not count against the limit of replays: a flush right after it must be answered at once.
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
