package daemon

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// examine reads the families in which something moved, judges them, and
// learns what their owners decided.
func (d *Daemon) examine(ctx context.Context, st *state) {
	for _, f := range rules.Families() {
		if fs := st.families[f]; fs != nil && due(fs.examineAt, time.Now()) {
			d.examineFamily(ctx, st, f, fs)
		}
	}
	d.thaw(ctx, st)
}

func (d *Daemon) examineFamily(ctx context.Context, st *state, f rules.Family, fs *familyState) {
	start := time.Now()
	fs.examineAt = time.Time{}
	snapshot, err := d.cfg.Kernel.Read(ctx, f)
	fs.readEnd, fs.readCost = time.Now(), time.Since(start)
	if err != nil {
		d.unknown(ctx, fs, f, err, fs.readCost)
		fs.examineAt = fs.readEnd.Add(max(d.cfg.PollInterval, readShare*fs.readCost))
		return
	}
	fs.digest, fs.examined, fs.dirty = snapshot.Digest, start, time.Time{}
	found := d.examiner.Examine(snapshot, d.job(st, f))
	d.noteMoves(fs, found, start)
	missing := map[rules.TableName]int{}
	for _, t := range rules.Guarded() {
		x, ts := found[t], fs.tables[t]
		missing[t] = len(x.Finding.Hooks) + len(x.Finding.Waiting)
		st.marks = st.marks.With(f, t, x.Mark)
		switch {
		case ts.frozen && !x.Finding.MarkLost:
			ts.frozen = !canary.Covers(st.learned.Generation[f][t], snapshot.Tables[t])
			if ts.frozen {
				continue
			}
			ts.verdict = canary.Intact
		default:
			ts.verdict = x.Finding.Verdict
		}
		switch {
		case ts.verdict.Loss():
			d.lost(st, f, snapshot.Digest)
		case ts.verdict == canary.Unknown:
			klog.FromContext(ctx).V(1).Info("A table could not be examined", "family", f, "table", t, "reason", x.Finding.Err)
		default:
			d.learn(st, f, t, x.Section, x.Finding, start)
		}
		if len(x.Finding.Waiting) > 0 {
			fs.examineAt = earliest(fs.examineAt, fs.moved.Add(d.cfg.HookGrace))
		}
	}
	d.cfg.Metrics.ObserveExamination(start, f, missing)
}

// noteMoves remembers when something protected in the family changed last.
func (d *Daemon) noteMoves(fs *familyState, found map[rules.TableName]reload.Examined, now time.Time) {
	for t, x := range found {
		ts := fs.tables[t]
		if x.Finding.Verdict == canary.Unknown {
			continue
		}
		if ts.known && !ts.seen.Equal(x.Section) {
			fs.moved = now
		}
		ts.seen, ts.known = x.Section, true
	}
}

// learn takes one table's section into the generation and plans what follows:
// another examination while something shrunk waits, and a new nonce.
func (d *Daemon) learn(st *state, f rules.Family, t rules.TableName, seen rules.Section, finding canary.Finding, now time.Time) {
	fs, ts := st.families[f], st.families[f].tables[t]
	before := st.learned.Generation[f][t]
	first := !st.learned.Knows(f, t)
	next, again := st.learned.Learn(f, t, seen, finding, now)
	st.learned = next
	ts.seen, ts.known = seen, true
	ts.pending = !again.IsZero() || len(finding.Waiting) > 0
	if ts.pending {
		ts.verdict = canary.Changed
		fs.examineAt = earliest(fs.examineAt, again)
	} else {
		ts.verdict = canary.Intact
	}
	if first || !before.Equal(next.Generation[f][t]) {
		st.captured = now
		st.saveAt = earliest(st.saveAt, latest(now.Add(saveQuiet), st.savedAt.Add(saveShare*st.saveCost)))
		if !first {
			fs.planRotation(now)
		}
	}
}

// thaw ends a loss of observe mode once nothing is frozen any more.
func (d *Daemon) thaw(ctx context.Context, st *state) {
	if d.cfg.Mode != Observe || st.loss == nil || !st.loss.told || !st.loss.tryAt.IsZero() {
		return
	}
	for _, fs := range st.families {
		for _, ts := range fs.tables {
			if ts.frozen {
				return
			}
		}
	}
	d.recovered(ctx, st, nil)
}
