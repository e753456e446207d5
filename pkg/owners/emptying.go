package owners

import "slices"

// An Emptying is a habit of a chain's owner: whether it leaves the chain without a rule while
// other rules lead to it.
type Emptying int

// The habits.
const (
	// EmptyOften: the owner may delete the last rule of the chain by name, or the chain is the
	// operator's own. It is also the habit of an unknown owner, such as for a chain that only a
	// glob names.
	EmptyOften Emptying = iota
	// EmptyBriefly: the owner flushes the chain, and a later command fills or deletes it.
	EmptyBriefly
	// EmptyUnreferenced: the owner empties the chain only after it has deleted all jumps to it, or
	// in the same transaction.
	EmptyUnreferenced
	// EmptyNever: the owner never leaves the chain empty, even if nothing leads to it.
	EmptyNever
)

// EmptyingOf returns the habit of the owner of a chain in a table of iptables, for the
// verdict on an emptied chain. The name may deviate from the exact form of its owner's
// names, because a glob may have named it. A single name has priority over a form.
func EmptyingOf(inTable, chain string) Emptying {
	for _, fits := range []func(Form) bool{
		func(f Form) bool { name, ok := f.Exact(); return ok && name == chain },
		func(f Form) bool { return f.resembles(chain) },
	} {
		for _, o := range table {
			for _, c := range o.Chains {
				if slices.ContainsFunc(c.Names, fits) {
					if slices.Contains(c.In, inTable) {
						return c.Emptied
					}
					return EmptyOften
				}
			}
		}
	}
	return EmptyOften
}
