package iptables

import (
	"hash/maphash"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/ruleset"
)

// A lexicon translates between rules as nf_tables holds them and rules as values. pkg/ruleset
// spells the rules of kube-proxy, CNI plugins, Docker and host firewalls. A rule that it cannot
// spell has the text that iptables-restore made it of, if this Kernel had that done (see teach),
// and else it is opaque: its bytes are all that is needed to know it and to write it again. It may
// be used concurrently.
//
// It implements nft.Rulebook for the mirror.
type lexicon struct {
	family  rules.Family
	mu      sync.RWMutex
	start   time.Time // entry.left counts from it
	store   nft.RuleStore
	entries []entry   // by nft.RuleID; 0 is none
	byKey   nft.Index // of rules' numbers
	// written are the rules whose texts iptables-restore wrote to the chain of texts.
	written map[rules.Key]nft.RuleID
	// revealed counts the opaque rules that got a text after they were met.
	revealed atomic.Uint64
	seed     maphash.Seed
	small    int           // how many entries there were when it was last tidied up
	sets     setIndex      // nil: rules that name ipsets are known by numbers
	named    atomic.Uint64 // how often a rule with the number of an ipset was met
	// earlier has the rules that were met before canaryd started; nil if none are kept. recalled is
	// when they were met last; recalling guards it.
	earlier   Earlier
	recalling sync.Mutex
	recalled  time.Time
}

// An entry is a raw rule as a value.
type entry struct {
	rule rules.Rule
	left uint32 // when a chain was last without it that had it, in seconds
	// spelled: pkg/ruleset says the text.
	spelled bool
}

func newLexicon(family rules.Family) *lexicon {
	return &lexicon{
		family:  family,
		start:   time.Now(),
		store:   nft.NewRuleStore(),
		seed:    maphash.MakeSeed(),
		entries: make([]entry, 1),
		written: map[rules.Key]nft.RuleID{},
	}
}

// lexicons are the lexicons of all families that are open.
type lexicons map[rules.Family]*lexicon

// raw is lexicon.raw of one family.
func (l lexicons) raw(family rules.Family, rule rules.Rule, room []byte) (nft.Rule, bool) {
	if l[family] == nil {
		return nft.Rule{}, false
	}
	return l[family].raw(rule, room)
}

// name is lexicon.name of one family.
func (l lexicons) name(family rules.Family, raw nft.Rule, rule rules.Rule) error {
	if l[family] == nil {
		return nil
	}
	return l[family].name(raw, rule)
}

// revealed returns how many opaque rules got a text after they were met.
func (l lexicons) revealed() (n uint64) {
	for _, of := range l {
		n += of.revealed.Load()
	}
	return n
}

// Intern implements nft.Rulebook. A rule that names ipsets is known by their names: while it
// stands, they are those of the numbers in its bytes. The read counts only if no commit touched
// its chain until after that.
func (l *lexicon) Intern(raw nft.Rule) (nft.RuleID, error) {
	if l.sets != nil && mayHoldNumbers(raw) {
		l.named.Add(1)
		raw, _ = nameSets(raw, l.sets.name) // without the names the rule is read all the same
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.intern(raw)
}

// intern is Intern; l.mu must be held.
func (l *lexicon) intern(raw nft.Rule) (nft.RuleID, error) {
	id, err := l.store.Intern(raw)
	if err != nil || int(id) < len(l.entries) {
		return id, err
	}
	e := entry{left: l.now()}
	e.rule, e.spelled = spell(l.family, raw)
	l.entries = append(l.entries, e)
	l.index(id)
	return id, nil
}

// spell returns a raw rule as a value: with its words, or opaque.
func spell(family rules.Family, raw nft.Rule) (rule rules.Rule, spelled bool) {
	if comment, ok := markOf(raw); ok {
		return rules.Rule{Spec: markStart + comment + markEnd}, true
	}
	bare, sets, _ := withoutNames(raw)
	if words, ok := ruleset.Words(family, bare.Expressions, bare.Userdata, sets); ok {
		rule = compactRule(rules.PrintedRule(words))
		if _, opaque := rule.Opaque(); !opaque {
			return rule, true
		}
	}
	return opaque(family, raw), false
}

// compactRule returns the rule in memory of its own, and no more than it needs:
// it may stay for ever.
func compactRule(rule rules.Rule) rules.Rule {
	rule.Spec = strings.Clone(rule.Spec)
	if i := strings.LastIndex(rule.Spec, rule.Target); i >= 0 {
		rule.Target = rule.Spec[i : i+len(rule.Target)]
	}
	return rule
}

// name takes down from which text iptables-restore made these bytes. Unless they have words, they
// are shown as that text from now on.
func (l *lexicon) name(raw nft.Rule, rule rules.Rule) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := len(l.entries)
	id, err := l.intern(raw)
	if err != nil {
		return err
	}
	rule = compactRule(rule)
	l.written[rule.Key()] = id
	e := &l.entries[id]
	if e.opaque() && int(id) < before {
		l.revealed.Add(1)
	}
	if !e.spelled {
		e.rule = rule
	}
	return nil
}

// keep returns the bytes of an opaque rule, and has them shown as this rule from now on, unless
// they have a text: a reason that an earlier canaryd gave would make it another rule.
func (l *lexicon) keep(rule rules.Rule) (nft.Rule, bool) {
	raw, ok := heldBytes(rule)
	if !ok {
		return nft.Rule{}, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	id, err := l.intern(raw)
	if err != nil {
		return nft.Rule{}, false
	}
	if e := &l.entries[id]; e.opaque() {
		e.rule = rule
	}
	return raw, true
}

// shown returns an opaque rule as its bytes are shown now, if these have a text.
func (l *lexicon) shown(rule rules.Rule) rules.Rule {
	raw, ok := heldBytes(rule)
	if !ok {
		return rule
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if id, err := l.intern(raw); err == nil && !l.entries[id].opaque() {
		return l.entries[id].rule
	}
	return rule
}

// Text implements Session: the text is that of the rule's bytes.
func (s *genidSession) Text(family rules.Family, rule rules.Rule) rules.Rule {
	if lexicons, _ := s.kernel.source.(lexicons); lexicons[family] != nil {
		return lexicons[family].shown(rule)
	}
	return rule
}

// texts returns raw rules as values.
func (l *lexicon) texts(ids []nft.RuleID) []rules.Rule {
	l.mu.RLock()
	defer l.mu.RUnlock()
	found := make([]rules.Rule, len(ids))
	for i, id := range ids {
		found[i] = l.entries[id].rule
	}
	return found
}

// raw returns a rule as nf_tables would hold it; false if no such rule was met. It may use room,
// which is overwritten.
func (l *lexicon) raw(rule rules.Rule, room []byte) (nft.Rule, bool) {
	if comment, ok := cutMark(rule.Spec); ok {
		return markRule(comment), true
	}
	if rule.HasBytes() {
		return l.keep(rule)
	}
	if raw, ok := l.met(rule, room); ok {
		return raw, true
	}
	return l.recall(rule, room)
}

// met returns a rule that was met, as nf_tables holds it. It may use room. Bytes without words are
// shown as this text from now on: it may be about to be written, in other words than before.
func (l *lexicon) met(rule rules.Rule, room []byte) (nft.Rule, bool) {
	l.mu.RLock()
	id := l.find(rule.Key())
	if id == 0 {
		l.mu.RUnlock()
		return nft.Rule{}, false
	}
	raw, again := l.store.Rule(id, room), !l.entries[id].spelled && l.entries[id].rule != rule
	l.mu.RUnlock()
	if again {
		return raw, l.name(raw, rule) == nil
	}
	return raw, true
}

// find returns the rule that has this Key, 0 if there is none. An opaque rule has its bytes itself.
func (l *lexicon) find(key rules.Key) nft.RuleID {
	if id := l.written[key]; id != 0 {
		return id
	}
	return nft.RuleID(l.byKey.Find(maphash.String(l.seed, string(key)), func(n uint32) bool {
		e := &l.entries[n]
		return !e.opaque() && e.rule.Key() == key
	}))
}

// index lets find know of a rule's Key. Of other bytes of the same Key, which another version of
// iptables wrote, the first ones are found.
func (l *lexicon) index(id nft.RuleID) {
	if e := &l.entries[id]; !e.opaque() && l.find(e.rule.Key()) == 0 {
		l.byKey.Add(uint32(id), func(n uint32) uint64 { return maphash.String(l.seed, string(l.entries[n].rule.Key())) })
	}
}

// opaque reports whether the rule has no text that may be written back.
func (e *entry) opaque() bool {
	_, opaque := e.rule.Opaque()
	return opaque
}

// givenUp is when a rule was left that is not to be remembered.
const givenUp = math.MaxUint32

// Release implements nft.Rulebook. A rule that was released for good is dropped by the next Purge;
// others are remembered for a while.
func (l *lexicon) Release(ids []nft.RuleID, forGood bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := l.now()
	if forGood {
		left = givenUp
	}
	for _, id := range ids {
		l.entries[id].left = left
	}
}

const (
	// remember is how long a rule stays that no chain has. It must outlast
	// an absence that is being healed.
	remember = 10 * time.Minute
	// fewEntries are not worth a tidying up.
	fewEntries = 4096
)

// crowded reports whether so much was learned that forget may pay.
func (l *lexicon) crowded() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.entries) > max(2*l.small, fewEntries)
}

// forget drops what no chain holds and none held for a while, if that is the
// half. held must name every nft.RuleID that is in use; afterwards it gives each
// its new number.
func (l *lexicon) forget(held []*[]nft.RuleID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	keep, kept := l.kept(held)
	l.small = len(l.entries)
	if 2*kept > len(l.entries) {
		return
	}
	l.keepOnly(keep, held)
}

// Purge implements nft.Rulebook: it is forget, however little that is.
func (l *lexicon) Purge(held []*[]nft.RuleID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	keep, _ := l.kept(held)
	l.keepOnly(keep, held)
}

// kept returns which entries are not to be forgotten, and how many. l.mu must be held.
func (l *lexicon) kept(held []*[]nft.RuleID) (keep []bool, kept int) {
	keep, kept = make([]bool, len(l.entries)), 1
	for _, ids := range held {
		for _, id := range *ids {
			keep[id] = true
		}
	}
	horizon := int64(l.now()) - int64(remember/time.Second)
	for id := 1; id < len(keep); id++ {
		left := l.entries[id].left
		if keep[id] = keep[id] || left != givenUp && int64(left) >= horizon; keep[id] {
			kept++
		}
	}
	return keep, kept
}

// keepOnly drops the entries that are not to be kept, and gives those of held their new numbers.
// l.mu must be held.
func (l *lexicon) keepOnly(keep []bool, held []*[]nft.RuleID) {
	fresh := newLexicon(l.family)
	renamed := make([]nft.RuleID, len(l.entries))
	for id := 1; id < len(keep); id++ {
		if !keep[id] {
			continue
		}
		name, err := fresh.store.Intern(l.store.Rule(nft.RuleID(id), nil))
		if err != nil {
			continue // it was interned before: this cannot be
		}
		renamed[id] = name
		fresh.entries = append(fresh.entries, l.entries[id])
		fresh.index(name)
	}
	for _, ids := range held {
		for i, id := range *ids {
			(*ids)[i] = renamed[id]
		}
	}
	for key, id := range l.written {
		if renamed[id] != 0 {
			fresh.written[key] = renamed[id]
		}
	}
	l.store, l.entries, l.byKey, l.written, l.seed = fresh.store, fresh.entries, fresh.byKey, fresh.written, fresh.seed
	l.small = len(l.entries)
}

func (l *lexicon) now() uint32 { return uint32(time.Since(l.start) / time.Second) }
