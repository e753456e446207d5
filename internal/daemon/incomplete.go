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

// endPartial gives a record that is partial another outcome. Its last part is back, or the part's
// owner or an operator has decided about it. If it stays partial, why explains that. A record that
// another loss keeps open ends with that.
func (d *Daemon) endPartial(ctx context.Context, st *state, id string, outcome api.Outcome, why string) {
	for _, o := range st.openRecords() {
		switch {
		case o.record.ID != id:
		case outcome == reload.Partial:
			o.ended = o.ended.with(ended{detail: why})
			return
		case o.ended.outcome == reload.Partial:
			o.ended.outcome = outcome
			return
		}
	}
	i := slices.IndexFunc(st.journal, func(f api.Flush) bool { return f.ID == id && f.Outcome == reload.Partial })
	if i < 0 {
		return
	}
	record := &st.journal[i]
	if record.Outcome, record.Detail = outcome, why; outcome != reload.Partial {
		said := map[api.Outcome]string{reload.Proved: "Nothing that a flush took is missing any more", api.Dismissed: lossAccepted}[outcome]
		absent := flushes.EndAbsence(record, time.Now())
		severity.Notices(klog.FromContext(ctx)).Info(said, "flush", id, "outcome", outcome, flushes.AbsentKey(*record), absent.Round(10*time.Microsecond))
	}
	d.write(ctx, *record, nil)
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
