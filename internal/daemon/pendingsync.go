package daemon

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// pendingSyncWithin is for how long after a replay kube-proxy is asked for a full sync
// as soon as its canary is back. The sync that it has just done may have begun before the
// replay, or a second flush may have taken it: kube-proxy plants its canary after the
// sync, and what is flushed in between it never looks for (pkg/util/iptables Monitor,
// 1.36). It looks every 30 s: a canary that is back later than this is of a sync that
// began after the replay, even if that took 7 s (5,000 services on nft).
const pendingSyncWithin = 15 * time.Second

// A pendingSync is a full sync that kube-proxy is owed because it could not be asked for
// it after a replay: its own canary did not stand.
type pendingSync struct {
	until time.Time // no longer than this; zero: nothing is owed
	at    time.Time // when it is asked; zero: its canary is not back yet
}

// owe takes up what a replay leaves owed.
func (w *pendingSync) owe(fr reload.FamilyResult, now time.Time) {
	switch {
	case fr.Owed && fr.ProxyStands():
		*w = pendingSync{}
	case fr.Owed:
		*w = pendingSync{until: now.Add(pendingSyncWithin)}
	}
}

// saw notes whether kube-proxy's canary stood at that time.
func (w *pendingSync) saw(stands bool, now time.Time) {
	switch {
	case w.until.Before(now):
		*w = pendingSync{}
	case stands && w.at.IsZero():
		w.at = now
	}
}

// nudged has the marks renewed after kube-proxy was asked for a full sync: a file that
// was saved before has its canary, and with other marks it is known for what it is when
// somebody restores it before kube-proxy has looked.
func (fs *familyState) nudged(now time.Time) { fs.rotation.plan(now) }

// askPendingSyncs asks kube-proxy for the full syncs that it is owed.
func (d *Daemon) askPendingSyncs(ctx context.Context, st *state) {
	for _, f := range rules.Families() {
		fs := st.families[f]
		if fs == nil || !due(fs.proxy.pendingSync.at, time.Now()) {
			continue
		}
		fs.proxy.pendingSync = pendingSync{}
		if err := d.replayer(ctx, st).Nudge(ctx, f); err != nil {
			klog.FromContext(ctx).Error(err, "kube-proxy could not be asked for a full sync", "family", f)
		}
		fs.nudged(time.Now())
	}
}
