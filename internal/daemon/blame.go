package daemon

import (
	"context"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// inquire returns an Inquiry with the present knowledge of writers and commits, to find the
// processes that took rules.
func (d *Daemon) inquire(ctx context.Context) culprit.Inquiry {
	q := culprit.Inquiry{Canary: d.cfg.Canary, Writers: d.cfg.Writers, Own: d.cfg.Kernel.Own, Legacy: d.cfg.Kernel.Info().Backend == iptables.Legacy}
	if !q.Legacy {
		q.Takings = d.cfg.Kernel.Takings(ctx)
	}
	return q
}

// charge returns the Charge with which an Inquiry looks for a table's culprits; finding is the
// table's loss. upto is the digest or genid of the read that showed it: later commits are not
// blamed.
func (d *Daemon) charge(st *state, id rules.TableID, finding canary.Finding, upto uint64) culprit.Charge {
	fs, mark := st.families[id.Family], st.marks.current[id]
	c := culprit.Charge{ID: id, Finding: finding, Canary: d.cfg.Canary, Nonces: []canary.Nonce{mark.Nonce},
		Intact: uint32(fs.looked.intact), Sound: uint32(fs.examined.sound), Upto: uint32(upto)}
	if ts := st.table(id); !ts.unmarked(id.Name) { // no write proves that anything of it is in force
		c.InForce = uint32(ts.inForce)
	}
	if c.InForce != 0 {
		c.Intact, c.Sound = culprit.Later(c.Intact, c.InForce), culprit.Later(c.Sound, c.InForce)
	}
	if mark.Tried != nil {
		c.Nonces = append(c.Nonces, mark.Tried.Nonce)
	}
	return c
}

// blame names the likely culprits in the record of l, as far as they are known before the loss
// is read under guard. It runs after the wait for the flusher, because a probe sees a commit a
// moment before the watcher has read its message. recordLosses finds the culprits that the
// record names in the end.
func (d *Daemon) blame(ctx context.Context, st *state, l *loss) {
	q := d.inquire(ctx)
	q.Purge = st.purges.Current(time.Now())
	l.record.Culprits, l.record.CulpritsMissed, l.record.CulpritsLikely = nil, false, false
	for id, ts := range st.tables() {
		if finding := st.suspected(l, id, ts.verdict); finding.Verdict.Loss() {
			by, missed := q.Answer(d.charge(st, id, finding, uint64(q.Newest(l.heard))))
			flushes.Accuse(&l.record, by)
			l.record.CulpritsMissed = l.record.CulpritsMissed || missed
		}
	}
	q.AddWriters(&l.record, l.bounds(), l.hit)
	flushes.SettleCulprit(&l.record)
}

// suspected returns the known loss of a table for blame: the finding of a read, or else of a
// probe of its marks. v is its present verdict.
func (st *state) suspected(l *loss, id rules.TableID, v canary.Verdict) canary.Finding {
	finding := l.memory.Finding(id)
	if finding.Verdict.Loss() || !v.Loss() {
		return finding
	}
	finding = canary.Finding{Verdict: v, MarkLost: v != canary.JumpsMissing && v != canary.Drifted}
	if v == canary.JumpsMissing {
		finding.Witnesses = st.marks.current[id].Witnessed
	}
	return finding
}

// noteRemoval remembers a removal that was learned. It reports whether an agent or a script may
// have removed the rules, and may delete the marks next: learn then holds the marks. It is also
// true if the process is not known.
func (d *Daemon) noteRemoval(st *state, id rules.TableID, was, is rules.Section, now time.Time) (mayPurge bool) {
	r := reload.RemovalOf(id, was, is, now)
	if r.Empty() {
		return false
	}
	fs := st.families[id.Family]
	during := culprit.Span{After: st.table(id).settled, Upto: culprit.Read{Digest: fs.examined.digest, At: time.Now()}}
	mayPurge, again := st.purges.Note(d.inquire(context.Background()), r, during, now)
	if !again.IsZero() {
		fs.examined.plan(again)
	}
	return mayPurge
}

// noticePurge finds the processes that deleted marks by name. It reports whether rules that
// they deleted before had been learned as removed, and belong to the generation again: the loss
// then needs another replay.
func (d *Daemon) noticePurge(ctx context.Context, st *state) (recalled bool) {
	now, q := time.Now(), d.inquire(ctx)
	if st.loss.drill == nil && st.drills.Under == nil {
		for _, w := range st.purges.Notice(q, st.loss.bounds(), st.loss.byName, st.marks.current, now) {
			severity.Warnings(st.flushLog(ctx)).Info("A process deletes rules by name, canaryd's marks among them; canaryd counts all its deletions as losses",
				"flush", st.loss.record.ID, "by", flushes.CulpritText(api.CulpritOf(w.OfDoer(w.Doer()))))
		}
	}
	return st.purges.Current(now) != nil && d.recallPurged(st, q)
}

// recallPurged takes rules that the purge removed, and whose removal was learned, back into the
// generation. It reports whether there were any.
func (d *Daemon) recallPurged(st *state, q culprit.Inquiry) (found bool) {
	now := time.Now()
	learned, from := st.purges.Recall(q, st.generation.learned, d.cfg.Protection.Piecewise, now)
	for _, id := range from {
		st.relearn(learned, now, st.families[id.Family])
		st.accepted.Withdraw(id, now.Add(-culprit.PurgeKept))
	}
	return len(from) > 0
}

// recallLate is recallPurged for removals whose process became known only now. Each examination
// calls it.
func (d *Daemon) recallLate(st *state) {
	if st.purges.MayRecall(time.Now()) {
		d.recallPurged(st, d.inquire(context.Background()))
	}
}

// purged returns a function about rules of a chain, or its jump to target, that a read lacks.
// The function reports whether a purge took them, or a flusher took the chain: then they are
// lost, and not removed by their owner (Job.Purged). It is nil while neither is under way.
func (d *Daemon) purged(st *state) func(rules.TableID, string, string) bool {
	now, lost := time.Now(), flushes.Verdicts(nil)
	if st.loss != nil {
		lost = st.loss.hit
	}
	p, swept := st.purges.Current(now), st.purges.Swept(now, lost)
	if p == nil {
		return swept
	}
	settled := map[rules.TableID]culprit.Read{}
	for id, ts := range st.tables() {
		settled[id] = ts.settled
	}
	return p.Purged(d.inquire(context.Background()), time.Now(), settled, swept)
}
