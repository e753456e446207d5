package daemon

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// canaryd sets no policies of built-in chains, and leaves those of a native table that stands as
// they are. A policy that becomes DROP closes a node on which all protected rules are in force, so
// it is said. The policies that count as known are those with which a table was learned, of an
// earlier run too, those that the owner of a native table has set, and those that an operator has
// accepted.

// policyDrop is the policy that closes a chain.
const policyDrop = "DROP"

// policyAround is how long before and after a flush a policy must change to have come with it: a
// firewall's script sets policies by commands of their own.
const policyAround = 10 * time.Second

// policies are those of the built-in chains of one of iptables' tables, or of the base chains of a
// native one.
type policies struct {
	known map[string]string
	drops []api.PolicyDrop // the chains whose policy has become DROP since
}

// follow takes up the policies of chains that a read showed. d is the table of those that have
// become DROP, and when that was seen.
func (p *policies) follow(st *state, chains []string, seen map[string]string, d api.PolicyDrop) {
	known := maps.Clone(p.known)
	if known == nil {
		known = map[string]string{}
	}
	p.drops = slices.DeleteFunc(slices.Clone(p.drops), func(d api.PolicyDrop) bool { return seen[d.Chain] != policyDrop })
	for _, chain := range chains {
		switch is, was := seen[chain], known[chain]; {
		case is == "": // the table is gone, or the chain
		case is != policyDrop || was == "" || was == policyDrop:
			known[chain] = is
		case !slices.ContainsFunc(p.drops, func(d api.PolicyDrop) bool { return d.Chain == chain }):
			d.Chain, d.Was, d.Flush = chain, was, st.flushAround(d.Since)
			p.drops = append(p.drops, d)
			st.policiesFresh, st.policiesAt = append(st.policiesFresh, d), time.Now()
		}
	}
	p.known = known
}

// dismiss accepts the policies that have become DROP, and returns their chains' names.
func (p *policies) dismiss() (chains []string) {
	for _, d := range p.drops {
		chains = append(chains, d.String())
		p.known[d.Chain] = policyDrop
	}
	p.drops = nil
	return chains
}

// followPolicies takes up the policies that a read showed in a table.
func (d *Daemon) followPolicies(st *state, id rules.TableID, seen map[string]string) {
	p := &st.table(id).policies
	if p.known == nil {
		p.known = st.generation.learned.Generation[id].Policies
	}
	p.follow(st, rules.BuiltinChains(id.Name), seen, api.PolicyDrop{Family: id.Family, Table: id.Name, Since: st.families[id.Family].examined.since})
}

// followNativePolicies takes up the policies of a native table that is about to be learned. Its
// owner's own change, and one that an operator has accepted, needs no word.
func (d *Daemon) followNativePolicies(st *state, t *nativeTable, now nativeLearned) {
	chains, seen := now.Table.Policies()
	switch p := &t.policies; {
	case t.accept:
		p.known, p.drops = seen, nil
	case p.known == nil && t.want != nil:
		_, p.known = t.want.Policies()
	}
	for _, chain := range chains {
		if d.ownerCloses(t, now, chain) {
			t.policies.known = maps.Clone(t.policies.known)
			t.policies.known[chain] = seen[chain]
		}
	}
	t.policies.follow(st, chains, seen, api.PolicyDrop{Family: now.id.Family, Table: now.id.Name, Native: true, Since: cmp.Or(t.dirty, now.read)})
}

// ownerCloses reports whether the table's owner was the last to close a chain.
func (d *Daemon) ownerCloses(t *nativeTable, now nativeLearned, chain string) (is bool) {
	for _, deed := range t.deeds {
		if deed.Closed[chain] > 0 && !nft.Newer(deed.Genid, now.Genid) {
			is = d.committer(now.id, deed.commit) == native.Owner
		}
	}
	return is
}

// flushAround returns the ID of the flush that was under way, or had just ended, at that time; ""
// if there was none.
func (st *state) flushAround(at time.Time) string {
	if st.loss != nil && st.loss.record.Drill == "" {
		return st.loss.record.ID
	}
	if l := st.native.loss; l != nil {
		return l.record.ID
	}
	return st.journal.Around(at, policyAround)
}

// knownPolicies returns the policies that the disk keeps.
func (st *state) knownPolicies() map[rules.Family]map[rules.TableName]map[string]string {
	all := map[rules.Family]map[rules.TableName]map[string]string{}
	for id, ts := range st.tables() {
		if all[id.Family] == nil {
			all[id.Family] = map[rules.TableName]map[string]string{}
		}
		all[id.Family][id.Name] = ts.policies.known
	}
	return all
}

// policyDrops returns the chains of all tables that have become closed.
func (st *state) policyDrops() (list []api.PolicyDrop) {
	for _, ts := range st.tables() {
		list = append(list, ts.policies.drops...)
	}
	for _, id := range st.native.ids() {
		list = append(list, st.native.tables[id].policies.drops...)
	}
	return list
}

// sayPolicies logs which policies have become DROP.
func (d *Daemon) sayPolicies(ctx context.Context, st *state) {
	for _, p := range st.policiesFresh {
		what := "The policy of a built-in chain has become DROP; canaryd sets none, so the kernel drops what no rule accepts"
		if p.Native {
			what = "The policy of a base chain has become DROP; canaryd leaves it so, and the kernel drops what no rule accepts"
		}
		severity.Warnings(klog.FromContext(ctx)).Info(what,
			"family", p.Family, "table", p.Table, "chain", p.Chain, "was", p.Was, "flush", p.Flush, "acceptIt", dismissCommand)
	}
	st.policiesFresh, st.policiesAt = nil, time.Time{}
}

// dismissPolicies accepts the policies that have become DROP, and names their chains.
func (d *Daemon) dismissPolicies(st *state) (chains []string) {
	for _, ts := range st.tables() {
		chains = append(chains, ts.policies.dismiss()...)
	}
	if len(chains) > 0 {
		st.disk.saveSoon(time.Now())
	}
	for _, id := range st.native.ids() {
		if closed := st.native.tables[id].policies.dismiss(); len(closed) > 0 {
			chains = append(chains, closed...)
			st.native.disk.changed(time.Now())
		}
	}
	return chains
}
