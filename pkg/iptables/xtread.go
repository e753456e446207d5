package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An xtTable is a table as one walk has read it.
type xtTable struct {
	name   rules.TableName
	chains []xtChain
	rules  []nft.RuleID // one chain's after the other's, by the numbers of the lexicon
}

// An xtChain is a chain; its rules follow those of the chain before it.
type xtChain struct {
	name   string
	start  int  // the offset of jumps to this chain
	end    int  // in the table's rules
	policy int  // the verdict of its last entry; 1 if that is no verdict
	out    bool // left out: the table's rules lack those of this chain
}

// setTries bounds the walks of a family whose rules name ipsets, while another process writes.
const setTries = 3

// walk reads a family from x_tables. It executes nothing. The name of an ipset is certain only
// while its rule is in the table. So walk reads again if the tables changed while it asked for
// names.
func (k *Kernel) walk(ctx context.Context, family rules.Family) (Snapshot, error) {
	l := k.source[family]
	l.turn.Lock()
	defer l.turn.Unlock()
	for range setTries {
		names := &readNames{index: k.sets}
		tables, digest, err := k.reader.(xtReader).read(ctx, family, l, names, k.budgets[family])
		if err != nil {
			return Snapshot{}, err
		}
		if len(names.known) > 0 {
			if now, err := k.reader.digest(ctx, family); err != nil {
				return Snapshot{}, err
			} else if now != digest {
				continue
			}
		}
		shed := k.budgets[family].Shed()
		if shed { // the cache and the lexicon have rules that are left out by now
			k.cache.drop(family)
		}
		set, unreadable := l.show(tables, k.cache.known(family))
		l.tidy(tables, shed)
		k.cache.put(family, set, time.Now())
		return Snapshot{Family: family, Tables: set, Unreadable: unreadable, Digest: digest}, nil
	}
	return Snapshot{}, fmt.Errorf("the %v tables changed all the time while they were read", family)
}

// readNames are the names of ipsets for one read.
type readNames struct {
	index setIndex
	known map[uint16]string
}

// name implements setNamer.
func (r *readNames) name(number uint16) (string, error) {
	if name, asked := r.known[number]; asked {
		return name, nil
	}
	name, err := r.index.name(number)
	if err == nil {
		if r.known == nil {
			r.known = map[uint16]string{}
		}
		r.known[number] = name
	}
	return name, err
}

// read walks every listed table and numbers all rules, except in chains that the budget leaves
// out. It returns the digest of a probe at that time. Kernel.walk calls it.
func (r xtReader) read(ctx context.Context, family rules.Family, l *lexicon, names setNamer, b *budget) ([]xtTable, uint64, error) {
	if err := r.weigh(ctx, family, b); err != nil {
		return nil, 0, err
	}
	var found []xtTable
	sum, left := newChecksum(), b.Left()
	err := r.sockets[family].walk(ctx, nil, func(name rules.TableName, info xtInfo, data []byte) error {
		table, err := readTable(name, info, data, l, names, left)
		found = append(found, table)
		sum.table(info, data)
		return err
	})
	return found, sum.value(), err
}

// readTable returns the chains of a table and the numbers of their rules. It leaves out the
// rules of chains in left, and masks bytes that are not content. An error wraps errWalk.
func readTable(name rules.TableName, info xtInfo, data []byte, l *lexicon, names setNamer, left map[Place]nft.Weight) (xtTable, error) {
	t, strays, count := xtTable{name: name}, false, 0
	err := walkEntries(l.family, info, data, xtVisitor{
		chain: func(name string, start int) {
			_, out := left[Place{Table: t.name, Chain: name}]
			t.chains = append(t.chains, xtChain{name: name, start: start, end: count, policy: 1, out: out})
		},
		rule: func(xtRule) {
			if n := len(t.chains); n > 0 && !t.chains[n-1].out {
				count++
			}
		},
		end: func(r xtRule) {
			if len(t.chains) == 0 {
				strays = true
				return
			}
			c := &t.chains[len(t.chains)-1]
			if c.end = count; r.entry.isStandard {
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
	return t, t.number(info, data, l, names, count)
}

// number takes the table's rules into the lexicon, when the offsets of all chains are known.
func (t *xtTable) number(info xtInfo, data []byte, l *lexicon, names setNamer, count int) error {
	t.rules = make([]nft.RuleID, 0, count)
	entries, chain := rawEntries{layout: xtLayoutOf(l.family)}, -1
	var failed error
	err := walkEntries(l.family, info, data, xtVisitor{
		chain: func(string, int) { chain++ },
		rule: func(r xtRule) {
			if chain < 0 || t.chains[chain].out || failed != nil {
				return
			}
			id, err := l.internBy(entries.rule(r, t.goal(r)), names)
			failed, t.rules = err, append(t.rules, id)
		},
	})
	return errors.Join(err, failed)
}

// goal returns the chain that a rule jumps to, or "".
func (t *xtTable) goal(r xtRule) string {
	if !r.target || !r.entry.isStandard || r.entry.verdict() < 0 {
		return ""
	}
	at, found := slices.BinarySearchFunc(t.chains, r.entry.verdict(), func(c xtChain, offset int) int { return c.start - offset })
	if !found {
		return ""
	}
	return t.chains[at].name
}

// errUnprintable: iptables makes no such table.
var errUnprintable = errors.New("the table has a chain with another end, or two chains of one name")

// show returns tables as iptables-save would print them, and the tables that it would not print,
// with the reasons. A chain that --max-rules leaves out has no rules. earlier returns a table of
// the read before, or nil. An unchanged chain has the same slice of rules as there.
func (l *lexicon) show(tables []xtTable, earlier func(rules.TableName) *rules.Table) (rules.Ruleset, map[rules.TableName]error) {
	set, unreadable := rules.Ruleset{}, map[rules.TableName]error{}
	for i := range tables {
		walked, before := &tables[i], earlier(tables[i].name)
		built, plain, first := rules.NewTable(walked.name), true, 0
		built.Grow(len(walked.chains))
		for _, c := range walked.chains {
			policy, known := c.policyName(walked.name)
			chain := rules.Chain{Name: c.name, Policy: policy, Rules: rules.LeftOut(c.name)}
			if !c.out {
				chain.Rules = l.texts(walked.rules[first:c.end], before.Chain(c.name))
			}
			built.Add(chain)
			plain, first = plain && known, c.end
		}
		if !plain || len(built.Chains) != len(walked.chains) {
			unreadable[walked.name] = errUnprintable
			continue
		}
		set[walked.name] = built
	}
	return set, unreadable
}

// tidy notes which rules are in force, and forgets rules that are not needed any more. forGood
// says that the rules that are not in force any more were left out.
func (l *lexicon) tidy(tables []xtTable, forGood bool) {
	l.Release(l.inForce, forGood)
	l.inForce = l.inForce[:0]
	for i := range tables {
		l.inForce = append(l.inForce, tables[i].rules...)
	}
	held := []*[]nft.RuleID{&l.inForce}
	if forGood {
		l.Purge(held)
	} else if l.crowded() {
		l.forget(held)
	}
}

// policyName returns a built-in chain's policy, or "" for a user's chain, which ends in RETURN.
// It is false for any other end, with which iptables makes no chain.
func (c xtChain) policyName(table rules.TableName) (string, bool) {
	name := verdictName(c.policy)
	if rules.Builtin(table, c.name) {
		return name, name == "ACCEPT" || name == "DROP"
	}
	return "", name == "RETURN"
}
