package daemon

import (
	"context"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// Unanswered records are records that the last run left open in this boot. One flush is one
// record: if all tables of the loss are in such a record, this run continues it. Otherwise the
// record is closed as interrupted, on disk too: a later flush of the same tables is another
// one.

// keepUnanswered takes up a record of an earlier run that was open when that run ended.
func (d *Daemon) keepUnanswered(st *state, r api.Flush) {
	if r.Unanswered() && r.Drill == "" && r.Time.After(time.Now().Add(-d.cfg.Uptime())) {
		st.unanswered = slices.Insert(st.unanswered, 0, r)
	}
}

// takeUnanswered removes the newest unanswered record for which has is true, because it has all
// lost tables. It returns it as a record of this run; false: there is none. The rules may have
// been back while no canaryd ran, so only the longest possible absence is known.
func (st *state) takeUnanswered(has func(api.Flush) bool) (api.Flush, bool) {
	i := slices.IndexFunc(st.unanswered, has)
	if i < 0 {
		return api.Flush{}, false
	}
	r := st.unanswered[i]
	st.unanswered = slices.Delete(st.unanswered, i, i+1)
	st.journal = slices.DeleteFunc(st.journal, func(f api.Flush) bool { return f.ID == r.ID })
	r.Outcome, r.Detail = api.Pending, ""
	if r.LastInForce.IsZero() {
		r.LastInForce = r.Time
	}
	return r, true
}

// resumeRecord continues an unanswered record for a loss that is as old as this run. An earlier
// run has counted the losses of that record.
func (st *state) resumeRecord() {
	l := st.loss
	if l.record.LastInForce.IsZero() || l.record.Stalled || l.recorded || l.record.Drill != "" {
		return
	}
	lost := st.losses()
	record, ok := st.takeUnanswered(func(r api.Flush) bool {
		hit := flushes.Recorded(r)
		for id := range lost {
			if hit[id] == "" {
				return false
			}
		}
		return len(hit) > 0
	})
	if !ok {
		return
	}
	l.record, l.hit = record, flushes.Recorded(record)
	l.recorded, l.counted, l.blamed = true, true, true
}

// unansweredNative is resumeRecord for a native table that the first read finds lost. It
// returns nil if no record has it, or after the first read.
func (d *Daemon) unansweredNative(st *state, id tableid.TableID) *nativeLoss {
	if st.native.begun {
		return nil
	}
	record, ok := st.takeUnanswered(func(r api.Flush) bool {
		return len(r.Lost.Tables) == 0 && slices.ContainsFunc(r.Native, func(l api.NativeLoss) bool { return l.Table == id.NFT() })
	})
	if !ok {
		return nil
	}
	l := &nativeLoss{openRecord: openRecord{record: record, recorded: true}, hit: map[tableid.TableID]bool{}}
	for known := range st.native.tables {
		l.hit[known] = slices.ContainsFunc(record.Native, func(lost api.NativeLoss) bool { return lost.Table == known.NFT() })
	}
	return l
}

// closeUnanswered closes the unanswered records that no loss continues as interrupted, once
// everything was read. The loop calls it after each step.
func (d *Daemon) closeUnanswered(ctx context.Context, st *state) {
	if len(st.unanswered) == 0 || len(st.openRecords()) > 0 || lastKnown(st).IsZero() || d.guardsNative() && !st.native.begun {
		return
	}
	for _, r := range st.unanswered {
		r.Outcome = api.Interrupted
		d.write(ctx, r, nil)
	}
	st.unanswered = nil
}
