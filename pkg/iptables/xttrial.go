package iptables

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// maxTextTrials bounds the restores of one trial. All texts together need one. Each refused text
// needs up to twice the number of steps of halving the list.
const maxTextTrials = 64

const (
	saysUntried = "its text may also be that of another rule, and was not tried yet"
	saysAnother = "its text is also that of another rule, which iptables-restore would write"
	saysTwin    = "a rule of other bytes is printed in the same words"
)

// xtMade is the result of iptables-restore for a text.
type xtMade struct {
	content xtKey  // of the rule; zero if there is none
	reason  string // why there is none
	met     uint32 // when it was last needed, in seconds
}

// A textToTry is a text that may lead to other bytes than its rule's.
type textToTry struct {
	table rules.TableName
	rule  rules.Rule
}

// content identifies a rule's bytes without the index of an ipset, because the text has the
// set's name. Trials compare it with the rule that iptables-restore made; zero if it is not
// known.
func (n xtName) content() xtKey {
	if n.key == (xtKey{}) && n.shape != nil {
		return n.shape.content
	}
	return n.key
}

// tryTexts restores printed texts that may be those of other rules, too, and notes the results.
// printWalked calls it, under the xtables lock, with one read as bytes (walked) and as text
// (printed). wasWrong means that a known text was wrong, so that the family is walked again.
func (k *Kernel) tryTexts(ctx context.Context, family rules.Family, walked xtFamily, printed rules.Ruleset) (wasWrong bool) {
	words := k.words[family]
	due := words.untried(walked, printed)
	if len(due) == 0 {
		return false
	}
	t := textTrial{kernel: k, family: family}
	t.try(ctx, due)
	t.remove(ctx, due)
	return words.setMade(t.made)
}

// A textTrial is one trial of texts.
type textTrial struct {
	kernel   *Kernel
	family   rules.Family
	restores int
	made     map[rules.Key]xtMade // by text
}

// try tries texts together. If one is refused, it tries halves. The results are in t.made;
// without a result, a text stays ambiguous, and its rule opaque, until a later read.
func (t *textTrial) try(ctx context.Context, due []textToTry) {
	if t.restores++; t.restores > maxTextTrials || ctx.Err() != nil {
		return // a later read tries them
	}
	tables := map[rules.TableName]*Script{}
	var scripts Scripts
	for _, d := range due {
		if tables[d.table] == nil {
			tables[d.table] = &Script{Table: d.table, Declare: []string{TextChain}}
		}
		tables[d.table].Steps = append(tables[d.table].Steps, Step{Verb: Append, Chain: TextChain, Rule: d.rule})
	}
	for _, name := range slices.Sorted(maps.Keys(tables)) {
		scripts = append(scripts, *tables[name])
	}
	err := t.kernel.restore(ctx, t.family, scripts)
	if err == nil {
		if err = t.readBack(ctx, tables); err == nil {
			return
		}
	}
	if len(due) == 1 {
		t.note(due[0].rule, xtMade{reason: fmt.Sprintf("iptables-restore does not take its text: %v", err)})
		return
	}
	t.try(ctx, due[:len(due)/2])
	t.try(ctx, due[len(due)/2:])
}

// note stores the result of a text, for setMade.
func (t *textTrial) note(rule rules.Rule, made xtMade) {
	if t.made == nil {
		t.made = map[rules.Key]xtMade{}
	}
	t.made[rule.Key()] = made
}

// readBack walks these tables, and notes the rule that iptables-restore made of each text in
// the chain of trials. The error of a chain with another number of rules makes try halve the
// list.
func (t *textTrial) readBack(ctx context.Context, tables map[rules.TableName]*Script) error {
	words := t.kernel.words[t.family]
	tried := func(name rules.TableName) bool { return tables[name] != nil }
	return t.kernel.reader.(xtReader).sockets[t.family].walk(ctx, tried, func(name rules.TableName, info xtInfo, data []byte) error {
		table, err := nameTable(t.family, name, info, data, words, nil)
		if err != nil {
			return err
		}
		at := slices.IndexFunc(table.chains, func(c xtChain) bool { return c.name == TextChain })
		if at < 0 || len(table.names(at)) != len(tables[name].Steps) {
			return fmt.Errorf("the chain of trials in %s does not hold the rules that were written", name)
		}
		for i, n := range table.names(at) {
			t.note(tables[name].Steps[i].Rule, xtMade{content: n.content()})
		}
		return nil
	})
}

// remove removes the chain of trials from the tables of due; tryTexts calls it. After a
// failure, the next trial empties it, and a cleanup removes it.
func (t *textTrial) remove(ctx context.Context, due []textToTry) {
	left := map[rules.TableName]bool{}
	var scripts Scripts
	for _, d := range due {
		if !left[d.table] {
			left[d.table] = true
			scripts = append(scripts, Script{Table: d.table, Declare: []string{TextChain}, Steps: []Step{{Verb: Drop, Chain: TextChain}}})
		}
	}
	if t.kernel.restore(context.WithoutCancel(ctx), t.family, scripts) != nil {
		_ = t.kernel.restore(context.WithoutCancel(ctx), t.family, scripts)
	}
}

// untried returns the printed texts that may also be other rules' texts, each once. tryTexts
// tries them. A refused text is tried again after doubtFor.
func (l *xtLexicon) untried(walked xtFamily, printed rules.Ruleset) []textToTry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var due []textToTry
	seen, now := map[rules.Key]bool{}, l.now()
	for i := range walked.tables {
		t := &walked.tables[i]
		for i, c := range t.chains {
			chain := printed[t.name].Chain(c.name)
			if c.out || c.name == TextChain || chain == nil || len(chain.Rules) != len(t.names(i)) {
				continue
			}
			exact := l.exact[Place{Table: t.name, Chain: c.name}]
			for at, n := range t.names(i) {
				rule := chain.Rules[at]
				if n.shape == nil || seen[rule.Key()] {
					continue
				}
				if _, known := l.nameText(n, exact, now); known || n.shape.agrees(rule) != nil || n.content() == (xtKey{}) {
					continue
				}
				made, tried := l.made[rule.Key()]
				if tried = tried && (made.reason == "" || now < made.met+uint32(doubtFor/time.Second)); !tried && l.mayBeAnothers(n, rule) {
					seen[rule.Key()] = true
					due = append(due, textToTry{table: t.name, rule: rule})
				}
			}
		}
	}
	return due
}

// mayBeAnothers reports whether a text may also be that of a rule with other bytes: then
// untried has it tried. It is false if the Config has no Trials. Call it locked.
func (l *xtLexicon) mayBeAnothers(n xtName, rule rules.Rule) bool {
	same := l.findKey(rule.Key())
	return l.trials && (!n.shape.plain || same != nil && l.differs(same, n))
}

// differs reports whether n is another rule than same, the known rule with n's text. It is not
// if the bytes are equal, or if only revisions of extensions differ, as from another version of
// iptables: then the hash of all else (base) is equal, and that of the revisions (kinds) is not.
// A base of 0 is unknown, and counts as equal. mayBeAnothers then tries the text, and doubtText
// doubts it. l.mu must be held.
func (l *xtLexicon) differs(same *xtWord, n xtName) bool {
	if same.base == 0 || same.key == n.content() {
		return false
	}
	base, kinds := l.hashShape(n.shape)
	return same.base != base || same.kinds == kinds
}

// setMade stores the results of trials, by text; tryTexts calls it. If a text was taken for the
// wrong rule's, setMade forgets it and returns true. The tables are then walked once more.
func (l *xtLexicon) setMade(made map[rules.Key]xtMade) (wasWrong bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, m := range made {
		m.met = l.now()
		l.made[key] = m
		if w := l.findKey(key); w != nil && w.key != m.content {
			w.key, w.rule, w.met, wasWrong = xtKey{}, rules.Rule{}, 0, true
		}
	}
	return wasWrong
}

// doubtText returns the reason why a text that agrees with a rule's shape is not the rule's, or
// "". doubt calls it. It relies on trials, and on other rules with the same text. Call it
// locked.
func (l *xtLexicon) doubtText(n xtName, rule rules.Rule) string {
	if made, tried := l.made[rule.Key()]; tried {
		if made.reason == "" {
			made.met = l.now()
			l.made[rule.Key()] = made
		}
		switch {
		case made.reason != "":
			return made.reason
		case made.content == n.content():
			return ""
		}
		return saysAnother
	}
	if l.trials && !n.shape.plain {
		return saysUntried
	}
	if same := l.findKey(rule.Key()); same != nil && l.differs(same, n) {
		return saysTwin
	}
	return ""
}

// forgetMade drops the texts that were last needed before that second. Call it locked.
func (l *xtLexicon) forgetMade(horizon int64) {
	maps.DeleteFunc(l.made, func(_ rules.Key, m xtMade) bool { return int64(m.met) < horizon })
}
