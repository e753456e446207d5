package daemon

import (
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/tableid"
	"github.com/canaryd/canaryd/pkg/watch"
)

// kubeProxyTable is the name of kube-proxy's tables in nftables mode.
const kubeProxyTable = "kube-proxy"

// proxyWorks reports whether kube-proxy is at work in iptables mode: its canary stands. known is
// false while iptables' tables of the family were not read.
func (st *state) proxyWorks(f tableid.Family) (works, known bool) {
	fs := st.families[f]
	if fs == nil || fs.examined.digest == 0 {
		return false, false
	}
	return fs.proxy.stood && fs.proxy.gone.IsZero(), true
}

// seekSwitch looks for kube-proxy's tables that were deleted alone while its canary in iptables'
// tables did not stand, and has come since. kube-proxy was started in iptables mode, and deleted
// them itself: they do not wait for an operator.
func (d *Daemon) seekSwitch(st *state) {
	r := &st.native
	for id, w := range r.waiting {
		t := r.tables[id]
		if id.Name != kubeProxyTable || t.switched || t.finding.Verdict != native.Unattributed || !t.proxyAway {
			continue
		}
		if works, _ := st.proxyWorks(id.Family); works {
			t.switched = true
			t.touch(w.Time, time.Now(), true)
		}
	}
}

// ownerBegan reports whether a process of the table's owner had started since the table was last
// written, as kube-proxy does that is started with --cleanup or in another mode. The process that
// wrote the table had started before. One that will write the table writes it again.
func (t *nativeTable) ownerBegan(id tableid.TableID, n watch.Neighbour) bool {
	return n.PID != 0 && slices.Contains(nativeOwners[id.Name], n.Comm) && !t.wrote.IsZero() && n.Since.After(t.wrote)
}
