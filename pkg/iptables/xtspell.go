package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// This file has iptables-legacy print rules with unknown texts, and compares the output with the
// bytes.

// spellTries bounds the attempts to print a family while another process writes. A Session
// excludes a writer that takes the lock.
const spellTries = 3

// spellOut returns the walked family as a Snapshot, with the text that iptables prints now.
// spell calls it if a text is not known. It learns the text if the xtables lock is held
// (locked). It walks again while other processes write.
func (k *Kernel) spellOut(ctx context.Context, family rules.Family, seen xtFamily, locked bool) (Snapshot, error) {
	words := k.words[family]
	for try := 1; ; try++ {
		set, agreed, failed := k.printWalked(ctx, family, seen, locked)
		if errors.Is(failed, errForgotten) { // walk once more
			var err error
			if seen, err = k.walk(ctx, family); err != nil {
				return Snapshot{}, err
			}
			set, agreed, failed = k.printWalked(ctx, family, seen, false)
		}
		// The digest is read alone, because naming every rule once more would take as much
		// memory again.
		digest, err := k.reader.digest(ctx, family)
		if err != nil {
			return Snapshot{}, errors.Join(failed, err)
		}
		still := digest == seen.digest
		// iptables refuses to print a chain that its owner has removed since the walk.
		if failed != nil && (still || try == spellTries || ctx.Err() != nil) {
			return Snapshot{}, failed
		}
		if still && locked && try == 1 { // else another process ignores the lock
			words.learn(seen, set)
		}
		// While a writer never rests, a text that agrees with all bytes was true at that time.
		// The next look at the digest finds out.
		if still || try == spellTries && agreed {
			k.cache.put(family, set, time.Now())
			return Snapshot{Family: family, Tables: set, Unreadable: map[rules.TableName]error{}, Digest: seen.digest}, nil
		}
		if try == spellTries {
			return Snapshot{}, fmt.Errorf("the %v tables changed all the time while they were read", family)
		}
		if seen, err = k.walk(ctx, family); err != nil {
			return Snapshot{}, err
		}
	}
}

// errForgotten: a trial showed that a known text is another rule's, so that canaryd forgot the
// text.
var errForgotten = errors.New("a known text is another rule's")

// printWalked returns the walked family with the texts that iptables prints of it, for
// spellOut. A rule with a different text is opaque, and then agreed is false. With tries it
// tries ambiguous texts, which may be another rule's; errForgotten then requires another walk.
func (k *Kernel) printWalked(ctx context.Context, family rules.Family, walked xtFamily, tries bool) (set rules.Ruleset, agreed bool, err error) {
	words := k.words[family]
	verify := func(printed rules.Ruleset) (rules.Ruleset, bool, error) {
		if tries && k.tryTexts(ctx, family, walked, printed) {
			return nil, false, errForgotten
		}
		set, agreed := words.verify(walked, printed)
		return set, agreed, nil
	}
	printed, unreadable, err := k.save(ctx, family)
	var broken *rules.ParseError
	if err != nil && !errors.As(err, &broken) {
		return nil, false, err
	}
	if err == nil && len(unreadable) == 0 && fitsLines(walked, printed) {
		return verify(printed)
	}
	// A rule is printed over several lines, or the rules have changed.
	if printed, err = k.printUnknown(ctx, family, walked); err != nil {
		return nil, false, err
	}
	return verify(printed)
}

// fitsLines reports whether each chain has as many printed lines as rules. Each rule takes at
// least one line, so then it has exactly one, and printWalked uses the output. Otherwise each
// unknown rule is printed alone.
func fitsLines(walked xtFamily, printed rules.Ruleset) bool {
	if len(walked.tables) != len(printed) {
		return false
	}
	for i := range walked.tables {
		t := &walked.tables[i]
		table := printed[t.name]
		if table == nil || len(table.Chains) != len(t.chains) {
			return false
		}
		for i, c := range t.chains {
			if chain := table.Chain(c.name); chain == nil || !c.out && len(chain.Rules) != len(t.names(i)) {
				return false
			}
		}
	}
	return true
}

// printUnknown has each rule without a known text printed alone, for printWalked. The other
// rules stay empty: verify puts their known texts in.
func (k *Kernel) printUnknown(ctx context.Context, family rules.Family, walked xtFamily) (rules.Ruleset, error) {
	set := rules.Ruleset{}
	for i := range walked.tables {
		t := &walked.tables[i]
		built := rules.NewTable(t.name)
		var unknown []ruleAt
		for i, c := range t.chains {
			policy, _ := c.policyName(t.name) // as iptables prints it
			if c.out {
				built.Add(rules.Chain{Name: c.name, Policy: policy, Rules: rules.LeftOut(c.name)})
				continue
			}
			names := t.names(i)
			built.Add(rules.Chain{Name: c.name, Policy: policy, Rules: make([]rules.Rule, len(names))})
			unknown = append(unknown, k.words[family].unknown(Place{Table: t.name, Chain: c.name}, names)...)
		}
		err := k.printer().print(ctx, family, t.name, unknown, func(at ruleAt, rule rules.Rule, err error) {
			if err != nil {
				rule = rules.OpaqueRule(nil, "", err.Error())
			}
			built.Chain(at.chain).Rules[at.index] = rule
		})
		if err != nil {
			return nil, err
		}
		set[t.name] = built
	}
	return set, nil
}

// unknown returns the places of a chain's rules without a known text, for printUnknown.
func (l *xtLexicon) unknown(place Place, names []xtName) (unknown []ruleAt) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now, exact := l.now(), l.exact[place]
	for i, n := range names {
		if _, known := l.nameText(n, exact, now); !known {
			unknown = append(unknown, ruleAt{place.Chain, i})
		}
	}
	return unknown
}

// nameText returns the text of a rule if it is known, or its opaque form if it certainly has
// none. It is false if iptables has to print the rule. exact has the rules of its chain that
// were written by their bytes. Call it locked.
func (l *xtLexicon) nameText(n xtName, exact map[xtKey]rules.Rule, now uint32) (rules.Rule, bool) {
	if n.key == (xtKey{}) && n.shape != nil && n.shape.odd != "" {
		return n.shape.opaque(n.shape.odd), true
	}
	if rule, wrote := exact[n.key]; wrote {
		return rule, true
	}
	return l.rule(n.key, now)
}

// verify compares the printed rules with the walked ones, for printWalked. For each rule it
// returns the known text, or the printed one if the bytes agree with it. Otherwise the rule is
// opaque, and agreed is false. It changes the chains of printed.
func (l *xtLexicon) verify(walked xtFamily, printed rules.Ruleset) (set rules.Ruleset, agreed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	set, agreed = rules.Ruleset{}, true
	now := l.now()
	for i := range walked.tables {
		t := &walked.tables[i]
		table := printed[t.name]
		for i, c := range t.chains {
			names, chain := t.names(i), table.Chain(c.name)
			if c.out {
				chain.Rules = rules.LeftOut(c.name)
				continue
			}
			list, exact := chain.Rules, l.exact[Place{Table: t.name, Chain: c.name}]
			for at, n := range names {
				rule, known := l.nameText(n, exact, now)
				if !known {
					rule = chain.Rules[at]
					if reason := l.doubt(n, rule); reason != "" {
						agreed = false
						rule = n.opaque(reason)
					}
				}
				if rule == list[at] {
					continue
				}
				if len(list) > 0 && &list[0] == &chain.Rules[0] {
					list = slices.Clone(list)
				}
				list[at] = rule
			}
			chain.Rules = list
		}
		set[t.name] = table
	}
	return set, agreed
}

// opaque returns the rule without a text, for that reason. verify shows it in place of a
// doubted text.
func (n xtName) opaque(reason string) rules.Rule {
	if n.shape == nil {
		return rules.OpaqueRule([]byte(fmt.Sprint(n.key)), n.goal, reason)
	}
	return n.shape.opaque(reason)
}
