package iptablestest

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
)

// Save returns the output of iptables-save for family, without the comments with program and
// date. For a table that DropTableFromReads hides it has the remark of iptables-nft-save.
func (f *Fake) Save(family rules.Family) string {
	return f.save(family, func(rules.TableName) bool { return true })
}

// SaveTable returns the output of iptables-save -t, which is empty if the table does not exist.
func (f *Fake) SaveTable(family rules.Family, table rules.TableName) string {
	return f.save(family, func(name rules.TableName) bool { return name == table })
}

func (f *Fake) save(family rules.Family, wanted func(rules.TableName) bool) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var b strings.Builder
	for _, t := range f.ordered(family) {
		switch {
		case !wanted(t.Name):
		case f.unreadable[family.Table(t.Name)] != nil:
			fmt.Fprintf(&b, "# Table `%s' is incompatible, use 'nft' tool.\n", t.Name)
		default:
			b.WriteString(saved(t))
		}
	}
	return b.String()
}

// Tables returns the content of Save, parsed. Callers must not change it.
func (f *Fake) Tables(family rules.Family) rules.Ruleset {
	f.mu.Lock()
	defer f.mu.Unlock()
	set := rules.Ruleset{}
	for _, t := range f.ordered(family) {
		if f.unreadable[family.Table(t.Name)] == nil {
			set[t.Name] = printed(t)
		}
	}
	return set
}

// printed returns the table with every built-in chain: iptables-save prints even chains that
// nf_tables does not have yet.
func printed(t *rules.Table) *rules.Table {
	builtin := rules.BuiltinChains(t.Name)
	if !slices.ContainsFunc(builtin, func(name string) bool { return t.Chain(name) == nil }) {
		return t
	}
	full := rules.NewTable(t.Name)
	full.Grow(len(builtin) + len(t.Chains))
	for _, name := range builtin {
		full.Add(rules.Chain{Name: name, Policy: "ACCEPT"})
	}
	for _, c := range t.Chains {
		full.Add(c)
	}
	return full
}

// saved is iptables-save's text of one table.
func saved(t *rules.Table) string {
	full := printed(t)
	var b strings.Builder
	fmt.Fprintf(&b, "*%s\n", full.Name)
	for _, c := range full.Chains {
		policy := c.Policy
		if policy == "" {
			policy = "-"
		}
		b.WriteString(":" + c.Name + " " + policy + " [0:0]\n")
	}
	for _, c := range full.Chains {
		for _, r := range c.Rules {
			b.WriteString(strings.TrimRight("-A "+c.Name+" "+r.Spec, " ") + "\n")
		}
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

// sorted returns the table with the built-in chains first, in the kernel's order, and the others
// by name, as both backends print them.
func sorted(t *rules.Table) *rules.Table {
	order := rules.BuiltinChains(t.Name)
	rank := func(c rules.Chain) int {
		if i := slices.Index(order, c.Name); i >= 0 {
			return i
		}
		return len(order)
	}
	before := func(a, b rules.Chain) int {
		return cmp.Or(rank(a)-rank(b), strings.Compare(a.Name, b.Name))
	}
	if slices.IsSortedFunc(t.Chains, before) {
		return t
	}
	c := copyOf(t)
	slices.SortFunc(c.Chains, before)
	return copyOf(c)
}

// copyOf returns a table with the same chains. The rules are the same memory.
func copyOf(t *rules.Table) *rules.Table {
	c := rules.NewTable(t.Name)
	c.Grow(len(t.Chains))
	for _, chain := range t.Chains {
		c.Add(chain)
	}
	return c
}
