package daemon

import (
	"cmp"
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// While kube-proxy is at work, its chain KUBE-PROXY-CANARY exists: kube-proxy looks for it
// every 30 s, and plants it again after a full sync. canaryd deletes that chain to make
// kube-proxy do a full sync. A kube-proxy that has left corrects nothing any more. Rules of it
// that a replay puts back stay as they are for good.

const (
	// ownerlessAfter is how long that chain may be missing until the rules count as without an
	// owner. kube-proxy looks every 30 s, and needs 7 s for a sync of 5,000 services on nft.
	ownerlessAfter = 2 * time.Minute
	// askWithin is for how long after a replay canaryd makes kube-proxy do a full sync as soon
	// as its canary is back. The sync that it has just done may have begun before the replay,
	// or a second flush may have taken the result. kube-proxy plants its canary after the sync.
	// It never looks for rules that are flushed in between (pkg/util/iptables Monitor, 1.36). A
	// canary that is back later than this is of a sync that began after the replay, even if
	// that took 7 s.
	askWithin = 15 * time.Second
)

// kubeProxy is the state of kube-proxy's canary in one family. It also has the full sync that
// canaryd could not request after a replay, because the canary was missing.
type kubeProxy struct {
	stood bool      // it was seen at some time
	gone  time.Time // since when it has been missing; zero: it is in place, or never was
	// uptime is how long the machine had been up then, as the disk has it.
	uptime   time.Duration
	askUntil time.Time // a full sync is asked for no later than this; zero: none is pending
	askAt    time.Time // when it is asked for; zero: the canary is not back yet
}

// saw notes whether kube-proxy's canary was in place at that time, after each full read. If the
// table could not be read, its absence is not known.
func (p *kubeProxy) saw(stands, read bool, now time.Time) {
	switch {
	case p.askUntil.Before(now):
		p.askUntil, p.askAt = time.Time{}, time.Time{}
	case stands && p.askAt.IsZero():
		p.askAt = now
	}
	switch {
	case !read:
	case stands:
		p.stood, p.gone, p.uptime = true, time.Time{}, 0
	case p.stood && p.gone.IsZero():
		p.gone = now
	}
}

// askSoon makes canaryd request a full sync of kube-proxy as soon as its canary is back.
func (p *kubeProxy) askSoon(now time.Time) { p.askUntil, p.askAt = now.Add(askWithin), time.Time{} }

// stored returns how long the machine had been up when the canary was first missing, zero while
// it is in place. A restart must not forget that. stored returns false if the canary never was
// in place.
func (p *kubeProxy) stored(uptime time.Duration) (time.Duration, bool) {
	if p.stood && !p.gone.IsZero() && p.uptime == 0 {
		p.uptime = uptime - time.Since(p.gone)
	}
	return p.uptime, p.stood
}

// recallProxy returns the state that the last run stored, now that the machine has been up for
// so long.
func recallProxy(stored, uptime time.Duration) kubeProxy {
	p := kubeProxy{stood: true, uptime: stored}
	if stored > 0 {
		// A negative age is of another clock: that of a container's own time.
		p.gone = time.Now().Add(-max(uptime-stored, 0))
	}
	return p
}

// proxyAfterReplay notes whether a replay has requested a full sync of kube-proxy, or could
// not: then askForSyncs does so when kube-proxy's canary is back.
func (fs *familyState) proxyAfterReplay(fr reload.FamilyResult, now time.Time) {
	switch {
	case fr.SyncNeeded && fr.ProxyCanaryStands():
		fs.proxy.askUntil, fs.proxy.askAt = time.Time{}, time.Time{}
		fs.renewAfterAsking(now)
	case fr.SyncNeeded:
		fs.proxy.askSoon(now)
	}
}

// renewAfterAsking plans new marks after canaryd requested a full sync of kube-proxy. A file
// that was saved before has kube-proxy's canary. By its old marks canaryd recognises the file
// when another process restores it before kube-proxy has looked.
func (fs *familyState) renewAfterAsking(now time.Time) { fs.rotation.plan(now) }

// askForSyncs asks kube-proxy for the full syncs that are pending.
func (d *Daemon) askForSyncs(ctx context.Context, st *state) {
	for f, fs := range st.inOrder() {
		if !pace.Due(fs.proxy.askAt, time.Now()) {
			continue
		}
		fs.proxy.askUntil, fs.proxy.askAt = time.Time{}, time.Time{}
		if err := d.replayer(ctx, st).Nudge(ctx, f); err != nil {
			severity.Warnings(klog.FromContext(ctx)).Error(err, "kube-proxy could not be asked for a full sync", "family", f)
		}
		fs.renewAfterAsking(time.Now())
	}
}

// ownerChoices are the ways out of rules without an owner. canaryd takes none of them unasked:
// only the operator knows which is right.
func ownerChoices(node string) []api.Choice {
	return []api.Choice{
		{If: "kube-proxy belongs on this node, as a pod of a DaemonSet", Command: "kubectl -n kube-system delete pod --selector=k8s-app=kube-proxy --field-selector=spec.nodeName=" + cmp.Or(node, "NODE")},
		{If: "k3s runs it within its own process", Command: "systemctl restart k3s-agent # k3s on a server"},
		{If: "RKE2 runs it as a static pod", Command: "rm /var/lib/rancher/rke2/agent/pod-manifests/kube-proxy.yaml && systemctl restart rke2-agent # rke2-server on a server"},
		{If: "kube-proxy has left this node", Command: "canaryd cleanup --rules --protect=kube-proxy"},
	}
}

// ownerless returns the report on kube-proxy's rules without an owner. It returns nil while
// they have an owner, or are not in force. Rules that are lost are another matter.
func (d *Daemon) ownerless(st *state, now time.Time) *api.OwnerlessRules {
	var o *api.OwnerlessRules
	for f, fs := range st.inOrder() {
		if fs.proxy.gone.IsZero() || now.Sub(fs.proxy.gone) < ownerlessAfter || !st.proxyStands(f) {
			continue
		}
		if o == nil {
			o = &api.OwnerlessRules{Since: fs.proxy.gone, Choices: ownerChoices(d.cfg.Node)}
		}
		o.Since, o.Families = pace.Earliest(o.Since, fs.proxy.gone), append(o.Families, f)
	}
	return o
}

// proxyStands reports whether a family holds chains of kube-proxy's that are learned, as far as
// is known. Only then they can be without an owner.
func (st *state) proxyStands(f rules.Family) bool {
	for t, s := range tableid.Of(st.generation.learned.Generation, f) {
		if !st.families[f].tables[t].verdict.Loss() && reload.HasProxy(s) {
			return true
		}
	}
	return false
}

// errOwnerless is logged while kube-proxy's rules have no owner.
var errOwnerless = errors.New("KUBE-PROXY-CANARY is not back, so no process corrects them")

// logOwnerless logs that kube-proxy's rules have no owner, and that this is over.
func (d *Daemon) logOwnerless(ctx context.Context, st *state) {
	log, now := klog.FromContext(ctx), time.Now()
	o := d.ownerless(st, now)
	if o != nil && st.ownerless.Met(errOwnerless, now) {
		severity.Warnings(log).Error(nil, "kube-proxy's rules have no owner: they are in force, but KUBE-PROXY-CANARY is not back, so no process corrects them",
			"families", o.Families, "missingFor", now.Sub(o.Since).Round(time.Second),
			"ifItBelongsHere", o.Choices[0].Command, "ifItHasLeft", o.Choices[len(o.Choices)-1].Command)
	}
	if o == nil && st.ownerless.Over() {
		severity.Notices(log).Info("kube-proxy's rules have an owner again, or are gone")
	}
}

// judgeProxy notes a full read's evidence about kube-proxy. If kube-proxy has removed its
// rules, that is learned at once. Any other removal is learned after two seconds; a replay in
// that time would bring back rules that no process corrects.
func (d *Daemon) judgeProxy(ctx context.Context, st *state, f rules.Family, snapshot iptables.Snapshot, found map[rules.TableName]reload.Examined, now time.Time) {
	fs := st.families[f]
	fs.proxy.saw(reload.ProxyCanaryStands(snapshot), snapshot.Unreadable[rules.Mangle] == nil, now)
	if fs.learningStopped() || !reload.ProxyLeft(snapshot, found, tableid.Of(st.generation.learned.Generation, f)) {
		return
	}
	st.relearn(st.generation.learned.WithoutProxy(snapshot), now, fs)
	severity.Notices(klog.FromContext(ctx)).Info("kube-proxy has removed its chains and its canary; canaryd no longer guards them", "family", f)
}
