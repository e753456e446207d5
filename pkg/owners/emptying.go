package owners

import "slices"

// An Emptying is a habit of a chain's owner: whether it leaves the chain without a rule while other
// rules lead to it.
type Emptying int

// The habits.
const (
	// EmptyOften: the last rule of the chain may go by name, or the chain is the operator's own. It
	// is also the habit of an owner that is not known, as of a chain that only a glob names.
	EmptyOften Emptying = iota
	// EmptyBriefly: the owner flushes the chain, and fills or deletes it by a later command.
	EmptyBriefly
	// EmptyUnreferenced: the owner empties the chain only after it has deleted all jumps to it, or
	// in the same transaction.
	EmptyUnreferenced
	// EmptyNever: the owner never leaves the chain empty, whatever leads to it.
	EmptyNever
)

// EmptyingOf returns the habit of the owner of a chain of an iptables' table. The chain need not
// have the exact form of its owner's names: a glob may have named it. A single name counts before a
// form that it has too.
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
