package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// HasProxy reports whether a table's section holds a chain of kube-proxy's.
func HasProxy(s rules.Section) bool {
	return slices.ContainsFunc(s.Chains, func(c rules.Chain) bool { return protect.KubeProxys(c.Name) })
}

// ProxyLeft reports whether one read of a family shows that kube-proxy has taken away
// what learned holds of it: every table could be read, each of those that held its
// chains has all its marks, and in none is a chain of kube-proxy's left, nor its canary.
// A flush takes a mark with it. A flusher that deletes chains by name could leave the
// marks, but has no reason to take exactly these chains.
func ProxyLeft(snapshot iptables.Snapshot, found map[rules.TableName]Examined, learned map[rules.TableName]rules.Section) bool {
	had := false
	for _, table := range protect.Tables() {
		x, holds := found[table], HasProxy(learned[table])
		had = had || holds
		lost := x.Finding.MarkLost || len(x.Finding.Witnesses) > 0
		if snapshot.Unreadable[table] != nil || lost || holds && x.Mark.Nonce == "" || proxyIn(snapshot.Tables[table]) {
			return false
		}
	}
	return had
}

// proxyIn reports whether anything of kube-proxy's is in a table.
func proxyIn(t *rules.Table) bool {
	return t != nil && slices.ContainsFunc(t.Chains, func(c rules.Chain) bool {
		return c.Name == kubeProxyCanary || protect.KubeProxys(c.Name)
	})
}

// WithoutProxy returns what is learned without the chains of kube-proxy's in one family
// and the jumps into them, as a read shows that it has left. Of the chains that a kubelet
// before 1.28 writes, too, those stay that stand.
func (l Learned) WithoutProxy(snapshot iptables.Snapshot) Learned {
	next, f := Learned{Generation: l.Generation, shrunk: l.shrunk}, snapshot.Family
	for t, s := range tableid.Of(l.Generation, f) {
		_, rest := s.Split(func(chain string) bool {
			shared := chain == "KUBE-MARK-MASQ" || chain == "KUBE-POSTROUTING"
			return protect.KubeProxys(chain) || shared && snapshot.Tables[t].Chain(chain) == nil
		})
		next.Generation = next.Generation.With(f.Table(t), rest)
	}
	return next
}

// WithoutAttachments returns what is learned without the rules of these containers.
func (l Learned) WithoutAttachments(gone map[protect.Attachment]bool) Learned {
	return Learned{Generation: protect.DetachAll(l.Generation, gone), shrunk: l.shrunk}
}

// ProxyKnown reports whether the replay's reads showed the table in which ProxyStands
// looks.
func (r FamilyResult) ProxyKnown() bool { return r.Tables[rules.Mangle].Read }
