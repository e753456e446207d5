package daemon

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
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
)

// look probes every family. It answers all hints given before it.
func (d *Daemon) look(ctx context.Context, st *state) {
	woken := st.woken
	if st.evidence = st.hinted; st.evidence.IsZero() {
		st.evidence = time.Now()
	}
	st.woken, st.lookAt, st.hinted = false, time.Time{}, time.Time{}
	// What a loss makes us read is not the fault of a busy writer.
	free := func() bool { return st.followUp > 0 }
	if st.loss == nil {
		free = func() bool { return st.followUp > 0 || st.loss != nil }
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
	d.tellOwnerless(ctx, st)
	d.lookAtPods(ctx, st)
	d.keepOwners(ctx, st, false)
	d.followUp(st)
}

// followUp plans the looks after a replay: late writers of the same reload
// come within a second, so it looks after 50 ms and then at doubling intervals.
func (d *Daemon) followUp(st *state) {
	if st.followUp == 0 || st.loss != nil {
		return
	}
	st.lookAt = earliest(st.lookAt, time.Now().Add(st.followUp))
	if st.followUp *= 2; st.followUp > d.cfg.PollInterval {
		st.followUp = 0
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
	if woken && !fs.probed.IsZero() && !free() {
		if ready := fs.stampReady(len(st.families)); a.start.Before(ready) {
			fs.unasked, st.lookAt = earliest(fs.unasked, st.evidence), earliest(st.lookAt, ready)
			return a, false
		}
	}
	a.since = earliest(fs.unasked, st.evidence)
	var err error
	a.stamp, err = d.cfg.Kernel.Stamp(ctx, f)
	end := time.Now()
	a.took = end.Sub(a.start)
	fs.urgentProbes.spend(end, a.took, urgentShare*len(st.families))
	if err != nil {
		d.unknown(ctx, fs, f, err, a.took)
		return a, false
	}
	woken, fs.unasked = woken || !fs.unasked.IsZero(), time.Time{}
	still := !fs.trouble.there() && !fs.probed.IsZero() && a.stamp == fs.stamp
	if still && (a.stamp.Exact || !woken && fs.unseen.IsZero() && a.start.Sub(fs.probed) < quietWalk) {
		if a.stamp.Exact {
			fs.noteKnown(a.start)
		}
		d.cfg.Metrics.ObserveProbe(f, lastResult(fs), a.took)
		return a, false
	}
	if woken || !still {
		fs.unseen = earliest(fs.unseen, a.since)
	}
	return a, true
}

// stampReady returns when a hint may make us ask for the stamp again. A stamp
// without shapes was read by executing iptables and is as dear as a walk.
func (fs *familyState) stampReady(families int) time.Time {
	switch {
	case fs.stamp.Exact:
		return time.Time{}
	case fs.stamp.Shapes == iptables.Stamp{}.Shapes:
		return fs.walks.readyAt(walkShare * families)
	default:
		return fs.urgentProbes.readyAt(urgentShare * families)
	}
}

// probeUrgent looks at what moved and is read at once, before any large table of
// any family is walked, and reports whether it found a loss. Marks that it sees
// standing are no reason not to probe.
func (d *Daemon) probeUrgent(ctx context.Context, st *state, families []asked) bool {
	for _, a := range families {
		f, fs := a.family, st.families[a.family]
		part := st.marks.Only(f, a.stamp.Urgent(fs.probedUrgent))
		places := part.Places(f, d.cfg.Canary)
		if len(places) == 0 {
			continue
		}
		start := time.Now()
		holdings, err := d.cfg.Kernel.ProbeOnly(ctx, f, places)
		end := time.Now()
		fs.urgentProbes.spend(end, end.Sub(start), urgentShare*len(st.families))
		if err != nil {
			continue // the probe will tell
		}
		fs.probedUrgent = a.stamp
		st.evidence = a.since
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
	if ready := fs.walks.readyAt(walkShare * len(st.families)); !a.stamp.Exact && !free() && start.Before(ready) {
		st.lookAt = earliest(st.lookAt, ready)
		return
	}
	st.evidence = earliest(st.evidence, fs.unseen)
	probed, err := d.cfg.Kernel.Probe(ctx, f, st.marks.Places(f, d.cfg.Canary))
	end := time.Now()
	took := a.took + end.Sub(start)
	if err != nil {
		fs.walks.spend(end, took, walkShare*len(st.families))
		d.unknown(ctx, fs, f, err, took)
		return
	}
	fs.stamp, fs.probedUrgent, fs.probed, fs.unseen = a.stamp, a.stamp, a.start, time.Time{}
	if fs.trouble.there() {
		fs.examineAt = latest(start, fs.readAt)
	}
	if fs.trouble.over() {
		klog.FromContext(ctx).Info("The tables can be looked at again", "family", f)
	}
	d.judgeProbe(st, f, fs, probed)
	if !free() {
		fs.walks.spend(end, took, walkShare*len(st.families))
	}
	fs.noteKnown(a.start)
	d.cfg.Metrics.ObserveProbe(f, lastResult(fs), took)
}

// judgeProbe notes what a probe showed: a loss, or that something moved.
func (d *Daemon) judgeProbe(st *state, f rules.Family, fs *familyState, probed iptables.Probed) {
	if !d.judgeMarks(st, f, st.marks, probed) {
		return
	}
	fs.intact = probed.Digest
	if fs.examined.IsZero() || probed.Digest != fs.digest {
		fs.markDirty(time.Now())
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

// markDirty plans an examination of what moved.
func (fs *familyState) markDirty(now time.Time) {
	if fs.dirty.IsZero() {
		fs.dirty = now
	}
	at := earliest(now.Add(captureQuiet), fs.dirty.Add(captureMost))
	fs.examineAt = latest(latest(at, fs.readEnd.Add(fs.readPause)), fs.readAt)
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
	if !fs.dirty.IsZero() || lastResult(fs) == metrics.ProbeUnknown {
		return
	}
	fs.knownAt = at
	// While something is lost, of the other tables only the marks were looked at.
	if nat := fs.tables[rules.Nat]; lastResult(fs) == metrics.ProbeIntact && nat != nil && nat.verdict == canary.Intact {
		fs.natIntact = at
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
	if fs.trouble.met(err, time.Now()) {
		klog.FromContext(ctx).Error(err, "The tables could not be read; whether rules were lost is unknown until they can", "family", f)
	}
}

// lost opens a flush record, unless one is open already.
func (d *Daemon) lost(st *state, f rules.Family, digest uint64) {
	if st.loss != nil {
		st.boundAbsence(f)
		st.holdMore()
		return
	}
	now := time.Now()
	defer st.boundAbsence(f)
	st.loss = &loss{
		record: api.Flush{ID: st.newFlushID(st.evidence), Time: st.evidence, Outcome: api.Pending},
		hit:    map[rules.Family]api.Verdicts{}, noticed: now, tryAt: now,
		intact: uint32(st.families[f].intact), heard: uint32(digest), room: diffRoom(),
	}
}

// newFlushID returns the ID of a record that begins at that time. Two may begin with the same
// hint: the second is of a family that was not asked before the first was healed.
func (st *state) newFlushID(at time.Time) string {
	for n := at.UnixMicro(); ; n++ {
		id := fmt.Sprintf("%x", n)
		if !slices.ContainsFunc(st.journal, func(f api.Flush) bool { return f.ID == id }) {
			return id
		}
	}
}

func (d *Daemon) stamps(ctx context.Context, st *state) map[rules.Family]iptables.Stamp {
	stamps := map[rules.Family]iptables.Stamp{}
	for _, f := range rules.Families() {
		if st.families[f] == nil {
			continue
		}
		if stamp, err := d.cfg.Kernel.Stamp(ctx, f); err == nil {
			stamps[f] = stamp
		}
	}
	return stamps
}
