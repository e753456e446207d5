package daemon

import (
	"context"
	"reflect"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ownersOnDisk is the stored knowledge about the owners of rules.
type ownersOnDisk struct {
	kept    reload.Owners
	at      time.Time    // when it was last compared
	trouble pace.Trouble // why the disk lacks the present knowledge
}

// recallOwners takes up the last run's knowledge about the owners of rules: kube-proxy's
// canary, and pods.
func (d *Daemon) recallOwners(ctx context.Context, st *state) {
	known, err := d.cfg.Store.LoadOwners()
	if err != nil {
		pace.Unusable(klog.FromContext(ctx), err).Error(err, "The stored list of rules' owners is not used")
		return
	}
	for f, uptime := range known.Proxy {
		if fs := st.families[f]; fs != nil {
			fs.proxy = recallProxy(uptime, d.cfg.Uptime())
		}
	}
	st.pods.Recall(known)
	st.owners.kept = known
}

// owners returns the knowledge about the owners of rules that must survive a restart.
func (d *Daemon) owners(st *state) reload.Owners {
	o := reload.Owners{}
	for f, fs := range st.families {
		uptime, stood := fs.proxy.stored(d.cfg.Uptime())
		if !stood {
			continue
		}
		if o.Proxy == nil {
			o.Proxy = map[rules.Family]time.Duration{}
		}
		o.Proxy[f] = uptime
	}
	o.Folder, o.Pods = st.pods.Folder, st.pods.Kept()
	return o
}

// keepOwners writes the knowledge about owners when it has changed, once in each poll interval
// or at the end. It tries a failing disk again; the log has the failure once.
func (d *Daemon) keepOwners(ctx context.Context, st *state, last bool) {
	if d.cfg.Store == nil || st.removed || !last && time.Since(st.owners.at) < d.cfg.PollInterval {
		return
	}
	st.owners.at = time.Now()
	now := d.owners(st)
	if reflect.DeepEqual(now, st.owners.kept) {
		return
	}
	err := d.cfg.Store.SaveOwners(now)
	d.countStateError(err)
	st.owners.trouble.Report(pace.Warnings(ctx), err, "The list of rules' owners is not on disk; after a restart canaryd would not know which rules have no owner")
	if err == nil {
		st.owners.kept = now
	}
}
