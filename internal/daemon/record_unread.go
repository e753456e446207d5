package daemon

import (
	"context"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
)

// An unreadLoss is a loss that marks or an earlier read showed, before a read under guard has
// counted the lost rules. The flusher may hold the xtables lock for long.
type unreadLoss struct {
	hit      flushes.Verdicts
	locked   bool // it waits for the xtables lock
	lockedBy string
}

// addTo adds the tables to a record.
func (u *unreadLoss) addTo(r *api.Flush) {
	for _, id := range flushes.TableIDs() {
		v := u.hit[id]
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
}

// shownRecord returns an open record for a Status: with the tables of a loss that no read has
// shown. It returns false if nothing is to be shown yet.
func (st *state) shownRecord(o *openRecord) (r api.Flush, ok bool) {
	r = o.record
	l := st.loss
	if l == nil || l.openRecord != o || l.shown() || l.unread == nil {
		return r, o.known()
	}
	l.unread.addTo(&r)
	r.NoticedSeconds = l.noticed.Sub(r.Time).Seconds()
	if l.unread.locked {
		r.Outcome, r.LockedBy = api.WaitingLock, l.unread.lockedBy
	}
	return r, true
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
	l.unread = &unreadLoss{hit: hit}
	if st.heals() && d.cfg.Kernel.Info().Backend == iptables.Legacy {
		l.unread.lockedBy = l.lockedBy
		l.unread.locked = l.lockedBy != "" || pace.LockReason(l.failed)
	}
}

// backUnread ends a loss whose rules their owner put back before the first read under guard. Within
// --settle that may have been one command of the owner's after the other, and no flush. If a replay
// had failed before, the record stays, and is counted.
func (d *Daemon) backUnread(ctx context.Context, st *state, l *loss) {
	if l.unread == nil || len(l.unread.hit) == 0 || l.attempts == 0 {
		d.endLoss(ctx, st, st.flushLog(ctx), &l.answer, nil)
		return
	}
	l.unread.addTo(&l.record)
	l.record.NoticedSeconds = l.noticed.Sub(l.record.Time).Seconds()
	if l.counted {
		d.cfg.Metrics.ObserveFurtherLoss(l.unread.hit.Public())
	} else {
		d.cfg.Metrics.ObserveFlush(l.record.Time, l.unread.hit.Public())
	}
	l.counted = true
	d.endLoss(ctx, st, st.flushLog(ctx), &l.answer, &ended{tables: []string{l.unread.hit.Text()}, outcome: reload.Skipped, back: time.Now(), attempts: l.record.Attempts})
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
