package daemon

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A kube-proxy that has left corrects nothing any more, and what a replay puts back of
// its rules stays as it is for good. While it is at work, KUBE-PROXY-CANARY stands: it
// looks for it every 30 s and plants it again behind a full sync.

// ownerlessAfter is how long that canary may be missing until its rules count as without
// an owner: kube-proxy looks every 30 s, and needs 7 s for a sync of 5,000 services on nft.
const ownerlessAfter = 2 * time.Minute

// A proxyWatch is what is known of kube-proxy's canary in one family.
type kubeProxy struct {
	stood bool      // it was seen at some time
	gone  time.Time // since when it has been missing; zero: it stands, or never stood
	// uptime is how long the machine had been up then, as the disk has it.
	uptime      time.Duration
	pendingSync pendingSync
}

// saw notes whether kube-proxy's canary stood at that time.
func (w *kubeProxy) saw(stands bool, now time.Time) {
	switch {
	case stands:
		w.stood, w.gone, w.uptime = true, time.Time{}, 0
	case w.stood && w.gone.IsZero():
		w.gone = now
	}
}

// ownerChoices are the ways out. Neither is taken without being asked for: which of them
// is right only the operator knows.
func ownerChoices() []api.Choice {
	return []api.Choice{
		{If: "kube-proxy belongs on this node", Command: "kubectl -n kube-system rollout restart daemonset/kube-proxy"},
		{If: "kube-proxy has left this node", Command: "canaryd cleanup --rules --protect=kube-proxy"},
	}
}

// ownerless returns what is to be said of kube-proxy's rules, nil while they have an
// owner, or are not in force. Rules that are lost are another matter.
func (d *Daemon) ownerless(st *state, now time.Time) *api.OwnerlessRules {
	var o *api.OwnerlessRules
	for _, f := range rules.Families() {
		fs := st.families[f]
		if fs == nil || fs.proxy.gone.IsZero() || now.Sub(fs.proxy.gone) < ownerlessAfter || !st.proxyStands(f) {
			continue
		}
		if o == nil {
			o = &api.OwnerlessRules{Since: fs.proxy.gone, Choices: ownerChoices()}
		}
		o.Since, o.Families = earliest(o.Since, fs.proxy.gone), append(o.Families, f)
	}
	return o
}

// proxyStands reports whether a family holds chains of kube-proxy's that are learned, as
// far as is known.
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
	if o != nil && st.ownerless.met(errOwnerless, now) {
		log.Error(nil, "kube-proxy's rules have no owner: they are in force, but KUBE-PROXY-CANARY is not back, so no process corrects them",
			"families", o.Families, "missingFor", now.Sub(o.Since).Round(time.Second),
			"ifItBelongsHere", o.Choices[0].Command, "ifItHasLeft", o.Choices[1].Command)
	}
	if o == nil && st.ownerless.over() {
		log.Info("No rules of kube-proxy's are without an owner any more")
	}
}

// heedProxy takes in what a full read shows of kube-proxy. Where it has taken itself
// away, that is its last word at once: rules that come back within the two seconds of
// any other removal would never be corrected.
func (d *Daemon) heedProxy(ctx context.Context, st *state, f rules.Family, snapshot iptables.Snapshot, found map[rules.TableName]reload.Examined, now time.Time) {
	fs := st.families[f]
	if snapshot.Unreadable[rules.Mangle] == nil {
		fs.proxy.saw(reload.ProxyStands(snapshot), now)
	}
	if fs.learningStopped() || !reload.ProxyLeft(snapshot, found, tableid.Of(st.generation.learned.Generation, f)) {
		return
	}
	st.relearn(st.generation.learned.WithoutProxy(snapshot), now, fs)
	klog.FromContext(ctx).Info("kube-proxy has removed its chains and its canary; a flush does not bring them back", "family", f)
}

// learningStopped reports whether observe mode only watches a table of the family.
func (fs *familyState) learningStopped() bool {
	for _, ts := range fs.tables {
		if ts.learningStopped {
			return true
		}
	}
	return false
}
