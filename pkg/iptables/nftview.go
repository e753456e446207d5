package iptables

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A tableView is a mirrored table as Snapshots show it. It is kept from one
// Snapshot to the next: at 5,000 services it takes ten times as long to build as
// what changed takes to read. The zero value is a table to be built.
type tableView struct {
	ready    *rules.Table // as it was last shown
	touched  []string     // chains of ready that say something else since
	reshaped bool         // other chains exist than in ready
	order    []string     // the names of the user's chains, sorted; nil if not known
}

// touch notes that a chain has other rules.
func (v *tableView) touch(chain string) {
	if v.ready != nil && !v.reshaped {
		v.touched = append(v.touched, chain)
	}
}

// added notes that a chain exists that did not.
func (v *tableView) added(table rules.TableName, chain nft.Chain) {
	v.reshaped, v.touched = true, nil
	name := chain.Name
	if v.order == nil || chain.Base || rules.Builtin(table, name) {
		return
	}
	if at, found := slices.BinarySearch(v.order, name); !found {
		v.order = slices.Insert(v.order, at, name)
	}
}

// removed notes that a chain exists no more.
func (v *tableView) removed(chain string) {
	v.reshaped, v.touched = true, nil
	if at, found := slices.BinarySearch(v.order, chain); found {
		v.order = slices.Delete(v.order, at, at+1)
	}
}

// table returns the table to show.
func (v *tableView) table(t *mirrorTable) *rules.Table {
	switch {
	case v.ready == nil || v.reshaped:
		v.ready = v.build(t)
	case len(v.touched) > 0:
		changed := make([]rules.Chain, len(v.touched))
		for i, name := range v.touched {
			changed[i] = t.show(name)
		}
		v.ready = v.ready.With(changed...)
	}
	v.reshaped, v.touched = false, nil
	return v.ready
}

// build builds the table anew. Chains stand as iptables-save prints them: the
// built-in ones, those that do not exist too, and the user's by name.
func (v *tableView) build(t *mirrorTable) *rules.Table {
	if v.order == nil {
		v.order = make([]string, 0, len(t.chains))
		for name, c := range t.chains {
			if !t.odd(name, c) && !rules.Builtin(t.name, name) {
				v.order = append(v.order, name)
			}
		}
		slices.Sort(v.order)
	}
	builtin := rules.BuiltinChains(t.name)
	built := rules.NewTable(t.name)
	built.Grow(len(builtin) + len(v.order))
	for _, name := range builtin {
		built.Add(t.show(name))
	}
	for _, name := range v.order {
		built.Add(t.show(name))
	}
	return built
}

// show returns a chain as iptables-save prints it.
func (t *mirrorTable) show(name string) rules.Chain {
	c := t.chains[name]
	if c == nil || t.odd(name, c) {
		return rules.Chain{Name: name, Policy: "ACCEPT"} // built-in, and not there
	}
	chain := rules.Chain{Name: name, Rules: c.rules}
	if rules.Builtin(t.name, name) {
		chain.Policy = c.policy()
	}
	return chain
}
