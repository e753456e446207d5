package reload

// This file handles kube-proxy's canary, by which kube-proxy notices a flush, the full sync after a
// replay, and the removal of kube-proxy's own rules.

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// OtherOwner returns why chains that a declared source claims belong to a running kube-proxy,
// or "". The evidence is kube-proxy's canary in any guarded table. The daemon then does not
// write the declared rules.
func OtherOwner(snapshot iptables.Snapshot, claims func(chain string) bool) string {
	tables := tablesWithProxy(snapshot)
	if claims == nil || !claims(owners.ServicesChain) || len(tables) == 0 {
		return ""
	}
	return fmt.Sprintf("kube-proxy writes the chains that the manifest claims: its %s is in %s %s", owners.ProxyCanary, snapshot.Family, tables[0])
}

// needsProxySync reports whether kube-proxy has to do a full sync after this result. It has to if
// the replay raced or wrote older rules, because kube-proxy may have changed them since. It has to
// if the flush may have removed rules that were too new to be in the generation. And it has to if a
// saved mangle brought back its canary, which hides an earlier flush from it. Rules that kube-proxy
// wrote since the flush prove nothing: a partial sync writes only the services that changed.
func needsProxySync(result FamilyResult) bool {
	return result.Outcome == Raced || slices.ContainsFunc(protect.Always(), func(t rules.TableName) bool { // it writes no others
		tr := result.Tables[t]
		missed := tr.flushed
		if t == rules.Mangle { // the table that has its canary and nothing else
			missed = tr.restored
		}
		return tr.Proved && (tr.Wrote > 0 || missed)
	})
}

// nudge makes kube-proxy do a full sync, by deleting its canary from the tables in which a read
// saw it. each calls it after a replay. Each table is a restore of its own, with mangle last,
// because kube-proxy looks there. It is not retried.
func nudge(ctx context.Context, s iptables.Session, f rules.Family, tables []rules.TableName) error {
	for _, table := range []rules.TableName{rules.Nat, rules.Filter, rules.Mangle} {
		if !slices.Contains(tables, table) {
			continue
		}
		// Declaring first makes -X safe if kube-proxy deletes it meanwhile.
		script := iptables.Script{
			Table:   table,
			Declare: []string{owners.ProxyCanary},
			Steps:   []iptables.Step{{Verb: iptables.Drop, Chain: owners.ProxyCanary}},
		}
		if err := s.RestoreAnyway(ctx, iptables.Payload{f: {script}})[f].Err; err != nil {
			return fmt.Errorf("deleting %s from %s %s, so that kube-proxy syncs: %w", owners.ProxyCanary, f, table, err)
		}
	}
	return nil
}

// ProxyCanaryStands reports whether the last read showed kube-proxy's canary in mangle. Only then
// can canaryd request a full sync from kube-proxy.
func (r FamilyResult) ProxyCanaryStands() bool { return slices.Contains(r.proxyCanary, rules.Mangle) }

// ProxyCanaryStands reports whether a snapshot shows kube-proxy's canary in mangle.
func ProxyCanaryStands(snapshot iptables.Snapshot) bool {
	return snapshot.Tables[rules.Mangle].Chain(owners.ProxyCanary) != nil
}

// Nudge makes kube-proxy do a full sync of a family, if its canary is in force. The daemon
// calls it for a sync that is still due after a replay. An error means that none was requested.
func (r Replayer) Nudge(ctx context.Context, f rules.Family) error {
	s, err := r.Kernel.Begin(ctx)
	if err != nil {
		return fmt.Errorf("beginning a guarded write: %w", err)
	}
	snapshot, err := s.Read(ctx, f)
	if err == nil {
		err = nudge(ctx, s, f, tablesWithProxy(snapshot))
	}
	return errors.Join(err, s.Close())
}

// tablesWithProxy returns the guarded tables that have kube-proxy's canary. nudge deletes it
// there; OtherOwner takes it as evidence of a running kube-proxy.
func tablesWithProxy(snapshot iptables.Snapshot) []rules.TableName {
	var found []rules.TableName
	for _, table := range protect.Tables() {
		if snapshot.Tables[table].Chain(owners.ProxyCanary) != nil {
			found = append(found, table)
		}
	}
	return found
}

// HasProxy reports whether a section has a chain of kube-proxy.
func HasProxy(s rules.Section) bool {
	return slices.ContainsFunc(s.Chains, func(c rules.Chain) bool { return owners.KubeProxys(c.Name) })
}

// ProxyLeft reports whether a read of a family shows that kube-proxy removed its own rules, as its
// cleanup does. That requires that every table could be read, and that the tables that held its
// chains have all their marks. No table may have one of its chains or its canary. A flush also
// removes a mark. A flusher that deletes chains by name could spare the marks, but has no reason to
// choose exactly these chains.
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

// proxyIn reports whether a table holds a chain of kube-proxy. Then ProxyLeft is false.
func proxyIn(t *rules.Table) bool {
	return t != nil && slices.ContainsFunc(t.Chains, func(c rules.Chain) bool {
		return c.Name == owners.ProxyCanary || owners.KubeProxys(c.Name)
	})
}

// WithoutProxy returns the learned generation without kube-proxy's chains and jumps of one family,
// after ProxyLeft. A kubelet before 1.28 writes two chains with names of kube-proxy's; these stay
// if they exist.
func (l Learned) WithoutProxy(snapshot iptables.Snapshot) Learned {
	for t, s := range tableid.Of(l.Generation, snapshot.Family) {
		_, rest := s.Split(func(chain string) bool {
			shared := chain == "KUBE-MARK-MASQ" || chain == "KUBE-POSTROUTING"
			return owners.KubeProxys(chain) || shared && snapshot.Tables[t].Chain(chain) == nil
		})
		l.Generation = l.Generation.With(snapshot.Family.Table(t), rest)
	}
	return l
}

// ProxyKnown reports whether the replay read the table in which ProxyCanaryStands looks.
func (r FamilyResult) ProxyKnown() bool { return r.Tables[rules.Mangle].Read }
