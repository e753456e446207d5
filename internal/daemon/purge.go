package daemon

import (
	"context"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// noteRemoval remembers a removal from a table that was learned. It reports whether an agent or a
// script may have removed the rules and may come to the marks next; true if the process is not
// known.
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

// noticePurge finds the processes that deleted marks by name. It reports whether rules that they
// deleted before were learned as removed, and are expected again.
func (d *Daemon) noticePurge(ctx context.Context, st *state) (recalled bool) {
	now, q := time.Now(), d.inquire(ctx)
	if st.loss.drill == nil && st.drills.Under == nil {
		for _, w := range st.purges.Notice(q, st.loss.bounds(), st.loss.byName, st.marks.current, now) {
			severity.Warnings(st.flushLog(ctx)).Info("A process deletes rules by name, and canaryd's marks among them; all that it deletes so is a loss",
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

// recallLate is recallPurged for removals whose process became known only now.
func (d *Daemon) recallLate(st *state) {
	if st.purges.MayRecall(time.Now()) {
		d.recallPurged(st, d.inquire(context.Background()))
	}
}

// purged returns a function that reports whether a purge took the rules of a chain, or its jump to
// target, that a read lacks, or whether a flusher took the chain; nil while neither is under way.
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
