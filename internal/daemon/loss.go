package daemon

import (
	"fmt"
	"slices"
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

// loss is the open loss of iptables' tables.
type loss struct {
	answer
	drill        *drill.Drill                // the drill that ended before the loss: its deletions are no flush
	window       time.Time                   // the end of the last write, which left the lost rules in force; zero: unknown
	early        bool                        // a missed packet showed it: the flusher's commit may be under way
	intact       uint32                      // the genid of the last intact look, and the last one at
	heard        uint32                      // which something was found lost
	hit          flushes.Verdicts            // tables counted so far
	lockedBy     string                      // the process that holds the xtables lock; "": none is known to
	unread       *unreadLoss                 // the record that a Status has before any read; nil: it has none
	byName       bool                        // on legacy: a canary was deleted by name
	blamed       bool                        // its culprits were looked for
	jumpsDeleted bool                        // jumps were deleted by name, and their grace is over
	memory       reload.Memory               // findings of reads and tries
	gone         map[protect.Attachment]bool // containers that the last replay left out
	recovery     recovery                    // tables that the tries have put back so far
	seen         map[rules.Family]uint64     // digests of the last reads without guard
	again        time.Time                   // not before, the next read of a pause
}

// ownersWrote reports whether owners put back the rules that the record has: replays wrote marks
// only.
func (l *loss) ownersWrote() bool { return l.lostRules() && !l.recovery.rules }

// lostRules reports whether the record has rules of iptables' tables, and not only marks.
func (l *loss) lostRules() bool {
	return slices.ContainsFunc(l.record.Lost.Tables, func(t api.TableLoss) bool { return t.Rules+t.Chains+t.Jumps > 0 })
}

// shown reports whether a read has shown the loss: then the record and the log have it.
func (l *loss) shown() bool { return len(l.hit) > 0 }

// bounds returns the times and genids between which the loss began: an Inquiry searches there
// for culprits and other writers.
func (l *loss) bounds() culprit.Bounds {
	return culprit.Bounds{First: l.record.Time, Written: l.window, Noticed: l.noticed, Intact: l.intact, Heard: l.heard}
}

// openLoss opens a loss, which heal answers, unless one is open already. Its record may be that of
// a loss of native tables. digest is that
// of the read or probe that showed the loss in the family.
func (st *state) openLoss(f rules.Family, digest uint64) {
	if st.loss != nil {
		st.boundAbsence(f)
		st.recordMore()
		return
	}
	now, at := time.Now(), st.looking.evidence
	if anyOf(st.standby, (*standbyOf).native) { // their hint may arrive during the replay
		st.native.lookAt = pace.Earliest(st.native.lookAt, now)
	}
	defer st.boundAbsence(f)
	st.loss = &loss{
		answer: st.answerTo(api.Flush{ID: st.newFlushID(at), Time: at, Outcome: api.Pending}, now),
		drill:  st.drills.DoubtAt(now), window: st.families[f].written, hit: flushes.Verdicts{},
		intact: uint32(st.families[f].looked.intact), heard: uint32(digest),
	}
}

// openLossNow is openLoss for a loss that a probe or a read of that digest shows now. looked is
// how long a look took that shows it; 0 for a read, which may take seconds without a stall. It also
// estimates when the loss began.
func (d *Daemon) openLossNow(st *state, f rules.Family, digest uint64, looked time.Duration) {
	d.dateLoss(st, f, digest)
	fresh := st.loss == nil
	if st.openLoss(f, digest); fresh {
		d.boundStall(st, f, looked)
	}
}

// dateLoss estimates when a loss began that a probe or a read of that digest shows in a family.
// Rules that canaryd wrote were in force after the write, also if an earlier hint still waits.
// If all commits since then were heard of, the loss began with the first of them or later.
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

// newFlushID returns the ID of a record that begins at that time. Two records may begin with
// the same hint: the second is of a family whose stamp was not read before the first was
// healed.
func (st *state) newFlushID(at time.Time) string {
	for n := at.UnixMicro(); ; n++ {
		id := fmt.Sprintf("%x", n)
		if !st.hasFlush(id) {
			return id
		}
	}
}

// hasFlush reports whether a record has that ID, an open one included. newFlushID then tries
// another.
func (st *state) hasFlush(id string) bool {
	return slices.ContainsFunc(st.answers(), func(a *answer) bool { return a.record.ID == id }) ||
		anyOf(st.native.waiting, func(w *api.Flush) bool { return w.ID == id }) ||
		st.journal.Index(id) >= 0
}

// remember notes the findings of a read of one family. The Jobs of later reads and tries have
// them (Memory).
func (l *loss) remember(f rules.Family, examined map[rules.TableName]reload.Examined) {
	for t, x := range examined {
		l.memory = l.memory.With(f.Table(t), x.Finding)
	}
}

// A recovery has the tables that the tries of one loss have put back so far. If one family or
// table keeps a loss open, the others may be intact long before its end.
type recovery struct {
	back     map[rules.TableID]time.Time // since when tables that were hit are intact
	replayed bool                        // a table was written and proved
	rules    bool                        // rules that a read showed to be missing were among that
	raced    bool                        // and another process wrote meanwhile
}

// afterTry takes up the result of another try: since when tables that were hit are back. A
// table that is lost again is not.
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
		r.rules = r.rules || tr.Proved && tr.Lost.Any()
	}
	for _, fr := range result {
		r.raced = r.raced || fr.Outcome == reload.Raced
	}
}

// outcome returns the outcome of the whole loss, after its last try. A last try that wrote
// nothing does not hide earlier replays.
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

// provedAt returns when the last table that was hit was intact again. The record's absence ends
// then.
func (r recovery) provedAt() (last time.Time) {
	for _, at := range r.back {
		last = pace.Latest(last, at)
	}
	return last
}
