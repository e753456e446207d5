// Package rules holds a complete set of firewall rules as a value: it parses, compares, renders
// and digests rules. It does no I/O and reads no clock.
//
// The way through it:
//
//   - The tables of one family are a [Ruleset] of [Table], [Chain] and [Rule]; pkg/iptables reads
//     them from the kernel. [ParseFragment] reads an operator's declared rules.
//   - A [Protection] says which chains are protected, and extracts a [Section] of a table: the
//     protected chains and the jumps into them.
//   - Sections by table are a [Generation], the complete set of rules that ought to be in force.
//     Its ID is a digest.
//   - [Diff] lists the differences between two sections. [Rule.Equal] reports whether two rules
//     mean the same, however they are spelled. [Render] writes text for iptables-restore.
//   - [Generation.NatHooks] has the nat rules through which package nat takes a flow's first
//     packet.
//
// Everything is a value. Chains and rules are shared between values and never changed in place. So
// an unchanged part is the same memory, and comparing it costs next to nothing. Values may be read
// by many goroutines at a time. The chains of NatHooks remember results: they are for one goroutine
// at a time.
//
// A text that does not follow the format is a [*ParseError]. A rule whose text may not be
// written back unchanged is opaque, which is no error. It keeps its place in the chain and is
// compared, and [Render] leaves it out.
package rules

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Family is a family of tables. iptables has tables in IPv4 and IPv6.
type Family = tableid.Family

// The IP families. Every loop over the families uses this order.
const (
	IPv4 = tableid.IPv4
	IPv6 = tableid.IPv6
)

// Families returns both families in their fixed order.
func Families() []Family { return []Family{IPv4, IPv6} }

// A TableID names a table of a family.
type TableID = tableid.TableID

// A TableName names any of iptables' five tables.
type TableName = string

// The tables of iptables.
const (
	Mangle   TableName = "mangle"
	Nat      TableName = "nat"
	Filter   TableName = "filter"
	Raw      TableName = "raw"
	Security TableName = "security"
)

// AllTables returns the five tables of iptables.
func AllTables() []TableName { return []TableName{Raw, Mangle, Nat, Filter, Security} }

// The built-in chains of each table. INPUT in nat exists since Linux 2.6.36.
var builtin = map[TableName][]string{
	Raw:      {"PREROUTING", "OUTPUT"},
	Mangle:   {"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"},
	Nat:      {"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"},
	Filter:   {"INPUT", "FORWARD", "OUTPUT"},
	Security: {"INPUT", "FORWARD", "OUTPUT"},
}

// Builtin reports whether table has a built-in chain of that name.
func Builtin(table TableName, chain string) bool {
	return slices.Contains(builtin[table], chain)
}

// isBuiltinName reports whether a table has a built-in chain of that name: mangle has all five.
func isBuiltinName(chain string) bool { return Builtin(Mangle, chain) }

// BuiltinChains returns table's built-in chains in the order of netfilter's hooks.
func BuiltinChains(table TableName) []string { return slices.Clone(builtin[table]) }

// A Rule is one rule without its chain: the text behind "-A CHAIN " in the output of
// iptables-save, without counters.
type Rule struct {
	// Spec is the rule's text in iptables' own quoting.
	Spec string
	// Target is the operand of -j or -g: an extension, a verdict or a chain. It is empty for a
	// rule that only counts.
	Target string
}

// A Chain is a named list of rules. Policy is empty for a chain that is not built in.
type Chain struct {
	Name   string
	Policy string
	Rules  []Rule
}

// ChainNames returns the names of chains, in their order; nil if there are none.
func ChainNames(chains []Chain) []string {
	names := slices.Grow([]string(nil), len(chains))
	for _, c := range chains {
		names = append(names, c.Name)
	}
	return names
}

// A Table holds chains in the order in which they were read.
type Table struct {
	Name   TableName
	Chains []Chain
	index  map[string]int
}

// NewTable returns an empty table.
func NewTable(name TableName) *Table {
	return &Table{Name: name, index: map[string]int{}}
}

// Grow makes room for n more chains at once. Readers of tables call it before they add
// chains.
func (t *Table) Grow(n int) {
	t.Chains = slices.Grow(t.Chains, n)
	if len(t.index) == 0 {
		t.index = make(map[string]int, n)
	}
}

// With returns a copy of the table in which these chains replace those of the same names.
// Chains with other names are ignored. The copy shares the index with t: after With, neither
// of them may get or lose a chain.
func (t *Table) With(chains ...Chain) *Table {
	changed := &Table{Name: t.Name, Chains: slices.Clone(t.Chains), index: t.index}
	for _, c := range chains {
		if i, ok := t.index[c.Name]; ok {
			changed.Chains[i] = c
		}
	}
	return changed
}

// Chain returns the chain of that name; nil if there is none or t is nil. The pointer is
// valid until the next Add.
func (t *Table) Chain(name string) *Chain {
	if t == nil {
		return nil
	}
	i, ok := t.index[name]
	if !ok {
		return nil
	}
	return &t.Chains[i]
}

// Rules returns the rules of the chain of that name; nil if there is no such chain or t is
// nil.
func (t *Table) Rules(chain string) []Rule {
	if c := t.Chain(chain); c != nil {
		return c.Rules
	}
	return nil
}

// Add appends chain c, or replaces the chain of that name, and returns it. The pointer is
// valid until the next Add.
func (t *Table) Add(c Chain) *Chain {
	if i, ok := t.index[c.Name]; ok {
		t.Chains[i] = c
		return &t.Chains[i]
	}
	t.index[c.Name] = len(t.Chains)
	t.Chains = append(t.Chains, c)
	return &t.Chains[len(t.Chains)-1]
}

// RuleCount returns how many rules the table holds; 0 for a nil table.
func (t *Table) RuleCount() int {
	n := 0
	if t != nil {
		for i := range t.Chains {
			n += len(t.Chains[i].Rules)
		}
	}
	return n
}

// A Ruleset holds one family's tables by name, without the tables that do not exist.
type Ruleset map[TableName]*Table
