package daemon

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	// quietWalk is how long a stamp that is not exact may stand for the
	// content: one walk of the legacy tables in 30 s costs a quiet node
	// nothing (13 ms at 20,000 rules).
	quietWalk = 30 * time.Second
	// A change is examined after captureQuiet without another one, at the
	// latest after captureMost, which leaves the read 150 ms of the 250 ms that
	// a generation may be old; reads may take a tenth of a core, and half of the
	// time.
	captureQuiet = 50 * time.Millisecond
	captureMost  = 100 * time.Millisecond
	readShare    = 9
	// firstLookAfter is the distance of the first look after a replay.
	firstLookAfter = 50 * time.Millisecond
)

// looking is when the next look comes, and why.
type looking struct {
	at       time.Time     // of the next look
	hinted   time.Time     // when the hint came that asks for it; zero: none did
	woken    bool          // by a hint, not by the poll: look closely
	evidence time.Time     // since when what the present look finds may be so
	followUp time.Duration // distance of the looks that follow a replay
}

// hint asks for a close look because of something that happened just now.
func (l *looking) hint(now time.Time) {
	l.hinted, l.woken, l.at = earliest(l.hinted, now), true, now
}

// plan asks for a look at that time, or before.
func (l *looking) plan(at time.Time) { l.at = earliest(l.at, at) }

// begin starts a look, and reports whether a hint asked for it.
func (l *looking) begin(now time.Time) (woken bool) {
	woken, l.evidence = l.woken, l.hinted
	if l.evidence.IsZero() {
		l.evidence = now
	}
	l.woken, l.at, l.hinted = false, time.Time{}, time.Time{}
	return woken
}

// afterReplay plans the first look after a replay. Late writers of the same reload come
// within a second: the first look comes after 50 ms, the next ones at doubling distances.
func (l *looking) afterReplay(now time.Time) {
	l.at, l.followUp = now.Add(firstLookAfter), 2*firstLookAfter
}

// planFollowUp plans the next of the looks after a replay, up to a distance of most.
func (l *looking) planFollowUp(now time.Time, most time.Duration) {
	if l.followUp == 0 {
		return
	}
	l.plan(now.Add(l.followUp))
	if l.followUp *= 2; l.followUp > most {
		l.followUp = 0
	}
}

// looked is what stamps and probes showed of one family.
type looked struct {
	stamp   iptables.Stamp // of the last probe
	at      time.Time      // of the last probe; zero: never
	urgent  iptables.Stamp // up to which what is urgent was probed
	unasked time.Time      // when the first hint came that has to wait for a stamp; zero: none does
	unseen  time.Time      // since when something may have been written that no probe has seen; zero: nothing was
	intact  uint64         // digest of the last probe that saw all marks standing
	trouble trouble        // why the last probe failed
	budget  budgets        // what stamps and probes may cost
}

// look probes every family. It answers all hints given before it.
func (d *Daemon) look(ctx context.Context, st *state) {
	woken := st.looking.begin(time.Now())
	// What a loss makes us read is not the fault of a busy writer.
	free := func() bool { return st.looking.followUp > 0 }
	if st.loss == nil {
		free = func() bool { return st.looking.followUp > 0 || st.loss != nil }
	}
	var families []asked
	for _, f := range rules.Families() {
		if fs := st.families[f]; fs != nil && st.anyPlanted(f) {
			if a, due := d.stamp(ctx, st, f, woken, free); due {
				families = append(families, a)
			}
		}
	}
	if st.loss != nil || !d.probeUrgent(ctx, st, families) {
		for _, a := range families {
			d.probe(ctx, st, a, free)
		}
	}
	d.readRestored(ctx, st)
	d.logOwnerless(ctx, st)
	d.lookAtPods(ctx, st)
	d.keepOwners(ctx, st, false)
	if st.loss == nil {
		st.looking.planFollowUp(time.Now(), d.cfg.PollInterval)
	}
}

// An asked is a family that was asked for its stamp and has to be probed.
type asked struct {
	family rules.Family
	stamp  iptables.Stamp
	start  time.Time // when it was asked
	since  time.Time // the first hint since it was asked before
	took   time.Duration
}

// stamp asks one family for its stamp and reports whether its marks have to be
// looked at: something was written or, where a stamp is not exact, may have been.
func (d *Daemon) stamp(ctx context.Context, st *state, f rules.Family, woken bool, free func() bool) (asked, bool) {
	fs, a := st.families[f], asked{family: f, start: time.Now()}
	if woken && !fs.looked.at.IsZero() && !free() {
		if ready := fs.stampReady(len(st.families)); a.start.Before(ready) {
			fs.looked.unasked = earliest(fs.looked.unasked, st.looking.evidence)
			st.looking.plan(ready)
			return a, false
		}
	}
	a.since = earliest(fs.looked.unasked, st.looking.evidence)
	var err error
	a.stamp, err = d.cfg.Kernel.Stamp(ctx, f)
	end := time.Now()
	a.took = end.Sub(a.start)
	fs.looked.budget.urgent.spend(end, a.took, urgentShare*len(st.families))
	if err != nil {
		d.unknown(ctx, fs, f, err, a.took)
		return a, false
	}
	woken, fs.looked.unasked = woken || !fs.looked.unasked.IsZero(), time.Time{}
	still := !fs.looked.trouble.there() && !fs.looked.at.IsZero() && a.stamp == fs.looked.stamp
	if still && (a.stamp.Exact || !woken && fs.looked.unseen.IsZero() && a.start.Sub(fs.looked.at) < quietWalk) {
		if a.stamp.Exact {
			fs.noteKnown(a.start)
		}
		d.cfg.Metrics.ObserveProbe(f, lastResult(fs), a.took)
		return a, false
	}
	if woken || !still {
		fs.looked.unseen = earliest(fs.looked.unseen, a.since)
	}
	return a, true
}

// stampReady returns when a hint may make us ask for the stamp again. A stamp
// without shapes was read by executing iptables and is as dear as a walk.
func (fs *familyState) stampReady(families int) time.Time {
	switch {
	case fs.looked.stamp.Exact:
		return time.Time{}
	case fs.looked.stamp.Shapes == iptables.Stamp{}.Shapes:
		return fs.looked.budget.walks.readyAt(walkShare * families)
	default:
		return fs.looked.budget.urgent.readyAt(urgentShare * families)
	}
}

// probeUrgent looks at what moved and is read at once, before any large table of
// any family is walked, and reports whether it found a loss. Marks that it sees
// standing are no reason not to probe.
func (d *Daemon) probeUrgent(ctx context.Context, st *state, families []asked) bool {
	for _, a := range families {
		f, fs := a.family, st.families[a.family]
		part := st.marks.current.Only(f, a.stamp.Urgent(fs.looked.urgent))
		places := part.Places(f, d.cfg.Canary)
		if len(places) == 0 {
			continue
		}
		start := time.Now()
		holdings, err := d.cfg.Kernel.ProbeOnly(ctx, f, places)
		end := time.Now()
		fs.looked.budget.urgent.spend(end, end.Sub(start), urgentShare*len(st.families))
		if err != nil {
			continue // the probe will tell
		}
		fs.looked.urgent = a.stamp
		st.looking.evidence = a.since
		if !d.judgeMarks(st, f, part, iptables.Probed{Holdings: holdings}) {
			d.cfg.Metrics.ObserveProbe(f, metrics.ProbeLoss, end.Sub(a.start))
		}
	}
	// The heal answers what was hinted at until now, if it can read.
	return st.loss != nil
}

// probe looks at all marks of a family that was asked for its stamp. Walks
// beside a busy writer wait until the budget has them; free tells that they
// need not.
func (d *Daemon) probe(ctx context.Context, st *state, a asked, free func() bool) {
	f, fs := a.family, st.families[a.family]
	start := time.Now()
	if ready := fs.looked.budget.walks.readyAt(walkShare * len(st.families)); !a.stamp.Exact && !free() && start.Before(ready) {
		st.looking.plan(ready)
		return
	}
	st.looking.evidence = earliest(st.looking.evidence, fs.looked.unseen)
	probed, err := d.cfg.Kernel.Probe(ctx, f, st.marks.current.Places(f, d.cfg.Canary))
	end := time.Now()
	took := a.took + end.Sub(start)
	if err != nil {
		fs.looked.budget.walks.spend(end, took, walkShare*len(st.families))
		d.unknown(ctx, fs, f, err, took)
		return
	}
	fs.looked.stamp, fs.looked.urgent, fs.looked.at, fs.looked.unseen = a.stamp, a.stamp, a.start, time.Time{}
	if fs.looked.trouble.there() {
		fs.examined.dueAt = latest(start, fs.examined.notBefore)
	}
	if fs.looked.trouble.over() {
		klog.FromContext(ctx).Info("The tables can be looked at again", "family", f)
	}
	d.judgeProbe(st, f, fs, probed)
	if !free() {
		fs.looked.budget.walks.spend(end, took, walkShare*len(st.families))
	}
	fs.noteKnown(a.start)
	d.cfg.Metrics.ObserveProbe(f, lastResult(fs), took)
}

// judgeProbe notes what a probe showed: a loss, or that something moved.
func (d *Daemon) judgeProbe(st *state, f rules.Family, fs *familyState, probed iptables.Probed) {
	if !d.judgeMarks(st, f, st.marks.current, probed) {
		return
	}
	fs.looked.intact = probed.Digest
	if fs.examined.at.IsZero() || probed.Digest != fs.examined.digest {
		fs.examined.markDirty(time.Now())
	}
}

// judgeMarks reports whether marks stand, and notes the loss if they do not.
func (d *Daemon) judgeMarks(st *state, f rules.Family, marks canary.Marks, probed iptables.Probed) bool {
	for t := range tableid.Of(marks, f) {
		d.cfg.Metrics.SetCanaryPresent(f, t, marks.CanaryPresent(f, t, d.cfg.Canary, probed))
	}
	standing := true
	for t, v := range marks.Verdicts(f, d.cfg.Canary, probed) {
		switch {
		case v.Loss():
			st.families[f].tables[t].verdict, standing = v, false
		case st.loss != nil: // whatever was found before is over
			st.loss.memory = st.loss.memory.With(f.Table(t), canary.Finding{Verdict: v})
		}
	}
	if standing {
		return true
	}
	d.lost(st, f, probed.Digest)
	return false
}

// lastResult is the probe's label: what is known of the family now.
func lastResult(fs *familyState) metrics.ProbeResult {
	result := metrics.ProbeIntact
	for _, ts := range fs.tables {
		switch {
		case ts.verdict.Loss():
			return metrics.ProbeLoss
		case ts.verdict == canary.Unknown:
			result = metrics.ProbeUnknown
		}
	}
	return result
}

// noteKnown notes that what the tables hold was known at that time: everything
// was read, or a probe showed that nothing has moved since or what is lost. A
// stamp that is not exact shows nothing, and what moved and is not read yet is
// not known, nor is a family of which one table cannot be read.
func (fs *familyState) noteKnown(at time.Time) {
	if !fs.examined.dirty.IsZero() || lastResult(fs) == metrics.ProbeUnknown {
		return
	}
	fs.known.at = at
	// While something is lost, of the other tables only the marks were looked at.
	if nat := fs.tables[rules.Nat]; lastResult(fs) == metrics.ProbeIntact && nat != nil && nat.verdict == canary.Intact {
		fs.known.natIntact = at
	}
}

// unseeable notes that nothing can be told of the family's tables now. What was
// seen to be lost stays so until somebody sees otherwise: a read that fails puts
// no rule back.
func (fs *familyState) unseeable() {
	for _, ts := range fs.tables {
		if !ts.verdict.Loss() {
			ts.verdict = canary.Unknown
		}
	}
}

// lacks reports whether something of the family is lost that a replay answers.
func (fs *familyState) lacks() bool {
	for _, ts := range fs.tables {
		if ts.verdict.Loss() && !ts.learningStopped {
			return true
		}
	}
	return false
}

// unknown notes that a family could not be read. It restores nothing and is
// not healthy; the next hint or tick looks again.
func (d *Daemon) unknown(ctx context.Context, fs *familyState, f rules.Family, err error, took time.Duration) {
	d.cfg.Metrics.ObserveProbe(f, metrics.ProbeUnknown, took)
	fs.unseeable()
	if fs.looked.trouble.met(err, time.Now()) {
		klog.FromContext(ctx).Error(err, "The tables could not be read; whether rules were lost is unknown until they can", "family", f)
	}
}
