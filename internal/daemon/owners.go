package daemon

import (
	"context"
	"reflect"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// recallOwners takes up what the last run knew of the owners of rules.
func (d *Daemon) recallOwners(ctx context.Context, st *state) {
	known, err := d.cfg.Store.LoadOwners()
	if err != nil {
		klog.FromContext(ctx).Error(err, "What is stored of the owners of rules is not used")
		return
	}
	for f, uptime := range known.Proxy {
		if fs := st.families[f]; fs != nil {
			fs.proxy = proxyWatch{stood: true, uptime: uptime}
			if uptime > 0 {
				// A negative age was told by another clock: that of a container's own time.
				fs.proxy.gone = time.Now().Add(-max(d.cfg.Uptime()-uptime, 0))
			}
		}
	}
	st.ownersKept = known
}

// owners returns what a restart must not forget of the owners of rules.
func (d *Daemon) owners(st *state) reload.Owners {
	o := reload.Owners{}
	for f, fs := range st.families {
		w := &fs.proxy
		if !w.stood {
			continue
		}
		if !w.gone.IsZero() && w.uptime == 0 {
			w.uptime = d.cfg.Uptime() - time.Since(w.gone)
		}
		if o.Proxy == nil {
			o.Proxy = map[rules.Family]time.Duration{}
		}
		o.Proxy[f] = w.uptime
	}
	return o
}

// keepOwners writes what is known of owners when it has changed. A disk that fails is
// asked again at the next look; the log has it once.
func (d *Daemon) keepOwners(ctx context.Context, st *state) {
	if d.cfg.Store == nil || st.removed {
		return
	}
	now := d.owners(st)
	if reflect.DeepEqual(now, st.ownersKept) {
		return
	}
	if err := d.cfg.Store.SaveOwners(now); err != nil {
		if st.ownersUnkept.met(err, time.Now()) {
			klog.FromContext(ctx).Error(err, "After a restart canaryd would not know which rules have no owner")
		}
		return
	}
	st.ownersKept = now
	st.ownersUnkept.over()
}
