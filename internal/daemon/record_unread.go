package daemon

import (
	"context"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
)

// An unreadLoss is a loss that marks or an earlier read showed, before a read under guard has
// counted the lost rules. The flusher may hold the xtables lock for long.
type unreadLoss struct {
	record api.Flush
	hit    flushes.Verdicts
}

// showUnread gives the open loss a record for the status while nothing has been read: a lock is
// held, or a try has failed. A drill's loss gets none.
func (d *Daemon) showUnread(st *state) {
	l := st.loss
	if l.shown() || st.drills.Under != nil {
		return
	}
	hit := st.losses()
	if len(hit) == 0 && l.unread != nil { // a table that cannot be read any more was lost anyway
		hit = l.unread.hit
	}
	r := l.record
	r.NoticedSeconds = l.noticed.Sub(r.Time).Seconds()
	for _, id := range flushes.TableIDs() {
		v := hit[id]
		if v == "" {
			continue
		}
		if flushes.Graver(v, r.Kind) {
			r.Kind = v
		}
		if !slices.Contains(r.Families, id.Family) {
			r.Families = append(slices.Clone(r.Families), id.Family)
		}
		if !slices.Contains(r.Tables, id.Name) {
			r.Tables = append(slices.Clone(r.Tables), id.Name)
		}
	}
	r.Lost.Unread = true
	if st.heals() && d.cfg.Kernel.Info().Backend == iptables.Legacy {
		if r.LockedBy = l.lockedBy; r.LockedBy != "" || pace.LockReason(l.failed) {
			r.Outcome = api.WaitingLock
		}
	}
	l.unread = &unreadLoss{record: r, hit: hit}
}

// backUnread ends a loss whose rules their owner put back before the first read under guard. Within
// --settle that may have been one command of the owner's after the other, and no flush. If a replay
// had failed before, the record stays, and is counted.
func (d *Daemon) backUnread(ctx context.Context, st *state, l *loss) {
	if l.unread == nil || len(l.unread.hit) == 0 || l.attempts == 0 || len(l.record.Native) > 0 {
		d.endLoss(ctx, st, st.flushLog(ctx), &l.answer, nil)
		return
	}
	l.record = l.unread.record
	l.record.Outcome, l.record.Detail, l.record.LockedBy = reload.Skipped, "", ""
	absent := flushes.EndAbsence(&l.record, time.Now())
	d.cfg.Metrics.ObserveFlush(l.record.Time, l.unread.hit.Public())
	d.cfg.Metrics.ObserveRecovery(absent, l.record.Standby)
	d.journal(ctx, st, l.openRecord)
	flushes.LogBack(severity.Notices(st.flushLog(ctx)), l.unread.hit.Text(), l.record, false, l.record.Attempts)
}

// seekLockHolder finds out which process holds the xtables lock, for which a replay has to wait
// on legacy. The status names it.
func (d *Daemon) seekLockHolder(st *state) {
	if st.loss.lockedBy = ""; d.cfg.LockHolder == nil || d.cfg.Kernel.Info().Backend != iptables.Legacy {
		return
	}
	if w, held := d.cfg.LockHolder(); held && !d.cfg.Kernel.Own(w.PID) {
		st.loss.lockedBy = api.CulpritOf(w).PIDAndName()
	}
}
