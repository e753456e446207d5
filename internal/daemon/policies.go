package daemon

import (
	"cmp"
	"context"
	"maps"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// canaryd sets no policies of built-in chains, and leaves the policies of an existing native
// table as they are. A policy that becomes DROP closes a node on which all protected rules are
// in force, so canaryd reports it. A policy counts as known if the table was learned with it,
// by an earlier run too. It is also known if the owner of a native table has set it, or if an
// operator has accepted it.

// policyAround is how long before or after a flush a policy must change to belong to it. A
// firewall's script sets policies by commands of their own.
const policyAround = 10 * time.Second

// followPolicies notes the policies that a full read showed in a table (seen), and reports
// those that have become DROP.
func (d *Daemon) followPolicies(st *state, id rules.TableID, seen map[string]string) {
	p := &st.table(id).policies
	if p.Known == nil {
		p.Known = st.generation.learned.Generation[id].Policies
	}
	since := st.families[id.Family].examined.since
	st.closings.Add(p.Follow(rules.BuiltinChains(id.Name), seen, api.PolicyDrop{Family: id.Family, Table: id.Name, Since: since, Flush: st.flushAround(since)}))
}

// followNativePolicies notes the policies of a native table that is about to be learned. Its
// owner's own changes, and changes that an operator has accepted, are not reported.
func (d *Daemon) followNativePolicies(st *state, t *nativeTable, now nativeLearned) {
	chains, seen := now.Table.Policies()
	switch p := &t.policies; {
	case t.accept:
		p.Known, p.Drops = seen, nil
	case p.Known == nil && t.want != nil:
		_, p.Known = t.want.Policies()
	}
	for _, chain := range chains {
		if d.ownerCloses(t, now, chain) {
			t.policies.Known = maps.Clone(t.policies.Known)
			t.policies.Known[chain] = seen[chain]
		}
	}
	since := cmp.Or(t.dirty, now.read)
	st.closings.Add(t.policies.Follow(chains, seen, api.PolicyDrop{Family: now.id.Family, Table: now.id.Name, Native: true, Since: since, Flush: st.flushAround(since)}))
}

// ownerCloses reports whether the table's owner was the last to close a chain before that read.
// Then its policy is known and not reported.
func (d *Daemon) ownerCloses(t *nativeTable, now nativeLearned, chain string) (is bool) {
	for _, deed := range t.deeds {
		if deed.Closed[chain] > 0 && !nft.Newer(deed.Genid, now.Genid) {
			is = d.committer(now.id, deed.commit) == native.Owner
		}
	}
	return is
}

// flushAround returns the ID of the flush that was under way, or had just ended, at that time;
// "" if there was none. The report on a policy names it.
func (st *state) flushAround(at time.Time) string {
	for _, o := range st.openRecords() {
		if o.record.Drill == "" {
			return o.record.ID
		}
	}
	return st.journal.Around(at, policyAround)
}

// knownPolicies returns the policies that the disk keeps: after a restart they are not
// reported.
func (st *state) knownPolicies() map[rules.Family]map[rules.TableName]map[string]string {
	all := map[rules.Family]map[rules.TableName]map[string]string{}
	for id, ts := range st.tables() {
		if all[id.Family] == nil {
			all[id.Family] = map[rules.TableName]map[string]string{}
		}
		all[id.Family][id.Name] = ts.policies.Known
	}
	return all
}

// policyDrops returns the chains of all tables that have become closed.
func (st *state) policyDrops() (list []api.PolicyDrop) {
	for _, ts := range st.tables() {
		list = append(list, ts.policies.Drops...)
	}
	for _, id := range st.native.ids() {
		list = append(list, st.native.tables[id].policies.Drops...)
	}
	return list
}

// sayPolicies logs which policies have become DROP.
func (d *Daemon) sayPolicies(ctx context.Context, st *state) {
	st.closings.Say(ctx, dismissCommand)
}

// dismissPolicies accepts the policies that have become DROP, and names their chains.
func (d *Daemon) dismissPolicies(st *state) (chains []string) {
	for _, ts := range st.tables() {
		chains = append(chains, ts.policies.Dismiss()...)
	}
	if len(chains) > 0 {
		st.disk.saveSoon(time.Now())
	}
	for _, id := range st.native.ids() {
		if closed := st.native.tables[id].policies.Dismiss(); len(closed) > 0 {
			chains = append(chains, closed...)
			st.native.disk.changed(time.Now())
		}
	}
	return chains
}
