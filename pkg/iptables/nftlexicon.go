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

// A lexicon translates between rules as the kernel stores them and rules as values. pkg/ruleset
// spells the rules of kube-proxy, CNI plugins, Docker and host firewalls. Another rule has a
// text if this Kernel had iptables-restore write that text (see teach). Otherwise it is opaque:
// its bytes alone identify it and write it again. A lexicon may be used concurrently.
//
// It implements nft.Rulebook for the mirror. On legacy, Kernel.walk uses it like the mirror.
type lexicon struct {
	family  rules.Family
	legacy  bool // its rules are entries of x_tables; see xtraw.go
	mu      sync.RWMutex
	start   time.Time // entry.left counts from it
	store   nft.RuleStore
	entries []entry   // by nft.RuleID; 0 is none
	byKey   nft.Index // of the rules' numbers
	// written are the rules whose texts iptables-restore wrote to the chain of texts.
	written map[rules.Key]nft.RuleID
	// revealed counts the opaque rules that got a text after they were met.
	revealed atomic.Uint64
	seed     maphash.Seed
	small    int      // the number of entries at the last tidying up
	sets     setIndex // nil: rules that name ipsets are known by numbers
	// turn is held by a walk of legacy tables while it uses numbers of rules. inForce are those
	// of the last walk.
	turn    sync.Mutex
	inForce []nft.RuleID
	named   atomic.Uint64 // counts the rules that came with an ipset's number
	// earlier has the rules that were met before canaryd started; nil if none are stored.
	// recalled is the time of its last use; recalling guards it.
	earlier   Earlier
	recalling sync.Mutex
	recalled  time.Time
}

// An entry is a raw rule as a value.
type entry struct {
	rule rules.Rule
	left uint32 // when a chain last lost it, in seconds
	// spelled reports that pkg/ruleset has made the text.
	spelled bool
}

// newLexicon returns an empty lexicon. newMirror makes one for each family, and keepOnly makes
// one to replace the content of another.
func newLexicon(family rules.Family, legacy bool, sets setIndex) *lexicon {
	return &lexicon{
		family:  family,
		legacy:  legacy,
		sets:    sets,
		start:   time.Now(),
		store:   nft.NewRuleStore(),
		seed:    maphash.MakeSeed(),
		entries: make([]entry, 1),
		written: map[rules.Key]nft.RuleID{},
	}
}

// lexicons are the lexicons of all families that are open.
type lexicons map[rules.Family]*lexicon

// raw is lexicon.raw of one family; false if the family is not open. The direct path gets the
// bytes of rules from it.
func (l lexicons) raw(family rules.Family, rule rules.Rule, room []byte) (nft.Rule, bool) {
	if l[family] == nil {
		return nft.Rule{}, false
	}
	return l[family].raw(rule, room)
}

// name is lexicon.name of one family, for teach. A family that is not open is no error.
func (l lexicons) name(family rules.Family, raw nft.Rule, rule rules.Rule) error {
	if l[family] == nil {
		return nil
	}
	return l[family].name(raw, rule)
}

// revealed returns how many opaque rules got a text after they were met. If it grows while
// teach tries texts, rules that were read as opaque have these texts.
func (l lexicons) revealed() (n uint64) {
	for _, of := range l {
		n += of.revealed.Load()
	}
	return n
}

// Intern implements nft.Rulebook. It replaces the numbers of ipsets in a rule by names. While
// the rule is in the table, the kernel does not change these names. The mirror uses the read
// only if no commit touched the rule's chain until after that.
func (l *lexicon) Intern(raw nft.Rule) (nft.RuleID, error) { return l.internBy(raw, l.sets) }

// internBy is Intern with the names of ipsets from sets, which may be nil.
func (l *lexicon) internBy(raw nft.Rule, sets setNamer) (nft.RuleID, error) {
	if sets != nil && mayHoldNumbers(raw) {
		l.named.Add(1)
		raw, _ = nameSets(raw, sets.name) // after an error the rule is read anyway
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.intern(raw)
}

// intern is Intern of a rule that has its sets' names already. A rule that was not met before
// gets its text, or becomes opaque, here. l.mu must be held.
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

// spell returns a raw rule as a value, for a lexicon and Reread. spelled is false for an opaque
// rule, which may still get a text from iptables-restore (see lexicon.name).
func spell(family rules.Family, raw nft.Rule) (rule rules.Rule, spelled bool) {
	if comment, ok := markOf(raw); ok {
		return rules.Rule{Spec: markStart + comment + markEnd}, true
	}
	bare, sets, _ := withoutNames(raw)
	if words, ok := ruleset.Words(family, bare.Expressions, bare.Userdata, sets); ok {
		rule, err := rules.ParseRule(words)
		if _, opaque := rule.Opaque(); err == nil && !opaque {
			return compactRule(rule), true
		}
	}
	return opaque(family, raw), false
}

// compactRule returns the rule in memory of its own, and no more than it needs, because a
// lexicon may keep it for ever. Otherwise it would keep the whole output that has the text.
func compactRule(rule rules.Rule) rules.Rule {
	rule.Spec = strings.Clone(rule.Spec)
	if i := strings.LastIndex(rule.Spec, rule.Target); i >= 0 {
		rule.Target = rule.Spec[i : i+len(rule.Target)]
	}
	return rule
}

// name notes the text from which iptables-restore made these bytes: in a trial (teach), or
// before canaryd started (meet). Unless pkg/ruleset spells the bytes, the lexicon shows them as
// that text from now on.
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

// keep returns the bytes of an opaque rule, which raw needs to write the rule; false if it has
// none. Unless these have a text, the lexicon shows them as this rule from now on. An earlier
// canaryd may have given another reason, with which it would be another rule.
func (l *lexicon) keep(rule rules.Rule) (nft.Rule, bool) {
	raw, ok := l.held(rule)
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

// held returns the bytes of an opaque rule, if they are of the lexicon's backend.
func (l *lexicon) held(rule rules.Rule) (nft.Rule, bool) {
	raw, ok := heldBytes(rule)
	if ok && l.legacy && !isEntry(raw) {
		return olderEntry(l.family, raw.Expressions, string(raw.Userdata))
	}
	return raw, ok && isEntry(raw) == l.legacy
}

// shown returns the rule that the lexicon shows for an opaque rule's bytes, if they have a text
// by now; else the same rule. Text calls it, so that a replay names the rule as reads do.
func (l *lexicon) shown(rule rules.Rule) rules.Rule {
	raw, ok := l.held(rule)
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

// Text implements Session. The text is that of the rule's bytes, which a trial may have shown.
func (s *session) Text(family rules.Family, rule rules.Rule) rules.Rule {
	if l := s.kernel.source[family]; l != nil {
		return l.shown(rule)
	}
	return rule
}

// texts returns the rules with these numbers as values; an opaque rule has no text. If nothing
// differs from before, the chain's last read (nil if none), it returns that slice.
func (l *lexicon) texts(ids []nft.RuleID, before *rules.Chain) []rules.Rule {
	if len(ids) == 0 {
		return nil
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	if before != nil && len(before.Rules) == len(ids) {
		same := 0
		for same < len(ids) && l.entries[ids[same]].rule == before.Rules[same] {
			same++
		}
		if same == len(ids) {
			return before.Rules
		}
	}
	list := make([]rules.Rule, len(ids))
	for i, id := range ids {
		list[i] = l.entries[id].rule
	}
	return list
}

// raw returns a rule as the kernel would store it, so that canaryd can write it. It is
// false if no such rule was met: then iptables-restore has to write it. It may use room, which
// is overwritten.
func (l *lexicon) raw(rule rules.Rule, room []byte) (nft.Rule, bool) {
	if comment, ok := cutMark(rule.Spec); ok {
		if l.legacy {
			return markEntry(l.family, comment), true
		}
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

// met returns a rule that was met, as nf_tables stores it, for raw and recall. It may use room.
// If pkg/ruleset cannot spell the bytes, the lexicon shows them as this text from now on.
// canaryd may be about to write it, in other words than before.
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

// find returns the number of the rule with this Key, 0 if there is none. It finds no opaque
// rule, which has its own bytes. l.mu must be held.
func (l *lexicon) find(key rules.Key) nft.RuleID {
	if id := l.written[key]; id != 0 {
		return id
	}
	return nft.RuleID(l.byKey.Find(maphash.String(l.seed, string(key)), func(n uint32) bool {
		e := &l.entries[n]
		return !e.opaque() && e.rule.Key() == key
	}))
}

// index makes a rule findable by its Key. If another version of iptables wrote other bytes with
// the same Key, find returns the first ones. l.mu must be held.
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

// givenUp is the time of a rule that must not be remembered.
const givenUp = math.MaxUint32

// Release implements nft.Rulebook: the mirror calls it when a chain loses rules. The next Purge
// drops a rule that was released for good. Others are remembered for a while, because they may
// be restored.
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
	// remember is the time that a rule stays without a chain. It must be longer than an absence
	// that is being healed.
	remember = 10 * time.Minute
	// fewEntries are too few for tidying up.
	fewEntries = 4096
)

// crowded reports whether forget may be worthwhile: the entries have doubled since the last
// one. familyText.forgetUnused calls it at each read.
func (l *lexicon) crowded() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.entries) > max(2*l.small, fewEntries)
}

// forget drops the entries that no chain has had for a while, if they are at least half. The
// mirror calls it for familyText.forgetUnused. held must name every nft.RuleID in use;
// afterwards it has their new numbers.
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

// Purge implements nft.Rulebook. It is forget without the minimum of a half: the mirror left
// out chains, and their rules must not fill memory.
func (l *lexicon) Purge(held []*[]nft.RuleID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	keep, _ := l.kept(held)
	l.keepOnly(keep, held)
}

// kept returns which entries must stay, by their numbers, and how many they are. These are the
// rules of held, and the rules that a chain lost a short time ago. forget and Purge call it.
// l.mu must be held.
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

// keepOnly drops all entries except those of keep, and gives the rules of held their new
// numbers. forget and Purge call it. l.mu must be held.
func (l *lexicon) keepOnly(keep []bool, held []*[]nft.RuleID) {
	fresh := newLexicon(l.family, l.legacy, l.sets)
	renamed := make([]nft.RuleID, len(l.entries))
	for id := 1; id < len(keep); id++ {
		if !keep[id] {
			continue
		}
		name, err := fresh.store.Intern(l.store.Rule(nft.RuleID(id), nil))
		if err != nil {
			continue // impossible: it was interned before
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
