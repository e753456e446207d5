package daemon

import (
	"slices"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// unreadRecord returns the record of the open loss while no read has shown yet what was lost: the
// flusher may hold the xtables lock for long.
func (d *Daemon) unreadRecord(st *state) api.Flush {
	l := st.loss
	r := l.record
	r.NoticedSeconds = l.noticed.Sub(r.Time).Seconds()
	for _, v := range st.losses() {
		if slices.Index(gravity, v) > slices.Index(gravity, r.Kind) {
			r.Kind = v
		}
	}
	for id, ts := range st.tables() { // of the families that are guarded
		if !ts.verdict.Loss() {
			continue
		}
		if !slices.Contains(r.Families, id.Family) {
			r.Families = append(slices.Clone(r.Families), id.Family)
		}
		if !slices.Contains(r.Tables, id.Name) {
			r.Tables = append(slices.Clone(r.Tables), id.Name)
		}
	}
	r.Lost.Unread = true
	if !st.heals() || d.cfg.Kernel.Info().Backend != iptables.Legacy {
		return r
	}
	if r.LockedBy = l.lockedBy; r.LockedBy != "" || lockReason(l.failed) {
		r.Outcome = api.WaitingLock
	}
	return r
}

// seekLockHolder finds out which process holds the xtables lock, for which a replay has to wait.
func (d *Daemon) seekLockHolder(st *state) {
	if st.loss.lockedBy = ""; d.cfg.LockHolder == nil || d.cfg.Kernel.Info().Backend != iptables.Legacy {
		return
	}
	if w, held := d.cfg.LockHolder(); held && !d.cfg.Kernel.Own(w.PID) {
		st.loss.lockedBy = api.CulpritOf(w).PIDAndName()
	}
}
