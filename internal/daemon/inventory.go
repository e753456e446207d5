package daemon

import (
	"context"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// inventoryEvery bounds how often canaryd counts unguarded rules. While it guards nothing,
	// it lists nf_tables' native tables that often.
	inventoryEvery = 30 * time.Second
	nativeShown    = 20
	othersShown    = 5
)

// An inventory counts the rules and native tables that --protect does not name.
type inventory struct {
	at      time.Time // when it was taken last; zero: not yet
	reads   uint64    // readSoFar of then
	rules   int       // of iptables' tables
	chains  int       // that nothing guards, without those of a firewall manager
	single  int       // rules of built-in chains that nothing guards, without those of a firewall manager
	names   []string  // some of these chains
	tables  []string  // native ones
	unknown bool      // native tables could not be listed

	edition int  // of the generation that bare is of
	bare    bool // that generation has nothing to guard
}

// bareNow reports whether the generation has nothing to guard. Then the status may say that
// nothing is protected.
func (d *Daemon) bareNow(st *state) bool {
	if inv := &st.inventory; inv.edition != st.generation.edition {
		// Kubelet's chains alone count as nothing only if more than these is to be guarded.
		inv.edition, inv.bare = st.generation.edition, bare(st.want(), d.cfg.Protection.Chain(owners.ServicesChain))
	}
	return st.inventory.bare
}

// bare reports whether a generation has no rule or, if beyondKubelet, only kubelet's. That is
// so if --protect names the chains of services, too.
func bare(g rules.Generation, beyondKubelet bool) bool {
	// kubelet's chains are guarded, but --protect=kube is not meant for a node without others.
	counts := func(chain string) bool { return !beyondKubelet || !owners.Kubelets(chain) }
	for _, s := range g {
		for _, c := range s.Chains {
			if len(c.Rules) > 0 && counts(c.Name) {
				return false
			}
		}
		for _, h := range s.Jumps {
			if counts(h.Into()) {
				return false
			}
		}
	}
	return true
}

// inventoryAt returns when the inventory is due: at once (d.made) at first, after reads have
// shown something new, and while nothing is guarded.
func (d *Daemon) inventoryAt(st *state) time.Time {
	switch inv := &st.inventory; {
	case inv.at.IsZero():
		return d.made
	case inv.reads != st.readSoFar() || d.bareNow(st):
		return inv.at.Add(inventoryEvery)
	}
	return time.Time{}
}

// readSoFar returns a number that changes with the last read of any family: then the inventory
// is due again.
func (st *state) readSoFar() (sum uint64) {
	for _, fs := range st.inOrder() {
		sum = 31*sum + fs.examined.digest
	}
	return sum
}

// mayTakeInventory reports whether every table was read and nothing is lost.
func (d *Daemon) mayTakeInventory(st *state) bool { return st.loss == nil && d.mayFindOwners(st) }

// takeInventory counts rules and native tables that --protect does not name, as the last reads
// showed them.
func (d *Daemon) takeInventory(ctx context.Context, st *state) {
	before := st.inventory
	inv := inventory{at: time.Now(), reads: st.readSoFar(), edition: before.edition, bare: before.bare}
	p, want := d.protection(st), st.want()
	for f, fs := range st.inOrder() {
		for _, t := range protect.Tables() {
			table := fs.tables[t].standing.table
			if fs.tables[t].unmarked(t) {
				table = fs.unguarded[t].before
			}
			if table != nil {
				inv.count(table, p.OthersIn(table, want[f.Table(t)], canary.IsMark))
			}
		}
	}
	inv.tables, inv.unknown = before.tables, d.cfg.NativeTables == nil
	if d.cfg.NativeTables != nil {
		tables, err := d.cfg.NativeTables(ctx)
		if inv.unknown = err != nil; err == nil {
			inv.tables = tables
		} else {
			klog.FromContext(ctx).V(1).Info("The native tables that are not guarded could not be listed", "reason", err)
		}
	}
	st.inventory = inv
}

// count adds the rules and chains of a table that nothing guards (others).
func (inv *inventory) count(table *rules.Table, others rules.Others) {
	for range others.Rules() {
		inv.rules++
	}
	list := protect.UnguardedIn(others, table)
	chains, single := protect.CountUnguarded(list)
	inv.chains += chains
	inv.single += single
	for _, u := range list {
		if !u.Single && u.Counts() && len(inv.names) < othersShown && !slices.Contains(inv.names, u.Chain) {
			inv.names = append(inv.names, strings.Clone(u.Chain))
		}
	}
}

// unguardedNow returns the unguarded chains, rules and native tables for a Status; nil if there are
// none. It names no rule: a Status leaves the node.
func (st *state) unguardedNow() *api.Unguarded {
	inv := &st.inventory
	u := api.Unguarded{Chains: inv.chains, Rules: inv.single}
	add := func(name string) {
		if len(u.Names) < api.UnguardedShown {
			u.Names = append(u.Names, name)
		}
	}
	for _, name := range inv.names {
		if o, known := owners.OfChain(name); known {
			name += " (" + o.Name + ")"
		}
		add(name)
	}
	for _, id := range inv.tables {
		if _, name, _ := strings.Cut(id, " "); owners.ManagerOfTable(name) == "" {
			u.Tables++
			add("table " + id)
		}
	}
	if st.removed || u.Chains+u.Rules+u.Tables == 0 {
		return nil
	}
	return &u
}

// guardsPackets reports whether a native table that is guarded decides on packets: it has rules, or
// a base chain, which has a policy. A table that is left out may decide, too.
func (r *nativeRealm) guardsPackets() bool {
	return anyOf(r.tables, func(t *nativeTable) bool {
		return t.out != nil || slices.ContainsFunc(t.want.Chains, func(c native.Chain) bool { return c.Base || len(c.Rules) > 0 })
	})
}

// nothing returns the report that nothing is protected; nil if something is, or if that is not
// known yet: tables are unread, or a loss is open. publish puts it into a Status, whose node is
// then ready and not healthy. Rules of the generation can only be kubelet's then (bare).
func (d *Daemon) nothing(st *state, s api.Status) *api.Nothing {
	if st.loss != nil || !st.allPlanted() || !d.bareNow(st) || s.Ready() != nil || st.native.guardsPackets() {
		return nil
	}
	inv := &st.inventory
	count, _ := st.want().Counts()
	return &api.Nothing{
		NativeTables: inv.tables[:min(len(inv.tables), nativeShown)], Rules: inv.rules, Chains: inv.names,
		Kubelet: count > 0, Unknown: inv.unknown || inv.at.IsZero(), // the inventory follows
	}
}
