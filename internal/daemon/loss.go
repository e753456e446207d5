package daemon

import (
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/drill"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// loss is a flush record in the making.
type loss struct {
	record       api.Flush
	drill        *drill.Drill // that ended before the loss: what it took is no flush
	noticed      time.Time
	window       time.Time                   // what is lost stood then: the end of the last write; zero: none is known
	early        bool                        // a missed packet showed it: the flusher's commit may be under way
	intact       uint32                      // the genid of the last intact look, and the last one at
	heard        uint32                      // which something was found lost
	hit          flushes.Verdicts            // tables counted so far
	lockedBy     string                      // the process that holds the xtables lock; "": none is known to
	unread       *unreadLoss                 // the record that a Status has before any read; nil: it has none
	noticeLogged bool                        // the log has that it was noticed
	byName       bool                        // on legacy: a canary went by itself
	blamed       bool                        // its culprits were looked for
	recorded     bool                        // the record and the log have what was lost
	counted      bool                        // whether metrics have it
	jumpsDeleted bool                        // jumps were deleted by name, and their grace is over
	memory       reload.Memory               // what reads and tries have shown
	gone         map[protect.Attachment]bool // containers that the last replay left out
	recovery     recovery                    // what the tries have put back so far
	attempts     int
	retry        pace.Retry

	diff   []api.TableDiff // of the tables that were hit
	room   flushes.Room    // how much more it may hold
	unkept []api.TableDiff // diff, while the journal does not have it

	trouble pace.Trouble // why it lasts, for the log
	failed  error        // the last try's; nil: it did not fail
}

// bounds returns between which times and genids the loss came about.
func (l *loss) bounds() culprit.Bounds {
	return culprit.Bounds{First: l.record.Time, Written: l.window, Noticed: l.noticed, Intact: l.intact, Heard: l.heard}
}

// openLoss opens a flush record, unless one is open already.
func (st *state) openLoss(f rules.Family, digest uint64) {
	if st.loss != nil {
		st.boundAbsence(f)
		st.recordMore()
		return
	}
	now, at := time.Now(), st.looking.evidence
	if anyOf(st.standby, (*standbyOf).native) { // the hint for them may come after the replay has begun
		st.native.lookAt = pace.Earliest(st.native.lookAt, now)
	}
	defer st.boundAbsence(f)
	st.loss = &loss{
		record: api.Flush{ID: st.newFlushID(at), Time: at, Outcome: api.Pending}, drill: st.drills.DoubtAt(now),
		window: st.families[f].written, hit: flushes.Verdicts{}, noticed: now, retry: pace.Retry{At: now},
		intact: uint32(st.families[f].looked.intact), heard: uint32(digest), room: flushes.DiffRoom(),
	}
}

// openLossNow is openLoss of what a probe or a read of that digest shows now.
func (d *Daemon) openLossNow(st *state, f rules.Family, digest uint64) {
	d.dateLoss(st, f, digest)
	fresh := st.loss == nil
	if st.openLoss(f, digest); fresh {
		d.boundStall(st, f)
	}
}

// dateLoss finds out since when a loss in a family may be so that a probe or a read of that digest
// shows. What was put back was in force after the write, whatever was hinted at before it. Where
// all commits since were heard of, the loss came with the first of them or later.
func (d *Daemon) dateLoss(st *state, f rules.Family, digest uint64) {
	fs, l := st.families[f], &st.looking
	if st.loss != nil {
		return
	}
	if l.evidence.Before(fs.written) {
		l.evidence = pace.Latest(fs.examined.since, fs.written)
	}
	if d.cfg.Kernel.Info().Backend != iptables.NFT || l.missed {
		return
	}
	intact := uint32(fs.looked.intact)
	for _, ts := range fs.tables {
		intact = culprit.Later(intact, uint32(ts.inForce))
	}
	if list := d.cfg.Writers.Between(intact, uint32(digest)); len(list) > 0 && d.cfg.Writers.Heard(intact, uint32(digest)) {
		l.evidence = pace.Latest(l.evidence, list[0].Time)
	}
}

// newFlushID returns the ID of a record that begins at that time. Two may begin with the same
// hint: the second is of a family that was not asked before the first was healed.
func (st *state) newFlushID(at time.Time) string {
	for n := at.UnixMicro(); ; n++ {
		id := fmt.Sprintf("%x", n)
		if !st.hasFlush(id) {
			return id
		}
	}
}

// hasFlush reports whether a record has that ID, an open one included.
func (st *state) hasFlush(id string) bool {
	return st.loss != nil && st.loss.record.ID == id || st.native.loss != nil && st.native.loss.record.ID == id ||
		anyOf(st.native.waiting, func(w *api.Flush) bool { return w.ID == id }) ||
		st.journal.Index(id) >= 0
}

// remember takes up what a read of one family found.
func (l *loss) remember(f rules.Family, examined map[rules.TableName]reload.Examined) {
	for t, x := range examined {
		l.memory = l.memory.With(f.Table(t), x.Finding)
	}
}

// A recovery is what the tries of one loss have put back so far. Where one family or table
// keeps a loss open, the others may long be intact by then.
type recovery struct {
	back     map[rules.TableID]time.Time // since when tables that were hit are intact
	replayed bool                        // a table was written and proved
	raced    bool                        // and another process wrote meanwhile
	ridden   time.Time                   // when native tables of the same record were proved
}

// afterTry takes up the result of another try.
func (r *recovery) afterTry(hit flushes.Verdicts, result reload.Result) {
	for id, tr := range flushes.TablesOf(result) {
		v := tr.Finding.Verdict
		switch {
		case hit[id] == "" || !tr.Proved && v == canary.Unknown:
		case !tr.Proved && v.Loss():
			delete(r.back, id)
		case r.back[id].IsZero():
			r.back = tableid.With(r.back, id, result[id.Family].Done)
		}
		r.replayed = r.replayed || tr.Proved
	}
	for _, fr := range result {
		r.raced = r.raced || fr.Outcome == reload.Raced
	}
}

// outcome returns what became of the whole loss, after a last try.
func (r recovery) outcome(result reload.Result) api.Outcome {
	switch outcome := worst(result); {
	case outcome != reload.Skipped || !r.replayed:
		return outcome
	case r.raced:
		return reload.Raced
	default:
		return reload.Proved
	}
}

// provedAt returns when the last table that was hit was intact again, native ones included.
func (r recovery) provedAt() time.Time {
	last := r.ridden
	for _, at := range r.back {
		last = pace.Latest(last, at)
	}
	return last
}
