package iptables

import (
	"errors"
	"hash/maphash"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/ruleset"
)

// A lexicon translates between rules as nf_tables holds them and their text.
// pkg/ruleset spells the rules of kube-proxy, CNI plugins and Docker. The text of
// all others is the one that iptables printed for the very same bytes. It may be
// used concurrently.
//
// It implements nft.Rulebook for the mirror.
type lexicon struct {
	family  rules.Family
	mu      sync.RWMutex
	start   time.Time // entry.left counts from it
	store   nft.RuleStore
	entries []entry   // by nft.RuleID; 0 is none
	byKey   nft.Index // of rules' numbers
	seed    maphash.Seed
	small   int           // how many entries there were when it was last tidied up
	noBytes bool          // opaque rules are not to hold their bytes: nothing would write them
	sets    setIndex      // nil: rules that name ipsets are known by numbers
	named   atomic.Uint64 // how often a rule with the number of an ipset was met
	// earlier has the rules that were met before canaryd started; nil if none are kept. recalled is
	// when they were met last; recalling guards it.
	earlier   Earlier
	recalling sync.Mutex
	recalled  time.Time
}

// An entry is the text of a raw rule, if that is known.
type entry struct {
	rule    rules.Rule
	left    uint32 // when a chain was last without it that had it, in seconds
	learned bool   // the text is there
	// fickle: its bytes do not say what it means; see indexed.
	fickle bool
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
	e := entry{left: l.now(), fickle: indexed(raw)}
	if comment, ok := markOf(raw); ok && !e.fickle {
		e.rule, e.learned = rules.Rule{Spec: markStart + comment + markEnd}, true
	} else if odd := shapeOf(l.family, raw).odd; odd != "" {
		e.rule, e.learned, e.fickle = l.without(raw, odd), true, false
	}
	l.entries = append(l.entries, e)
	bare, sets, _ := withoutNames(raw)
	if words, ok := ruleset.Words(l.family, bare.Expressions, bare.Userdata, sets); ok && !e.learned {
		// If it cannot be paired, iptables is asked.
		l.entries[id].spelled = l.pair(id, compactRule(rules.PrintedRule(words))) == nil
	}
	return id, nil
}

// keep returns the bytes of an opaque rule, and has them shown as this rule from now on, unless
// their text is known: what is written without a text is to be read back as the same.
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
	if e := &l.entries[id]; !e.learned {
		e.rule, e.learned, e.fickle = rule, true, false
	}
	return raw, true
}

// texts returns the texts of raw rules, if all are known and certain.
func (l *lexicon) texts(ids []nft.RuleID) ([]rules.Rule, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		if e := &l.entries[id]; !e.learned || e.fickle {
			return nil, false
		}
	}
	found := make([]rules.Rule, len(ids))
	for i, id := range ids {
		found[i] = l.entries[id].rule
	}
	return found, true
}

// textsOr returns the texts of raw rules that are certain. All others are opaque for that reason.
func (l *lexicon) textsOr(ids []nft.RuleID, reason string) []rules.Rule {
	found := make([]rules.Rule, len(ids))
	for i, id := range ids {
		var certain bool
		if found[i], certain = l.known(id); !certain {
			found[i] = l.opaque(id, reason)
		}
	}
	return found
}

// raw returns a rule as nf_tables would hold it; false if no such rule was met,
// or if its bytes are not certain to mean the same again. It may use room,
// which is overwritten.
func (l *lexicon) raw(rule rules.Rule, room []byte) (nft.Rule, bool) {
	if comment, ok := cutMark(rule.Spec); ok {
		return markRule(comment), true
	}
	if rule.HasBytes() {
		return l.keep(rule)
	}
	if raw, ok := l.met(rule.Key(), room); ok {
		return raw, true
	}
	return l.recall(rule.Key(), room)
}

// met returns the rule of a Key that was met, as nf_tables holds it. It may use room.
func (l *lexicon) met(key rules.Key, room []byte) (nft.Rule, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	id := l.find(key)
	if id == 0 {
		return nft.Rule{}, false
	}
	return l.store.Rule(id, room), true
}

// find returns the rule that is certain to have this Key, 0 if there is none.
func (l *lexicon) find(key rules.Key) nft.RuleID {
	return nft.RuleID(l.byKey.Find(maphash.String(l.seed, string(key)), func(n uint32) bool {
		e := &l.entries[n]
		return e.learned && !e.fickle && !e.odd() && e.rule.Key() == key
	}))
}

// index lets find know of a rule's Key.
func (l *lexicon) index(id nft.RuleID) {
	if l.find(l.entries[id].rule.Key()) != 0 {
		return // other bytes that mean the same: see inSameWords
	}
	l.byKey.Add(uint32(id), func(n uint32) uint64 { return maphash.String(l.seed, string(l.entries[n].rule.Key())) })
}

var errPair = errors.New("the text is of another rule")

// learn takes what iptables printed for the rule. It refuses a text whose
// comment or target is not the rule's. A rule that was printed in two ways
// is fickle from now on.
func (l *lexicon) learn(id nft.RuleID, rule rules.Rule) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.pair(id, rule)
}

// pair is learn; l.mu must be held.
func (l *lexicon) pair(id nft.RuleID, rule rules.Rule) error {
	e := &l.entries[id]
	if e.learned && (e.rule == rule || e.odd()) {
		return nil
	}
	shape := shapeOf(l.family, l.store.Rule(id, nil))
	if err := shape.agrees(rule); err != nil {
		return err
	}
	switch {
	case e.fickle:
	case e.learned:
		e.fickle = true
	default:
		e.rule = rule
		if other := l.find(rule.Key()); other != 0 && inSameWords(l.family, l.store.Rule(id, nil), l.store.Rule(other, nil)) {
			e.rule = l.without(l.store.Rule(id, nil), "iptables prints another rule in the same words")
		}
		if !e.odd() {
			l.index(id)
		}
		e.learned = true
	}
	return nil
}

// odd reports whether the rule has no text that may be written back.
func (e *entry) odd() bool {
	_, opaque := e.rule.Opaque()
	return opaque
}

// known returns the text of a rule if it is certain.
func (l *lexicon) known(id nft.RuleID) (rules.Rule, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	e := &l.entries[id]
	return e.rule, e.learned && !e.fickle
}

// opaque returns a rule without text, for a reason that is not the rule's own.
func (l *lexicon) opaque(id nft.RuleID, reason string) rules.Rule {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.without(l.store.Rule(id, nil), reason)
}

// without returns the rule of such bytes that has no text, for a reason.
func (l *lexicon) without(raw nft.Rule, reason string) rules.Rule {
	if l.noBytes {
		return identityOf(raw).OpaqueRule(shapeOf(l.family, raw).target, reason)
	}
	return opaque(l.family, raw, reason)
}

// anyOdd reports whether one of the rules is known to be odd, and perhaps printed over several
// lines.
func (l *lexicon) anyOdd(ids []nft.RuleID) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return slices.ContainsFunc(ids, func(id nft.RuleID) bool { return l.entries[id].odd() })
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
		if e := l.entries[id]; e.learned && !e.fickle && !e.odd() {
			fresh.index(name)
		}
	}
	for _, ids := range held {
		for i, id := range *ids {
			(*ids)[i] = renamed[id]
		}
	}
	l.store, l.entries, l.byKey, l.seed = fresh.store, fresh.entries, fresh.byKey, fresh.seed
	l.small = len(l.entries)
}

func (l *lexicon) now() uint32 { return uint32(time.Since(l.start) / time.Second) }
