package daemon

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/rules"
)

// canaryd sets no policies of built-in chains. A policy that becomes DROP closes a node on which
// all protected rules are in force, so it is said. The policies that count as known are those with
// which a table was learned, of an earlier run too, and those that an operator has accepted.

// policyDrop is the policy that closes a chain.
const policyDrop = "DROP"

// policyAround is how long before and after a flush a policy must change to have come with it: a
// firewall's script sets policies by commands of their own.
const policyAround = 10 * time.Second

// followPolicies takes up the policies that a read showed in a table.
func (d *Daemon) followPolicies(st *state, id rules.TableID, seen map[string]string) {
	ts := st.table(id)
	known := maps.Clone(ts.policies)
	if known == nil {
		known = maps.Clone(st.generation.learned.Generation[id].Policies)
	}
	if known == nil {
		known = map[string]string{}
	}
	ts.policyDrops = slices.DeleteFunc(slices.Clone(ts.policyDrops), func(p api.PolicyDrop) bool { return seen[p.Chain] != policyDrop })
	for _, chain := range rules.BuiltinChains(id.Name) {
		switch is, was := seen[chain], known[chain]; {
		case is == "": // the table is gone, or the chain
		case is != policyDrop || was == "" || was == policyDrop:
			known[chain] = is
		case !slices.ContainsFunc(ts.policyDrops, func(p api.PolicyDrop) bool { return p.Chain == chain }):
			since := st.families[id.Family].examined.since
			p := api.PolicyDrop{Family: id.Family, Table: id.Name, Chain: chain, Was: was, Since: since, Flush: st.flushAround(since)}
			ts.policyDrops = append(ts.policyDrops, p)
			st.policiesFresh, st.policiesAt = append(st.policiesFresh, p), time.Now()
		}
	}
	ts.policies = known
}

// flushAround returns the ID of the flush that was under way, or had just ended, at that time; ""
// if there was none.
func (st *state) flushAround(at time.Time) string {
	if st.loss != nil && st.loss.record.Drill == "" {
		return st.loss.record.ID
	}
	for _, f := range st.journal {
		end := f.Time.Add(api.Seconds(f.AbsentSeconds) + policyAround)
		if f.Drill == "" && !f.Requested() && !f.Earlier && at.After(f.Time.Add(-policyAround)) && (at.Before(end) || f.Open()) {
			return f.ID
		}
	}
	return ""
}

// knownPolicies returns the policies that the disk keeps.
func (st *state) knownPolicies() map[rules.Family]map[rules.TableName]map[string]string {
	all := map[rules.Family]map[rules.TableName]map[string]string{}
	for id, ts := range st.tables() {
		if all[id.Family] == nil {
			all[id.Family] = map[rules.TableName]map[string]string{}
		}
		all[id.Family][id.Name] = ts.policies
	}
	return all
}

// policyDrops returns the chains of all tables that have become closed.
func (st *state) policyDrops() (list []api.PolicyDrop) {
	for _, ts := range st.tables() {
		list = append(list, ts.policyDrops...)
	}
	return list
}

// sayPolicies logs which policies have become DROP.
func (d *Daemon) sayPolicies(ctx context.Context, st *state) {
	for _, p := range st.policiesFresh {
		severity.Warnings(klog.FromContext(ctx)).Info("The policy of a built-in chain has become DROP; canaryd sets none, so the kernel drops what no rule accepts",
			"family", p.Family, "table", p.Table, "chain", p.Chain, "was", p.Was, "flush", p.Flush, "acceptIt", dismissCommand)
	}
	st.policiesFresh, st.policiesAt = nil, time.Time{}
}

// dismissPolicies accepts the policies that have become DROP, and names their chains.
func (d *Daemon) dismissPolicies(st *state) (chains []string) {
	for _, ts := range st.tables() {
		for _, p := range ts.policyDrops {
			chains = append(chains, p.String())
			ts.policies[p.Chain] = policyDrop
		}
		ts.policyDrops = nil
	}
	if len(chains) > 0 {
		st.disk.saveSoon(time.Now())
	}
	return chains
}
