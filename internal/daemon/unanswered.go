package daemon

import (
	"context"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
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
// lost tables. It returns it as an open record of this run; nil: there is none. The rules may have
// been back while no canaryd ran, so only the longest possible absence is known. The last run has
// counted the losses.
func (st *state) takeUnanswered(has func(api.Flush) bool) *openRecord {
	i := slices.IndexFunc(st.unanswered, has)
	if i < 0 {
		return nil
	}
	r := st.unanswered[i]
	st.unanswered = slices.Delete(st.unanswered, i, i+1)
	st.journal = slices.DeleteFunc(st.journal, func(f api.Flush) bool { return f.ID == r.ID })
	r.Outcome, r.Detail = api.Pending, ""
	if r.LastInForce.IsZero() {
		r.LastInForce = r.Time
	}
	return &openRecord{record: r, resumed: true, counted: true, kept: true, room: flushes.DiffRoom()}
}

// resumeRecord continues an unanswered record for a loss that is as old as this run. If the record
// has native tables, too, it stays open until these are read.
func (st *state) resumeRecord() {
	l := st.loss
	if l.record.LastInForce.IsZero() || l.record.Stalled || l.known() || l.record.Drill != "" {
		return
	}
	lost := st.losses()
	has := func(r api.Flush) bool {
		hit := flushes.Recorded(r)
		for id := range lost {
			if hit[id] == "" {
				return false
			}
		}
		return len(hit) > 0
	}
	var o *openRecord
	if n := st.native.loss; n != nil && n.resumed && has(n.record) {
		o = n.openRecord
	} else if o = st.takeUnanswered(has); o == nil {
		return
	}
	o.noticed = l.noticed
	l.openRecord, l.hit, l.blamed, l.attempts = o, flushes.Recorded(o.record), true, o.record.Attempts
	if r := &st.native; len(o.record.Native) > 0 && !r.begun && !r.asleep && r.loss == nil { // a read shows whether these are lost
		r.loss = r.resumed(o)
		r.loss.logged = true // the line about this record is of both
	}
}

// unansweredNative is resumeRecord for a native table that the first read finds lost. It
// returns nil if no record has it, or after the first read.
func (d *Daemon) unansweredNative(st *state, id tableid.TableID) *nativeLoss {
	if st.native.begun {
		return nil
	}
	o := st.takeUnanswered(func(r api.Flush) bool { return recordedNative(r, id) })
	if o == nil {
		return nil
	}
	return st.native.resumed(o)
}

// resumed returns the loss of native tables that a record of the last run has.
func (r *nativeRealm) resumed(o *openRecord) *nativeLoss {
	l := &nativeLoss{answer: answer{openRecord: o, attempts: o.record.Attempts, retry: pace.Retry{At: time.Now()}}, hit: map[tableid.TableID]bool{}, intact: r.known}
	for id := range r.tables {
		if recordedNative(o.record, id) {
			l.hit[id] = true
		}
	}
	return l
}

// recordedNative reports whether a record has the loss of a native table.
func recordedNative(r api.Flush, id tableid.TableID) bool {
	return slices.ContainsFunc(r.Native, func(l api.NativeLoss) bool { return l.Table == id.NFT() })
}

// back reports whether all these tables have the content of the last run. After the first read
// none of them is lost, but their owner may have removed or changed one.
func (r *nativeRealm) back(lost []api.NativeLoss) bool {
	for id, t := range r.tables {
		if t.finding.Verdict == native.Intact {
			lost = slices.DeleteFunc(slices.Clone(lost), func(l api.NativeLoss) bool { return l.Table == id.NFT() })
		}
	}
	return len(lost) == 0
}

// closeUnanswered closes the unanswered records that no loss continues, once everything was read.
// They end as interrupted, unless they have native tables only, and all of these are back. A flush
// of iptables' tables takes marks, too, so that a loss continues the record. The loop calls it
// after each step.
func (d *Daemon) closeUnanswered(ctx context.Context, st *state) {
	if len(st.unanswered) == 0 || len(st.answers()) > 0 || lastKnown(st).IsZero() || d.guardsNative() && !st.native.begun {
		return
	}
	for _, r := range st.unanswered {
		r.Outcome = api.Interrupted
		if len(r.Lost.Tables) == 0 && len(r.Native) > 0 && st.native.back(r.Native) {
			r.Outcome = reload.Skipped
			d.cfg.Metrics.ObserveRecovery(flushes.EndAbsence(&r, time.Now()), r.Standby)
			st.journal.Rewrite(r)
			flushes.LogBack(klog.FromContext(ctx), strings.Join(r.NativeNames(), ", "), r, false, r.Attempts)
		}
		d.write(ctx, r, nil)
	}
	st.unanswered = nil
}
