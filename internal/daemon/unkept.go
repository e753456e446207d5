package daemon

import (
	"cmp"
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/reload"
)

// A disk that is full, read-only or gone stops no replay. But the next start would know an older
// generation or none, so status, page and metrics say that.

// failed plans the next save after one that failed.
func (s *saving) failed(now time.Time) {
	s.retry.Failed(nil, now)
	s.saveAt = pace.Latest(s.retry.At, s.savedAt.Add(saveShare*s.cost))
}

// lacksGeneration reports whether a generation could not be written, and is not on disk yet.
// Then a written state confirms the older one only.
func (s *saving) lacksGeneration(st *state) bool {
	return s.trouble.There() && s.written != st.generation.changes
}

// countStateError counts an error of a write to the state folder in metrics, unless it is nil.
func (d *Daemon) countStateError(err error) {
	if err != nil {
		d.cfg.Metrics.ObserveStateError()
	}
}

// tookSave notes the result of a write of the state. The state is smaller than a generation: if
// the disk has room for the state only, it is as far behind as before.
func (d *Daemon) tookSave(ctx context.Context, st *state, err error) {
	d.countStateError(err)
	if err == nil && st.disk.lacksGeneration(st) {
		b := st.behind()
		b.Reason = st.disk.trouble.What
		d.noteBehind(ctx, d.cfg.Store.SaveBehind, b)
		return
	}
	if d.tookWrite(ctx, &st.disk.trouble, err, d.cfg.Store.SaveBehind, st.behind()); err != nil {
		return
	}
	st.disk.retry = pace.Retry{}
	if n := d.cfg.Store.Remade(); n != st.disk.remade {
		st.disk.remade = n
		klog.FromContext(ctx).Info("The state folder was gone, and is made again; flush records and a confirmed baseline that it had are lost")
		d.keepAllAgain(st)
	}
}

// keepAllAgain plans to write again everything that is written only when it changes, because
// the state folder was made again.
func (d *Daemon) keepAllAgain(st *state) {
	st.owners.kept, st.owners.at = reload.Owners{}, time.Time{}
	st.sets.unkept = len(st.sets.known) > 0
	if st.decision != nil {
		st.decision.kept = false
	}
	st.unread.unkept = len(st.unread.files) > 0
	st.native.disk.saveAt = pace.Earliest(st.native.disk.saveAt, time.Now())
	st.disk.saveSoon(time.Now())
}

// publishUnkept puts the disk's shortcomings into a status.
func (st *state) publishUnkept(s *api.Status) {
	decision := ""
	if st.decision != nil {
		decision = st.decision.trouble.What
	}
	s.StateError = cmp.Or(st.disk.trouble.What, decision, st.unread.trouble.What, st.native.disk.trouble.What, st.owners.trouble.What)
	s.StateSaved = st.disk.keptAt
	for _, o := range []older{st.older, st.native.older} {
		if o.replayed {
			s.StateOlder = cmp.Or(s.StateOlder, o.text)
		}
	}
	if s.StateError != "" {
		s.StateBehind = st.generation.changes - st.disk.kept
	}
	if n := &st.native.disk; n.trouble.There() {
		s.StateBehind += n.changes - n.keptChanges
		if n.keptAt.Before(s.StateSaved) {
			s.StateSaved = n.keptAt
		}
	}
}
