package daemon

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
	"github.com/canaryd/canaryd/pkg/watch"
)

const (
	// quietWalk is how long canaryd trusts an unchanged stamp that is not exact. One walk of
	// the legacy tables in 30 s costs a quiet node nothing (13 ms at 20,000 rules).
	quietWalk = 30 * time.Second
	// On nft an examination costs as much as the changes. It follows captureSoon after the
	// first of them, so that canaryd learns a change within 20 ms. Examinations may take a
	// fifth of a core.
	captureSoon  = 15 * time.Millisecond
	captureShare = 4
	// On legacy a change is examined after captureQuiet without another one, at the latest
	// after captureMost. Reads may take a tenth of a core, and half of the time.
	captureQuiet = 50 * time.Millisecond
	captureMost  = 100 * time.Millisecond
	readShare    = 9
	// firstLookAfter is the distance of the first look after a replay.
	firstLookAfter = 50 * time.Millisecond
)

// looking is when the next look is due, and why.
type looking struct {
	at       time.Time     // of the next look
	last     time.Time     // when the present look began, or the last one,
	before   time.Time     // and the one before it
	hinted   time.Time     // the first hint that waits for a look; zero: none does
	woken    bool          // by a hint, not by the poll: look closely
	evidence time.Time     // since when the findings of the present look may be true
	followUp time.Duration // distance of the looks that follow a replay
	storm    pace.Bucket   // limits the looks that hints cause
	misses   uint64        // the hints of misses that looks have answered
	missed   bool          // the present look answers a miss: its commit may not be heard of yet
}

// hint plans a close look because of something that happened just now. It is due at once; but
// if an owner commits hundreds of times a second, looks are 5 ms apart.
func (l *looking) hint(now time.Time) {
	l.hinted, l.woken = pace.Earliest(l.hinted, now), true
	l.plan(pace.Latest(now, l.storm.ReadyAt()))
}

// plan makes a look due at that time, or before.
func (l *looking) plan(at time.Time) { l.at = pace.Earliest(l.at, at) }

// begin starts a look, and reports whether a hint caused it: then families whose stamp is not
// exact need a probe.
func (l *looking) begin(now time.Time) (woken bool) {
	woken, l.evidence = l.woken, l.hinted
	if l.evidence.IsZero() {
		l.evidence = now
	}
	l.woken, l.at, l.hinted = false, time.Time{}, time.Time{}
	l.before, l.last = l.last, now
	return woken
}

// afterReplay plans the first look after a replay. Late writers of the same reload write within
// a second. So the first look is due after 50 ms, and the next ones at doubling distances.
func (l *looking) afterReplay(now time.Time) {
	if !l.woken { // else a hint waits
		l.at = time.Time{}
	}
	l.plan(now.Add(firstLookAfter))
	l.followUp = 2 * firstLookAfter
}

// planFollowUp plans the next of the looks after a replay, up to a distance of most. Then the
// poll looks for late writers.
func (l *looking) planFollowUp(now time.Time, most time.Duration) {
	if l.followUp == 0 {
		return
	}
	l.plan(now.Add(l.followUp))
	if l.followUp *= 2; l.followUp > most {
		l.followUp = 0
	}
}

// looked holds the results of stamps and probes of one family.
type looked struct {
	stamp   iptables.Stamp // of the last probe
	at      time.Time      // of the last probe; zero: never
	urgent  iptables.Stamp // up to which urgent tables were probed
	unasked time.Time      // when the first hint arrived that waits for a stamp; zero: none does
	unseen  time.Time      // since when writes may be unprobed; zero: none are
	intact  uint64         // digest of the last probe that found all marks intact
	trouble pace.Trouble   // why the last probe failed
	budget  pace.Budget    // limits the time of stamps and probes
}

// lookEverywhere looks at iptables' tables. If a hint caused the look, it also plans a look at
// native tables, because a hint does not name the changed tables.
func (d *Daemon) lookEverywhere(ctx context.Context, st *state) {
	if l, now := &st.looking, time.Now(); l.woken {
		if !now.Before(l.storm.ReadyAt()) { // a tick may be earlier
			l.storm.Spend(now, pace.StormCharge)
		}
		d.hintNative(st, l.hinted)
	}
	d.look(ctx, st)
}

// look reads the stamp of each family, probes the marks of families that may have changed, and
// judges the results. It answers all hints given before it.
func (d *Daemon) look(ctx context.Context, st *state) {
	woken := st.looking.begin(time.Now())
	// Probes because of a loss or a replay do not draw on the budget of a busy writer.
	lost := st.loss != nil
	misses := d.cfg.Hints.Of(watch.SourceMiss)
	st.looking.missed, st.looking.misses = misses != st.looking.misses, misses
	free := func() bool { return st.looking.followUp > 0 || !lost && st.loss != nil }
	moved := d.askStamps(ctx, st, woken, free)
	if lost || !d.probeUrgent(ctx, st, moved) {
		for _, a := range moved {
			if probed, ok := d.probe(ctx, st, a, free); ok {
				d.judgeProbe(ctx, st, probed, free)
			}
		}
	}
	if !lost && st.loss != nil {
		st.loss.early = st.looking.missed
	}
	d.readRestored(ctx, st)
	d.logOwnerless(ctx, st)
	d.lookAtPods(ctx, st)
	d.keepOwners(ctx, st, false)
	if st.loss == nil {
		st.looking.planFollowUp(time.Now(), d.cfg.PollInterval)
	}
}

// An asked is a family whose stamp was read, and whose marks need a probe.
type asked struct {
	family rules.Family
	stamp  iptables.Stamp
	start  time.Time // when the stamp was read
	since  time.Time // the first hint since the stamp before
	took   time.Duration
	cost   time.Duration // of the processor, for budgets
}

// askStamps reads the stamps of the families, and returns the families that need a probe.
// woken: a hint caused the look. free reports whether looks may exceed the budget: a loss was
// just found, or a replay has just ended. Otherwise a family may wait for its budget.
func (d *Daemon) askStamps(ctx context.Context, st *state, woken bool, free func() bool) []asked {
	var families []asked
	for _, f := range rules.Families() {
		fs := st.families[f]
		if fs == nil || !st.anyPlanted(f) {
			continue
		}
		if ready := fs.looked.budget.StampAt(fs.looked.stamp); woken && !fs.looked.at.IsZero() && !free() && time.Now().Before(ready) {
			fs.looked.unasked = pace.Earliest(fs.looked.unasked, st.looking.evidence)
			st.looking.plan(ready)
			continue
		}
		if a, moved := d.askStamp(ctx, st, f, woken); moved {
			families = append(families, a)
		}
	}
	return families
}

// askStamp reads the stamp of one family, and reports whether its marks need a probe. They do
// if a process has written or, without an exact stamp, may have: after a hint (woken), or
// quietWalk after the last probe.
func (d *Daemon) askStamp(ctx context.Context, st *state, f rules.Family, woken bool) (asked, bool) {
	fs, l := st.families[f], &st.families[f].looked
	a := asked{family: f, start: time.Now(), since: pace.Earliest(l.unasked, st.looking.evidence)}
	cost := d.metered(l.stamp)
	var err error
	a.stamp, err = d.cfg.Kernel.Stamp(ctx, f)
	end := time.Now()
	a.took = end.Sub(a.start)
	a.cost = cost(a.took)
	l.budget.Urgent.Spend(end, a.cost)
	if err != nil {
		d.probeFailed(ctx, fs, f, err, a.took)
		return a, false
	}
	woken, l.unasked = woken || !l.unasked.IsZero(), time.Time{}
	still := !l.trouble.There() && !l.at.IsZero() && a.stamp == l.stamp
	if still && (a.stamp.Exact || !woken && l.unseen.IsZero() && a.start.Sub(l.at) < quietWalk) {
		if a.stamp.Exact {
			fs.setKnown(a.start)
		}
		d.cfg.Metrics.ObserveProbe(f, fs.probeResult(), a.took)
		return a, false
	}
	if woken || !still {
		l.unseen = pace.Earliest(l.unseen, a.since)
	}
	return a, true
}

// probeUrgent probes changed tables that are small or have lost half of their size, before the
// walk of any large table. It reports whether a loss is open then. If the standby has a copy of
// nat, nat's marks are probed first: packets are being lost. A look after the gate has opened,
// and before the heal, probes the other marks. Marks that are intact here are probed again with
// all others.
func (d *Daemon) probeUrgent(ctx context.Context, st *state, families []asked) bool {
	for _, a := range families {
		f, l := a.family, &st.families[a.family].looked
		urgent := a.stamp.Urgent(l.urgent)
		if st.heals() && st.standby[f.Table(rules.Nat)].has() {
			urgent = append(urgent, rules.Nat)
		}
		part := st.marks.current.Only(f, urgent)
		places := part.Places(f, d.cfg.Canary)
		if len(places) == 0 {
			continue
		}
		start, cost := time.Now(), d.metered(a.stamp)
		result, err := d.cfg.Kernel.ProbeOnly(ctx, f, places)
		end := time.Now()
		l.budget.Urgent.Spend(end, cost(end.Sub(start)))
		if err != nil {
			continue // the probe of all marks will show it
		}
		l.urgent, st.looking.evidence = a.stamp, a.since
		if !d.judgeMarks(st, f, part, result) {
			d.cfg.Metrics.ObserveProbe(f, metrics.ProbeLoss, end.Sub(a.start))
			if a.stamp.Exact { // only nat was probed: the others follow once the gate is open
				st.looking.plan(time.Now())
			}
		}
	}
	// The heal answers all hints until now, if it can read.
	return st.loss != nil
}

// metered begins to measure a part of a look, and returns a function that turns its duration
// into the cost for the budget. The budget is a share of a core, and on a busy machine a look
// mostly waits for one. Counted by the clock, a walk of 1,000 rules was put off by 5 s. Exact
// stamps have no budget, and reading the CPU time would take a tenth of a look.
func (d *Daemon) metered(stamp iptables.Stamp) (cost func(took time.Duration) time.Duration) {
	switch {
	case stamp.Exact:
		return func(time.Duration) time.Duration { return 0 }
	case d.cfg.CPU == nil:
		return func(took time.Duration) time.Duration { return took }
	}
	used := d.cpu()
	return func(took time.Duration) time.Duration { return min(took, d.cpu()-used) }
}

// A probed is the result of a probe of all marks of a family.
type probed struct {
	asked  asked
	end    time.Time
	result iptables.Probed
}

// probe probes all marks of a family, so that judgeProbe finds a loss. It returns false if it
// could not, or has to wait for its budget, unless free allows more.
func (d *Daemon) probe(ctx context.Context, st *state, a asked, free func() bool) (probed, bool) {
	fs, start := st.families[a.family], time.Now()
	if ready := fs.looked.budget.ProbeAt(a.stamp); !free() && start.Before(ready) {
		st.looking.plan(ready)
		return probed{}, false
	}
	st.looking.evidence = pace.Earliest(st.looking.evidence, fs.looked.unseen)
	cost := d.metered(a.stamp)
	result, err := d.cfg.Kernel.Probe(ctx, a.family, st.marks.current.Places(a.family, d.cfg.Canary))
	end := time.Now()
	a.took += end.Sub(start)
	a.cost += cost(end.Sub(start))
	if err != nil {
		fs.looked.budget.Walks.Spend(end, a.cost)
		d.probeFailed(ctx, fs, a.family, err, a.took)
		return probed{}, false
	}
	return probed{a, end, result}, true
}

// judgeProbe takes the result of a probe into the state: a loss, or a change to examine. The
// time counts against the budget unless free says otherwise.
func (d *Daemon) judgeProbe(ctx context.Context, st *state, p probed, free func() bool) {
	a, f := p.asked, p.asked.family
	fs := st.families[f]
	l := &fs.looked
	l.stamp, l.urgent, l.at, l.unseen = a.stamp, a.stamp, a.start, time.Time{}
	if l.trouble.There() {
		fs.examined.dueAt = pace.Latest(p.end, fs.examined.notBefore)
	}
	if l.trouble.Over() {
		severity.Notices(klog.FromContext(ctx)).Info(tablesRead, "tables", f)
	}
	if d.judgeMarks(st, f, st.marks.current, p.result) {
		l.intact = p.result.Digest
		if fs.examined.at.IsZero() || p.result.Digest != fs.examined.digest {
			fs.markDirty(time.Now())
		}
	} else if st.pause.on() && st.loss.shown() && p.result.Digest != st.loss.seen[f] { // its owner may have put all back
		st.loss.retry.At = pace.Earliest(st.loss.retry.At, pace.Latest(p.end.Add(captureQuiet), st.loss.again))
	}
	if !free() {
		l.budget.Walks.Spend(p.end, a.cost)
	}
	fs.setKnown(a.start)
	d.cfg.Metrics.ObserveProbe(f, fs.probeResult(), a.took)
}

// judgeMarks reports whether these marks are intact, and opens a loss if they are not. marks
// may be a part of the family's marks. Probes call it for looks, and lostMore for work that a
// loss interrupts.
func (d *Daemon) judgeMarks(st *state, f rules.Family, marks canary.Marks, probed iptables.Probed) bool {
	for t := range tableid.Of(marks, f) {
		d.cfg.Metrics.SetCanaryPresent(f, t, marks.CanaryPresent(f, t, d.cfg.Canary, probed))
	}
	standing := true
	for t, v := range marks.Verdicts(f, d.cfg.Canary, probed) {
		switch {
		case v.Loss():
			standing = false
			d.take(st, tableFinding{id: f.Table(t), source: lossesOnly, finding: canary.Finding{Verdict: v}})
		case st.loss != nil: // an earlier finding is over
			st.loss.memory = st.loss.memory.With(f.Table(t), canary.Finding{Verdict: v})
		}
	}
	if standing {
		return true
	}
	d.openLossNow(st, f, probed.Digest, time.Since(st.looking.last))
	st.loss.byName = st.loss.byName || culprit.DeletedByName(d.cfg.Canary, marks, f, probed)
	return false
}

// probeFailed notes that a family could not be probed. canaryd restores nothing, and the node
// is not healthy; the next hint or tick looks again. A probe that the end of the run
// interrupted says nothing: the last look follows, and the generation is saved.
func (d *Daemon) probeFailed(ctx context.Context, fs *familyState, f rules.Family, err error, took time.Duration) {
	if errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	d.cfg.Metrics.ObserveProbe(f, metrics.ProbeUnknown, took)
	fs.setUnknown()
	if fs.looked.trouble.Met(err, time.Now()) {
		klog.FromContext(ctx).Error(err, tablesUnread, "tables", f)
	}
}
