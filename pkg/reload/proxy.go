package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// HasProxy reports whether a section has a chain of kube-proxy.
func HasProxy(s rules.Section) bool {
	return slices.ContainsFunc(s.Chains, func(c rules.Chain) bool { return protect.KubeProxys(c.Name) })
}

// ProxyLeft reports whether a read of a family shows that kube-proxy removed its own rules, as its
// cleanup does. That requires that every table could be read, that all marks stand in the tables
// that held its chains, and that none of its chains is left in any table, nor its canary. A flush
// removes a mark as well. A flusher that deletes chains by name could spare the marks, but has no
// reason to choose exactly these chains.
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

// proxyIn reports whether a table holds a chain of kube-proxy.
func proxyIn(t *rules.Table) bool {
	return t != nil && slices.ContainsFunc(t.Chains, func(c rules.Chain) bool {
		return c.Name == kubeProxyCanary || protect.KubeProxys(c.Name)
	})
}

// WithoutProxy returns what is learned without kube-proxy's chains and jumps of one family, after
// ProxyLeft. A kubelet before 1.28 writes two chains of the same names; those stay if they stand.
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

// ProxyKnown reports whether the replay read the table in which ProxyCanaryStands looks.
func (r FamilyResult) ProxyKnown() bool { return r.Tables[rules.Mangle].Read }
