package iptables

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A tableView is a mirrored table as Snapshots show it. It lasts from one Snapshot to the next:
// at 5,000 services it takes ten times as long to build as to read the changes. The zero value
// is a table to be built.
type tableView struct {
	ready    *rules.Table // as last shown; never changed in place
	reshaped bool         // the set of chains differs from ready's
	order    []string     // the names of the user's chains, sorted; nil if not known
}

// added notes a new user's chain, for Reshaped: the next Snapshot builds the table again,
// without sorting all names.
func (v *tableView) added(chain string) {
	v.reshaped = true
	if at, found := slices.BinarySearch(v.order, chain); v.order != nil && !found {
		v.order = slices.Insert(v.order, at, chain)
	}
}

// removed notes that a chain was deleted, for Reshaped. The next Snapshot builds the table
// again.
func (v *tableView) removed(chain string) {
	v.reshaped = true
	if at, found := slices.BinarySearch(v.order, chain); found {
		v.order = slices.Delete(v.order, at, at+1)
	}
}

// show returns a table as iptables-save prints it, for a Snapshot. A table without a change
// since the last one is the same pointer.
func (f *familyText) show(name rules.TableName, t *tableText) *rules.Table {
	v := &t.view
	switch {
	case v.ready == nil || v.reshaped:
		v.ready = f.build(name, t)
	case len(t.fresh) > 0:
		changed := make([]rules.Chain, 0, len(t.fresh))
		for chain := range t.fresh {
			changed = append(changed, f.showChain(name, t, chain))
		}
		v.ready = v.ready.With(changed...)
	}
	v.reshaped = false
	if len(t.fresh) > 0 {
		t.fresh = map[string][]rules.Rule{} // the map may have been large
	}
	return v.ready
}

// build builds a table in the order of iptables-save: first all built-in chains, even missing
// ones, then the user's by name. show calls it if the set of chains has changed.
func (f *familyText) build(name rules.TableName, t *tableText) *rules.Table {
	v := &t.view
	if v.order == nil {
		all := f.raw.Chains(name)
		v.order = slices.DeleteFunc(all, func(chain string) bool {
			p := Place{Table: name, Chain: chain}
			return rules.Builtin(name, chain) || f.fit(p, f.raw.Chain(p)) == stranger
		})
		slices.Sort(v.order)
	}
	builtin := rules.BuiltinChains(name)
	built := rules.NewTable(name)
	built.Grow(len(builtin) + len(v.order))
	for _, chain := range builtin {
		built.Add(f.showChain(name, t, chain))
	}
	for _, chain := range v.order {
		built.Add(f.showChain(name, t, chain))
	}
	return built
}

// showChain returns a chain as iptables-save prints it, for show and build. A chain that
// iptables cannot print because of its priority is shown with its rules; see shifted.
func (f *familyText) showChain(table rules.TableName, t *tableText, name string) rules.Chain {
	p := Place{Table: table, Chain: name}
	c := f.raw.Chain(p)
	if c == nil || f.fit(p, c) == misfit {
		return rules.Chain{Name: name, Policy: "ACCEPT"} // built-in, and missing or a misfit
	}
	chain := rules.Chain{Name: name}
	if fresh, ok := t.fresh[name]; ok {
		chain.Rules = fresh
	} else if shown := t.view.ready.Chain(name); shown != nil {
		chain.Rules = shown.Rules
	}
	if rules.Builtin(table, name) {
		chain.Policy = policyOf(c)
	}
	return chain
}

// policyOf returns iptables' name for the policy of a chain with a built-in chain's name and a
// hook, for showChain.
func policyOf(c *nft.MirrorChain) string {
	if c.Base.Policy == nfAccept {
		return "ACCEPT"
	}
	return "DROP"
}
