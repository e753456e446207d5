package daemon

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// quietWalk is how long a stamp that is not exact may stand for the
	// content: one walk of the legacy tables in 30 s costs a quiet node
	// nothing (13 ms at 20,000 rules).
	quietWalk = 30 * time.Second
	// walkShare keeps probes whose stamp did not move to 2 % of a core.
	walkShare = 49
	// A change is examined after captureQuiet without another one, at the
	// latest after captureMost; a full read may take a tenth of a core.
	captureQuiet = 50 * time.Millisecond
	captureMost  = 250 * time.Millisecond
	readShare    = 9
	// holderWindow is how long before the first evidence of a loss a holder
	// of the xtables lock may have done it.
	holderWindow = time.Second
)

// look probes every family. It answers all hints given before it.
func (d *Daemon) look(ctx context.Context, st *state) {
	woken := st.woken
	if st.evidence = st.hinted; st.evidence.IsZero() {
		st.evidence = time.Now()
	}
	st.woken, st.lookAt, st.hinted = false, time.Time{}, time.Time{}
	for _, f := range rules.Families() {
		if fs := st.families[f]; fs != nil && st.anyPlanted(f) {
			d.lookAt(ctx, st, f, fs, woken)
		}
	}
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

func (d *Daemon) lookAt(ctx context.Context, st *state, f rules.Family, fs *familyState, woken bool) {
	start := time.Now()
	stamp, err := d.cfg.Kernel.Stamp(ctx, f)
	if err != nil {
		d.unknown(ctx, fs, f, err, time.Since(start))
		return
	}
	still := fs.trouble == "" && !fs.probed.IsZero() && stamp == fs.stamp
	if still && (stamp.Exact || !woken && start.Sub(fs.probed) < quietWalk) {
		d.cfg.Metrics.ObserveProbe(f, d.lastResult(fs), time.Since(start))
		return
	}
	if still && !stamp.Exact && woken {
		if ready := fs.probeEnd.Add(walkShare * fs.cost); start.Before(ready) {
			st.lookAt, st.woken = earliest(st.lookAt, ready), true
			return
		}
	}
	sighting, err := d.cfg.Kernel.Probe(ctx, f, st.marks.Places(f, d.cfg.Canary))
	if err != nil {
		d.unknown(ctx, fs, f, err, time.Since(start))
		return
	}
	fs.stamp, fs.probed, fs.probeEnd, fs.cost = stamp, start, time.Now(), time.Since(start)
	if fs.trouble != "" {
		klog.FromContext(ctx).Info("The tables can be looked at again", "family", f)
		fs.trouble, fs.examineAt = "", latest(start, fs.readAt)
	}
	d.judgeSighting(st, f, fs, sighting)
	d.cfg.Metrics.ObserveProbe(f, d.lastResult(fs), time.Since(start))
}

// judgeSighting notes what a probe showed: a loss, or that something moved.
func (d *Daemon) judgeSighting(st *state, f rules.Family, fs *familyState, sighting iptables.Sighting) {
	for _, t := range rules.Guarded() {
		d.cfg.Metrics.SetCanaryPresent(f, t, st.marks.CanaryPresent(f, t, d.cfg.Canary, sighting))
	}
	if !st.marks.Standing(f, d.cfg.Canary, sighting) {
		for t, v := range st.marks.Glance(f, d.cfg.Canary, sighting) {
			if v.Loss() {
				fs.tables[t].verdict = v
			}
		}
		d.lost(st, f, sighting.Digest)
		return
	}
	fs.intact = sighting.Digest
	if fs.examined.IsZero() || sighting.Digest != fs.digest {
		fs.markDirty(time.Now())
	}
}

// markDirty plans an examination of what moved.
func (fs *familyState) markDirty(now time.Time) {
	if fs.dirty.IsZero() {
		fs.dirty = now
	}
	at := earliest(now.Add(captureQuiet), fs.dirty.Add(captureMost))
	fs.examineAt = latest(latest(at, fs.readEnd.Add(readShare*fs.readCost)), fs.readAt)
}

// lastResult is the probe's label: what is known of the family now.
func (d *Daemon) lastResult(fs *familyState) ProbeResult {
	result := ProbeIntact
	for _, ts := range fs.tables {
		switch {
		case ts.verdict.Loss():
			return ProbeLoss
		case ts.verdict == canary.Unknown:
			result = ProbeUnknown
		}
	}
	return result
}

// unknown notes that a family could not be read. It restores nothing and is
// not healthy; the next hint or tick looks again.
func (d *Daemon) unknown(ctx context.Context, fs *familyState, f rules.Family, err error, took time.Duration) {
	d.cfg.Metrics.ObserveProbe(f, ProbeUnknown, took)
	for _, ts := range fs.tables {
		ts.verdict = canary.Unknown
	}
	if fs.trouble != err.Error() {
		klog.FromContext(ctx).Error(err, "The tables could not be read; whether rules were lost is unknown until they can", "family", f)
		fs.trouble = err.Error()
	}
}

// lost opens a flush record, unless one is open already.
func (d *Daemon) lost(st *state, f rules.Family, digest uint64) {
	if st.loss != nil {
		return
	}
	now := time.Now()
	st.loss = &loss{
		record: Flush{ID: fmt.Sprintf("%x", st.evidence.UnixMicro()), Time: st.evidence, Outcome: Pending},
		hit:    map[rules.Family]Verdicts{}, noticed: now, tryAt: now,
		intact: st.families[f].intact, digest: digest,
	}
}

// blame names who wrote between the last intact look and the first loss. It is
// asked after settling, because a commit is visible to a probe a moment before
// the watcher has read its notification.
func (d *Daemon) blame(l *loss) {
	var writers []canary.Writer
	if d.cfg.Kernel.Info().Backend == iptables.NFT {
		writers = d.cfg.Writers.Between(uint32(l.intact), uint32(l.digest))
	} else {
		writers = d.cfg.Writers.Since(l.record.Time.Add(-holderWindow))
		writers = slices.DeleteFunc(writers, func(w canary.Writer) bool { return w.Time.After(l.noticed) })
	}
	for _, w := range writers {
		if w.PID != uint32(os.Getpid()) {
			l.record.Writers = append(l.record.Writers, CulpritOf(w))
		}
	}
	if n := len(l.record.Writers); n > 0 {
		l.record.Culprit = l.record.Writers[n-1]
	}
}

// settle waits until the family of writers that is at work has been quiet for
// --settle, at most ten times as long: flushers come in several commands, and
// half a flush is not worth a replay.
func (d *Daemon) settle(ctx context.Context, st *state) {
	const look = 5 * time.Millisecond
	last := d.stamps(ctx, st)
	quiet := time.Now()
	for end := quiet.Add(10 * d.cfg.Settle); time.Since(quiet) < d.cfg.Settle && time.Now().Before(end); {
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(look, d.cfg.Settle)):
		}
		if now := d.stamps(ctx, st); !slices.Equal(now, last) {
			last, quiet = now, time.Now()
		}
	}
}

func (d *Daemon) stamps(ctx context.Context, st *state) []uint64 {
	var values []uint64
	for _, f := range rules.Families() {
		if st.families[f] == nil {
			continue
		}
		stamp, err := d.cfg.Kernel.Stamp(ctx, f)
		if err != nil {
			stamp = iptables.Stamp{}
		}
		values = append(values, stamp.Value)
	}
	return values
}
