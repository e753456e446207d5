package daemon

import (
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An incomplete is a closed flush record with rules that are still in quarantine.
type incomplete struct {
	id      string
	outcome api.Outcome // once all of them are back
	missing reload.Quarantine
}

// keepIncomplete notes the rules that a record lacks when it ends as partial.
func (st *state) keepIncomplete(l *loss) {
	r := incomplete{id: l.record.ID, outcome: reload.Proved}
	if l.recovery.raced {
		r.outcome = reload.Raced
	}
	for id := range l.hit {
		r.missing = r.missing.With(id, st.quarantine.rules[id])
	}
	if r.missing.Count() > 0 {
		st.incomplete = append(st.incomplete, r)
	}
	if over := len(st.incomplete) - flushes.Kept; over > 0 { // their records are forgotten, too
		st.incomplete = slices.Delete(st.incomplete, 0, over)
	}
}

// releaseMissing notes that rules of a table left the quarantine. left has the rules that stay
// there, and seen is the section of the last read. A record stays as it is if one of its rules
// is neither there nor back: the rule's owner decided otherwise.
func (st *state) releaseMissing(id rules.TableID, left []reload.QuarantinedRule, seen rules.Section) {
	if len(st.incomplete) == 0 {
		return
	}
	held, stands := reload.HeldBy(left), reload.StandsIn(seen)
	st.incomplete = slices.DeleteFunc(st.incomplete, func(r incomplete) bool {
		return slices.ContainsFunc(r.missing[id], func(h reload.QuarantinedRule) bool { return !held(h) && !stands(h) })
	})
	for i, r := range st.incomplete {
		still := slices.DeleteFunc(slices.Clone(r.missing[id]), func(h reload.QuarantinedRule) bool { return !held(h) })
		st.incomplete[i].missing = r.missing.With(id, still)
	}
}

// completeRecords ends the records whose last rule is back: they were as good as open until
// then. The loop calls it after each step.
func (d *Daemon) completeRecords(ctx context.Context, st *state) {
	st.incomplete = slices.DeleteFunc(st.incomplete, func(r incomplete) bool {
		if r.missing.Count() > 0 || st.native.holdsFor(r.id) {
			return false
		}
		d.completeRecord(ctx, st, r.id, r.outcome)
		return true
	})
}

// completeRecord ends a record that is partial: its last rule is back, or an owner has decided
// about it. A record that another loss keeps open ends with that.
func (d *Daemon) completeRecord(ctx context.Context, st *state, id string, outcome api.Outcome) {
	for _, o := range st.openRecords() {
		if o.record.ID == id && o.ended.outcome == reload.Partial {
			o.ended.outcome = outcome
			return
		}
	}
	i := slices.IndexFunc(st.journal, func(f api.Flush) bool { return f.ID == id && f.Outcome == reload.Partial })
	if i < 0 {
		return
	}
	record := &st.journal[i]
	record.Outcome, record.Detail = outcome, ""
	absent := flushes.EndAbsence(record, time.Now())
	d.write(ctx, *record, nil)
	severity.Notices(klog.FromContext(ctx)).Info("Nothing that a flush took is missing any more", "flush", id, "outcome", outcome,
		flushes.AbsentKey(*record), absent.Round(10*time.Microsecond))
}

// explainPartial puts into a record that is partial why it stays so.
func (d *Daemon) explainPartial(ctx context.Context, st *state, id, why string) {
	for _, o := range st.openRecords() {
		if o.record.ID == id {
			o.ended = o.ended.with(ended{detail: why})
			return
		}
	}
	if i := slices.IndexFunc(st.journal, func(f api.Flush) bool { return f.ID == id && f.Outcome == reload.Partial }); i >= 0 {
		st.journal[i].Detail = why
		d.write(ctx, st.journal[i], nil)
	}
}

// lostMore probes the marks of intact tables, and reports whether some are lost. Then longer
// work can wait: a replay or readmit is interrupted (Job.Interrupted), and a replay follows.
func (d *Daemon) lostMore(ctx context.Context, st *state) bool {
	lost := false
	for f, fs := range st.families {
		var standing []rules.TableName
		for t, ts := range fs.tables {
			if !ts.verdict.Loss() {
				standing = append(standing, t)
			}
		}
		part := st.marks.current.Only(f, standing)
		places := part.Places(f, d.cfg.Canary)
		if len(places) == 0 {
			continue
		}
		st.looking.evidence = time.Now()
		if probed, err := d.cfg.Kernel.ProbeOnly(ctx, f, places); err == nil && !d.judgeMarks(st, f, part, probed) {
			lost = true
		}
	}
	return lost
}
