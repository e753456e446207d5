package daemon

import (
	"cmp"
	"context"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pods"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// recordLosses puts the losses that a guarded read showed into the open record, counts them and
// logs them. It skips tables that the record already has, so that another try counts nothing
// twice.
func (d *Daemon) recordLosses(ctx context.Context, st *state, found map[rules.TableID]flushes.Hit) {
	l := st.loss
	d.nameDrill(ctx, st, found)
	before := l.record.Lost
	fresh := flushes.Verdicts{}
	q := culprit.Inquiry{}
	p := st.purges.Current(time.Now())
	for _, id := range flushes.TableIDs() {
		h := found[id]
		again := l.hit[id] != "" && p != nil && !l.recovery.back[id].IsZero() // a purge continues
		if !h.Verdict.Loss() || l.hit[id] != "" && !again {
			continue
		}
		if p != nil {
			p.WroteAt(time.Now())
		}
		if again {
			flushes.AddMore(&l.record, id, h)
			l.addDiff(flushes.DiffOf(id, h.Lost, &l.room))
			continue
		}
		if len(fresh) == 0 {
			q = d.inquire(ctx)
			q.Purge = p
		}
		l.dropSuspects()
		if l.record.Drill == "" {
			var missed bool
			h.By, missed = q.Answer(d.charge(st, id, h.Finding, h.Seen))
			l.record.CulpritsMissed = l.record.CulpritsMissed || missed
			h.Others, h.Unsure = d.unprotectedGone(st, id, h, q)
			d.cfg.Metrics.ObserveUnprotected(id.Family, id.Name, h.Others, h.Unsure)
		}
		l.heard = culprit.Later(l.heard, uint32(h.Seen))
		fresh[id], l.hit[id] = h.Verdict, h.Verdict
		flushes.AddLoss(&l.record, id, h)
		st.baseline.AddTo(&l.record, id, h.Lost)
		st.pods.AddPods(&l.record, pods.LostPods(h.Lost), false)
		l.addDiff(flushes.DiffOf(id, h.Lost, &l.room))
	}
	if len(fresh) == 0 {
		return
	}
	for id := range fresh {
		now := func() string { return contentID(st.generation.learned.Generation[id]) }
		l.record.Older = cmp.Or(l.record.Older, st.older.takenFrom(id, now))
	}
	q.AddWriters(&l.record, l.bounds(), l.hit)
	flushes.SettleCulprit(&l.record)
	if l.record.Drill != "" { // canaryd itself took the lost rules, no other process
		l.record.Culprit, l.record.Culprits, l.record.Writers = api.Culprit{}, nil, nil
		l.record.CulpritsMissed, l.record.CulpritsLikely = false, false
	}
	if !l.resumed {
		l.record.NoticedSeconds = l.noticed.Sub(l.record.Time).Seconds()
	}
	d.count(l, fresh)
	d.logLosses(ctx, st, fresh, before)
}

// count counts tables of a record. A record without a rule is not counted: the flush took marks
// or empty chains, which no packet meets. Drifts and saved rules count anyway: a rule may be
// too many, or in another place.
func (d *Daemon) count(l *loss, fresh flushes.Verdicts) {
	switch {
	case l.counted:
		d.cfg.Metrics.ObserveFurtherLoss(fresh.Public())
	case l.record.Lost.Rules > 0, l.record.Kind == canary.Drifted, l.record.Kind == canary.Replaced && l.record.Lost.Chains > 0:
		d.cfg.Metrics.ObserveFlush(l.record.Time, l.hit.Public())
		l.counted = true
	}
}

// logNotice logs that a flush of iptables' tables was noticed.
func (d *Daemon) logNotice(ctx context.Context, st *state) {
	says, log := flushNoticed, severity.Warnings(st.flushLog(ctx))
	if st.loss.jumpsDeleted {
		says = "Rules that were deleted by name are still missing after --jump-grace"
	}
	if st.drills.TookAll(st.losses()) {
		says, log = drillNoticed, severity.Notices(log)
	}
	st.loss.logNotice(log, says, st.losses().Text(), st.nextStep())
}

// nextStep says for the log how canaryd answers a loss that it has noticed.
func (st *state) nextStep() string {
	switch {
	case st.mode == api.Observe:
		return "observe mode: the rules' owner has to put them back"
	case st.pause.on():
		return "replays are paused until " + st.pause.until.UTC().Format(time.RFC3339)
	}
	return "replaying the generation"
}

// losses returns the tables that are lost as far as is known, for the log and the status,
// before a read under guard.
func (st *state) losses() flushes.Verdicts {
	lost := flushes.Verdicts{}
	for id, ts := range st.tables() {
		if ts.verdict.Loss() {
			lost[id] = ts.verdict
		}
	}
	return lost
}

// logLosses logs the exact losses of the tables that were added to the record (fresh), which had
// the losses before.
func (d *Daemon) logLosses(ctx context.Context, st *state, fresh flushes.Verdicts, before api.Lost) {
	l, log := st.loss, st.flushLog(ctx)
	lost := l.record.Lost.Since(before)
	what, level := "Rules were lost", severity.Warnings
	switch {
	case l.record.Drill == api.DrillCanary:
		what, level = drillTook, severity.Notices
	case lost.Rules+lost.Chains+lost.Jumps == 0 && l.record.Kind != canary.Drifted:
		what = "Marks of canaryd were lost, and no protected rule of iptables' tables"
	}
	l.logLost(level(log), what, fresh.Text(), lost)
	if lost.Unprotected > 0 {
		severity.Warnings(log).Info("Rules that --protect does not name were lost, too; their owners have to put them back", "flush", l.record.ID, "rules", lost.Unprotected)
	}
	if lost.UnprotectedUnknown {
		var unknown []string
		for _, table := range lost.Tables {
			if table.UnprotectedUnknown {
				unknown = append(unknown, table.Family.Table(table.Table).String())
			}
		}
		severity.Warnings(log).Info("Some tables may have lost rules that --protect does not name, too; their owners have to check them",
			"flush", l.record.ID, "tables", strings.Join(unknown, ", "))
	}
	if len(l.record.Pods) > 0 {
		severity.Warnings(log).Info("Host ports of pods were lost", "flush", l.record.ID, "pods", flushes.PodTexts(l.record), "more", l.record.MorePods)
	}
	for _, p := range l.record.Policies {
		severity.Warnings(log).Info("The policy of a built-in chain has changed; canaryd never sets policies", "flush", l.record.ID, "policy", p)
	}
}

// logDetours logs, at the end of a loss, the parts that went another way than expected.
func (d *Daemon) logDetours(ctx context.Context, st *state, l *loss, result reload.Result) {
	log := st.flushLog(ctx)
	for id, tr := range flushes.TablesOf(result) {
		if n := len(tr.Skipped); n > 0 {
			severity.Notices(log).Info("Chains were left as their owner had written them meanwhile", "flush", l.record.ID,
				"family", id.Family, "table", id.Name, "count", n, "chains", tr.Skipped[:min(n, flushes.NamesKept)])
		}
	}
	for f, fr := range result {
		if fr.Detour != nil && fr.Outcome != reload.Skipped {
			log.Info("Tables were written by iptables-restore, which takes longer", "flush", l.record.ID, "family", f, "directly", fr.Direct, "reason", fr.Detour)
		}
		if fr.Aftercare != nil {
			severity.Warnings(log).Error(fr.Aftercare, "kube-proxy could not be asked for a full sync", "flush", l.record.ID, "family", f)
		}
	}
}

// The log's lines about tables that cannot be probed or read, and that can be read again.
const (
	tablesUnread = "The tables could not be read; canaryd does not know whether they lost rules"
	tablesRead   = "The tables can be read again"
)
