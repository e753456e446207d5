package owners

import (
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// exact has the owner of each chain with a single name. If two rows have the name, the first
// counts.
var exact = func() map[string]*Owner {
	all := map[string]*Owner{}
	for i := range table {
		for _, c := range table[i].Chains {
			for _, f := range c.Names {
				if name, single := f.Exact(); single && all[name] == nil {
					all[name] = &table[i]
				}
			}
		}
	}
	return all
}()

// A formOf is a hash or a glob of an owner's chains.
type formOf struct {
	Form
	owner *Owner
}

// inexact are the forms of all chains without a single name, in the order of the table.
var inexact = func() (all []formOf) {
	for i := range table {
		for _, c := range table[i].Chains {
			for _, f := range c.Names {
				if _, single := f.Exact(); !single {
					all = append(all, formOf{f, &table[i]})
				}
			}
		}
	}
	return all
}()

// OfChain returns the owner of a chain of iptables with that name; false if none is known.
// Status shows owners by it, and --protect words are proposed by it.
func OfChain(chain string) (Owner, bool) {
	if o := exact[chain]; o != nil {
		return *o, true
	}
	for i := range inexact {
		if f := &inexact[i]; strings.HasPrefix(chain, f.start) && f.Matches(chain) {
			return *f.owner, true
		}
	}
	return Owner{}, false
}

// OfRule returns the owner that itself writes a rule with these words into a built-in chain;
// false if none is known. Status shows owners by it.
func OfRule(inTable, chain string, words []string) (Owner, bool) {
	for _, o := range table {
		if slices.ContainsFunc(o.Straight, func(s Straight) bool { return s.Matches(inTable, chain, words) }) {
			return o, true
		}
	}
	return Owner{}, false
}

// OfTable returns the owner of a native table, for status and detection; false if none is
// known.
func OfTable(id tableid.TableID) (Owner, bool) {
	for _, o := range table {
		if slices.ContainsFunc(o.Tables, func(t Table) bool { return t.Name == id.Name && slices.Contains(t.Families, id.Family) }) {
			return o, true
		}
	}
	return Owner{}, false
}

// WordFor returns the word of --protect that names a chain of the owner: its preset, or else
// the form of the chain's name. It is "" for a chain of another owner.
func (o Owner) WordFor(chain string) string {
	if o.Preset != "" {
		return o.Preset
	}
	for _, c := range o.Chains {
		for _, f := range c.Names {
			if f.Matches(chain) && f.alphabet == "" {
				return f.text
			}
		}
	}
	return ""
}

// ManagerOf returns the title of the firewall manager that writes a chain of that name; ""
// if it is not known. Such chains do not count as unguarded.
func ManagerOf(chain string) string {
	for _, m := range managers {
		if slices.ContainsFunc(m.chains, func(f Form) bool { return f.Matches(chain) }) {
			return m.title
		}
	}
	return ""
}

// ManagerOfRule returns the firewall manager that itself writes a rule with these words into
// a built-in chain; "" if it is not known. Most forms of such rules could be from any
// program. They only count if the built-in chain leads to chains of that manager, whose
// title is then in leads.
func ManagerOfRule(inTable, chain string, words []string, leads map[string]bool) string {
	for _, m := range managers {
		for _, s := range m.straight {
			if (s.Comment != "" || leads[m.title]) && s.Matches(inTable, chain, words) {
				return m.title
			}
		}
	}
	return ""
}

// ManagerOfTable returns the title of the firewall manager that writes a native table of
// that name; "" if it is not known. Status does not list such a table as unguarded.
func ManagerOfTable(name string) string {
	for _, m := range managers {
		if slices.Contains(m.tables, name) {
			return m.title
		}
	}
	return ""
}
