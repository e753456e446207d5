package iptables

import (
	"context"
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An xtFamily is the result of one walk through a family's tables: chains, and names of rules,
// whose texts a lexicon may know.
type xtFamily struct {
	digest uint64 // the digest of a probe at that time
	tables []xtTable
}

// An xtTable is a table of an xtFamily.
type xtTable struct {
	name   rules.TableName
	chains []xtChain
	rules  []xtName // one chain's after the other's
}

// An xtChain is a chain; its rules follow those of the chain before it.
type xtChain struct {
	name   string
	start  int  // the offset of jumps to this chain
	end    int  // in the table's rules
	policy int  // the verdict of its last entry; 1 if that is no verdict
	out    bool // left out: the table's rules lack those of this chain
}

// names returns the names of the rules of the i-th chain, none for one that is left out.
func (t *xtTable) names(i int) []xtName {
	first := 0
	if i > 0 {
		first = t.chains[i-1].end
	}
	return t.rules[first:t.chains[i].end]
}

// read walks every listed table and names all rules, except in chains that the budget leaves
// out. Kernel.walk calls it for each full read. The texts of the names are found later (spell).
func (r xtReader) read(ctx context.Context, family rules.Family, l *xtLexicon, b *budget) (xtFamily, error) {
	if err := r.weigh(ctx, family, b); err != nil {
		return xtFamily{}, err
	}
	var found xtFamily
	sum, left := newChecksum(), b.Left()
	err := r.sockets[family].walk(ctx, nil, func(name rules.TableName, info xtInfo, data []byte) error {
		table, err := nameTable(family, name, info, data, l, left)
		found.tables = append(found.tables, table)
		sum.table(info, data)
		return err
	})
	found.digest = sum.value()
	return found, err
}

// nameTable returns the chains of a table and the names of their rules, by which the lexicon
// finds texts. It leaves out the rules of chains in left, and masks bytes that are not
// content. read calls it for each table, and readBack for tried texts. A mark's text is known
// at once.
func nameTable(family rules.Family, name rules.TableName, info xtInfo, data []byte, l *xtLexicon, left map[Place]nft.Weight) (xtTable, error) {
	t := xtTable{name: name}
	if len(left) == 0 {
		t.rules = make([]xtName, 0, info.entries)
	}
	layout, strays, out := xtLayoutOf(family), false, false
	err := walkEntries(family, info, data, xtVisitor{
		chain: func(name string, start int) {
			_, out = left[Place{Table: t.name, Chain: name}]
			t.chains = append(t.chains, xtChain{name: name, start: start, end: len(t.rules), policy: 1, out: out})
		},
		rule: func(r xtRule) {
			if out {
				return
			}
			n := l.name(r)
			if comment, ok := r.mark(layout); ok {
				l.know(n, rules.Rule{Spec: markStart + comment + markEnd})
			}
			t.rules = append(t.rules, n)
		},
		end: func(r xtRule) {
			if len(t.chains) == 0 {
				strays = true
				return
			}
			c := &t.chains[len(t.chains)-1]
			if c.end = len(t.rules); r.entry.isStandard {
				c.policy = r.entry.verdict()
			}
		},
	})
	if err == nil && strays {
		err = fmt.Errorf("%w: table %s begins with rules of no chain", errWalk, name)
	}
	if err != nil {
		return t, err
	}
	t.direct(l)
	return t, t.shapes(family, info, data, l)
}

// shapes notes the facts in the bytes of rules without a known text; nameTable calls it. The
// printed texts are checked against these facts. A rule that cannot have a text, whatever
// iptables prints, is known at once.
func (t *xtTable) shapes(family rules.Family, info xtInfo, data []byte, l *xtLexicon) error {
	if !slices.ContainsFunc(t.rules, func(n xtName) bool { return !l.knows(n.key) }) {
		return nil
	}
	at, chain := -1, -1
	return walkEntries(family, info, data, xtVisitor{
		chain: func(string, int) { chain++ },
		rule: func(r xtRule) {
			if t.chains[chain].out {
				return
			}
			at++
			n := &t.rules[at]
			if l.knows(n.key) {
				return
			}
			n.shape = r.shape(family, n.goal)
			if l.bytes {
				n.shape.keepBytes(r, n.goal)
			}
			if r.entry.indexed() {
				n.shape.content = l.contentOf(r, n.goal)
			}
			if n.shape.odd != "" {
				l.know(*n, n.shape.opaque(n.shape.odd))
			}
		},
	})
}

// direct finds the chains that rules jump to, and makes them part of the rules' keys; nameTable
// calls it. A rule that jumps elsewhere gets no key, so that no text is stored for it.
func (t *xtTable) direct(l *xtLexicon) {
	hashes := make([]xtKey, len(t.chains))
	for i, c := range t.chains {
		hashes[i] = l.hash(toChain(c.name))
	}
	for i := range t.rules {
		n := &t.rules[i]
		if n.jump == 0 {
			continue
		}
		at, found := slices.BinarySearchFunc(t.chains, n.jump, func(c xtChain, offset int) int { return c.start - offset })
		if !found {
			*n = xtName{}
			continue
		}
		if n.goal = t.chains[at].name; n.key != (xtKey{}) {
			n.key = n.key.with(hashes[at])
		}
	}
}

// toChain returns the text that is hashed for a jump to a chain. No verdict has such a name.
func toChain(name string) string { return "to " + name }

// ruleset returns a walked family as iptables-save would print it, if the lexicon knows all
// texts. spell calls it at each read on legacy, and executes iptables-save after false. A chain
// that --max-rules leaves out (out) gets no rules, and a rule that was written by its bytes has
// its opaque text in l.exact. earlier returns a table of the read before, or nil. An unchanged
// chain gets the same slice of rules as there.
func (l *xtLexicon) ruleset(f xtFamily, earlier func(rules.TableName) *rules.Table) (rules.Ruleset, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	set, now := rules.Ruleset{}, l.now()
	for i := range f.tables {
		walked, before := &f.tables[i], earlier(f.tables[i].name)
		built := rules.NewTable(walked.name)
		built.Grow(len(walked.chains))
		for i, c := range walked.chains {
			policy, known := c.policyName(walked.name)
			if !known {
				return nil, false
			}
			if c.out {
				built.Add(rules.Chain{Name: c.name, Policy: policy, Rules: rules.LeftOut(c.name)})
				continue
			}
			list, known := l.rules(walked.names(i), l.exact[Place{Table: walked.name, Chain: c.name}], before.Chain(c.name), now)
			if !known {
				return nil, false
			}
			built.Add(rules.Chain{Name: c.name, Policy: policy, Rules: list})
		}
		if len(built.Chains) != len(walked.chains) {
			return nil, false // two have one name
		}
		set[walked.name] = built
	}
	return set, true
}

// rules returns the texts of a chain's rules, if all of them are known; ruleset calls it. exact
// has the rules that were written by their bytes. If nothing differs from before, the chain's
// last read (nil if none), it returns that slice. Call it locked.
func (l *xtLexicon) rules(names []xtName, exact map[xtKey]rules.Rule, before *rules.Chain, now uint32) ([]rules.Rule, bool) {
	if len(names) == 0 {
		return nil, true
	}
	var list []rules.Rule
	shares := before != nil && len(before.Rules) == len(names)
	for i, n := range names {
		rule, known := l.nameText(n, exact, now)
		if !known {
			return nil, false
		}
		if shares && rule == before.Rules[i] {
			continue
		}
		if list == nil {
			list = make([]rules.Rule, 0, len(names))
			if shares {
				list = append(list, before.Rules[:i]...)
			}
			shares = false
		}
		list = append(list, rule)
	}
	if shares {
		return before.Rules, true
	}
	return list, true
}

// policyName returns a built-in chain's policy, or "" for a user's chain, which ends in RETURN.
// It is false for any other end: then iptables-save has to print the tables.
func (c xtChain) policyName(table rules.TableName) (string, bool) {
	name := verdictName(c.policy)
	if rules.Builtin(table, c.name) {
		return name, name == "ACCEPT" || name == "DROP"
	}
	return "", name == "RETURN"
}
