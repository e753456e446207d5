package daemon

import (
	"context"
	"errors"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// observe reads what is lost and tells it, replants what a flush took of the
// marks, so that the next flush is noticed too, and freezes the generation
// until the owner has put its rules back.
func (d *Daemon) observe(ctx context.Context, st *state) {
	examined, err := d.readLoss(ctx, st)
	if err != nil {
		d.retry(ctx, st, err)
		return
	}
	found := map[rules.Family]map[rules.TableName]hit{}
	for f, tables := range examined {
		found[f] = map[rules.TableName]hit{}
		for t, x := range tables {
			ts := st.families[f].tables[t]
			again := x.Finding.MarkLost || len(x.Finding.Witnesses) > 0
			if ts.frozen && !again || !x.Finding.Verdict.Loss() {
				continue // told already, or nothing to tell
			}
			ts.verdict, ts.frozen = x.Finding.Verdict, true
			found[f][t] = hit{x.Finding.Verdict, x.Lost, nil}
		}
	}
	d.tell(ctx, st, found)
	result, err := d.replayer(ctx, st).Replant(ctx, d.job(st, d.cfg.Kernel.Families()...))
	if err != nil {
		d.retry(ctx, st, err)
		return
	}
	for f, fr := range result {
		for t, tr := range fr.Tables {
			st.marks = st.marks.With(f, t, tr.Mark)
		}
		if !fr.Outcome.Done() {
			d.retry(ctx, st, fr.Err)
			return
		}
		st.families[f].examineAt = time.Now().Add(captureQuiet)
	}
	l := st.loss
	st.loss = nil
	st.markedAt = earliest(st.markedAt, time.Now())
	if l.told {
		st.frozenSince = earliest(st.frozenSince, l.record.Time)
		l.record.Outcome = WaitingObserve
		d.journal(ctx, st, l)
	}
}

// readLoss reads every family where nothing is to be written. The error says
// what could not be read or judged of it.
func (d *Daemon) readLoss(ctx context.Context, st *state) (map[rules.Family]map[rules.TableName]reload.Examined, error) {
	st.stir(time.Now())
	examined := map[rules.Family]map[rules.TableName]reload.Examined{}
	var unread []error
	for f, fs := range st.families {
		snapshot, err := d.cfg.Kernel.Read(ctx, f)
		if err != nil {
			unread = append(unread, err)
			continue
		}
		examined[f] = d.examiner(st).Examine(snapshot, d.job(st, f))
		st.loss.find(f, examined[f])
		for t, x := range examined[f] {
			if x.Finding.Verdict == canary.Unknown && fs.tables[t].verdict.Loss() {
				unread = append(unread, lostUnread(f, t, x.Finding))
			}
		}
	}
	return examined, errors.Join(unread...)
}
