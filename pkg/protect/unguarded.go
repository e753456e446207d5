package protect

import (
	"strings"

	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An Unguarded is a chain of iptables' tables that nothing guards, or a single such rule of a
// built-in chain. detect lists them, and the daemon counts the same ones.
type Unguarded struct {
	Chain  string     // the chain, or the built-in chain of the rule
	Single bool       // it is the rule
	Rule   rules.Rule // if Single
	// Rules counts the rules of the chain. LeftOut: there were too many to read.
	Rules   int
	LeftOut bool
	// Owner is the likely owner's title in the table of owners, and Manager is the firewall
	// manager; "" if unknown.
	Owner, Manager string
}

// UnguardedIn returns the chains and rules of a table that nothing guards, in the table's
// order, for status and canaryd detect. A rule that leads into such a chain belongs to the
// chain. Chains without a rule count if a built-in chain leads to them. Canaries of owners
// are never guarded.
func UnguardedIn(others rules.Others, t *rules.Table) []Unguarded {
	var found []Unguarded
	at := map[string]int{} // chains
	chain := func(name string) *Unguarded {
		i, known := at[name]
		if !known {
			i, at[name] = len(found), len(found)
			u := Unguarded{Chain: name}
			u.Owner, u.Manager = ofChain(name)
			found = append(found, u)
		}
		return &found[i]
	}
	var of *rules.Chain
	var managers map[string]bool // with chains to which the built-in chain leads
	for c, r := range others.Rules() {
		builtin := rules.Builtin(t.Name, c.Name)
		switch {
		case strings.HasSuffix(c.Name, canarySuffix):
			continue
		case !builtin && r.LeftOut():
			chain(c.Name).LeftOut = true
			continue
		case !builtin:
			chain(c.Name).Rules++
			continue
		case r.Target != "" && t.Chain(r.Target) != nil && !others.Guards(r.Target):
			if !strings.HasSuffix(r.Target, canarySuffix) {
				chain(r.Target)
			}
			continue
		}
		if c != of {
			of, managers = c, managersIn(c)
		}
		u := single(t.Name, c.Name, r, managers)
		if r.Target != "" && t.Chain(r.Target) != nil { // protected rules lead there, too
			u.Owner, u.Manager = ofChain(r.Target)
		}
		found = append(found, u)
	}
	return found
}

// ofChain returns the title of a chain's likely owner, or the firewall manager; "" if
// unknown.
func ofChain(name string) (owner, manager string) {
	if o, known := owners.OfChain(name); known {
		return o.Title, ""
	}
	return "", owners.ManagerOf(name)
}

// single returns a rule of a built-in chain with its likely owner, for UnguardedIn. managers
// are the firewall managers to whose chains that chain leads.
func single(t rules.TableName, chain string, r rules.Rule, managers map[string]bool) Unguarded {
	u := Unguarded{Chain: chain, Single: true, Rule: r}
	text, readable := r.Readable()
	words, err := rules.Split(text)
	if !readable || err != nil {
		return u
	}
	if o, known := owners.OfRule(t, chain, words); known {
		u.Owner = o.Title
	} else {
		u.Manager = owners.ManagerOfRule(t, chain, words, managers)
	}
	return u
}

// managersIn returns the titles of the firewall managers to whose chains a built-in chain
// leads. UnguardedIn takes bare rules next to them for theirs.
func managersIn(c *rules.Chain) map[string]bool {
	found := map[string]bool{}
	for _, r := range c.Rules {
		if title := owners.ManagerOf(r.Target); title != "" {
			found[title] = true
		}
	}
	return found
}

// Counts reports whether the chain or rule counts as unguarded. canaryd does not guard rules of
// a firewall manager on purpose, because their manager writes them again itself.
func (u Unguarded) Counts() bool { return u.Manager == "" }

// CountUnguarded counts chains, and single rules of built-in chains, for status and canaryd
// detect. Rules and chains of firewall managers do not count.
func CountUnguarded(list []Unguarded) (chains, single int) {
	for _, u := range list {
		switch {
		case !u.Counts():
		case u.Single:
			single++
		default:
			chains++
		}
	}
	return chains, single
}
