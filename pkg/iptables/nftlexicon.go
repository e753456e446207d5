package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A lexicon translates between rules as nf_tables holds them and their text.
// It learns from what iptables prints and never decodes: what it says is what
// iptables said of the very same bytes. It may be used concurrently.
//
// Memory: a rule is a list of atoms. 46,578 rules of 5,000 services are 20 MB
// of messages, but few atoms (a match by protocol, a jump) occur once only,
// and those without the zeros behind a comment are short.
type lexicon struct {
	mu      sync.RWMutex
	start   time.Time    // entry.left counts from it
	atoms   nft.Interner // NFTA_LIST_ELEMs as trim leaves them
	keys    nft.Interner // rules as makeKey names them; the number is the ruleID
	entries []entry      // by ruleID; 0 is none
	byText  nft.Index    // of ruleIDs
	seed    maphash.Seed
	small   int // how many entries there were when it was last tidied up

	key []byte // room to work in
}

// A ruleID names a raw rule of a lexicon. Equal ones are equal rules. It holds
// until the lexicon forgets.
type ruleID uint32

// An entry is the text of a raw rule, if that is known.
type entry struct {
	rule rules.Rule
	left uint32 // when a chain was last without it that had it, in seconds
	told bool
	// fickle: its bytes do not say what it means; see nft.Rule.indexed.
	fickle bool
}

func newLexicon() *lexicon {
	return &lexicon{
		start:   time.Now(),
		atoms:   nft.NewInterner(),
		keys:    nft.NewInterner(),
		seed:    maphash.MakeSeed(),
		entries: make([]entry, 1),
	}
}

// lexicons are the lexicons of all families that are open.
type lexicons map[rules.Family]*lexicon

// raw is lexicon.raw of one family.
func (l lexicons) raw(family rules.Family, spec string, room []byte) (nft.Rule, bool) {
	if l[family] == nil {
		return nft.Rule{}, false
	}
	return l[family].raw(spec, room)
}

// intern returns the name of a raw rule, which it need not have met before.
func (l *lexicon) intern(raw nft.Rule) (ruleID, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.makeKey(raw); err != nil {
		return 0, err
	}
	number, err := l.keys.Number(l.key)
	if err != nil {
		return 0, err
	}
	id := ruleID(number)
	if int(id) < len(l.entries) {
		return id, nil
	}
	e := entry{left: l.now(), fickle: indexed(raw)}
	if comment, ok := markOf(raw); ok && !e.fickle {
		e.rule, e.told = rules.Rule{Spec: markStart + comment + markEnd}, true
	} else if odd := shapeOf(raw).odd; odd != "" {
		e.rule, e.told, e.fickle = opaque(raw, odd), true, false
	}
	l.entries = append(l.entries, e)
	return id, nil
}

// texts returns the texts of raw rules, if all are known and certain.
func (l *lexicon) texts(ids []ruleID) ([]rules.Rule, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		if e := &l.entries[id]; !e.told || e.fickle {
			return nil, false
		}
	}
	found := make([]rules.Rule, len(ids))
	for i, id := range ids {
		found[i] = l.entries[id].rule
	}
	return found, true
}

// raw returns the rule as nf_tables would hold it that iptables-save prints as
// spec; false if no such rule was met, or if its bytes are not certain to mean
// the same again. The rule may use room, which is overwritten.
func (l *lexicon) raw(spec string, room []byte) (nft.Rule, bool) {
	if comment, ok := cutMark(spec); ok {
		return markRule(comment), true
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	id := l.find(spec)
	if id == 0 {
		return nft.Rule{}, false
	}
	return l.rawIn(id, room), true
}

// find returns the rule that is certain to be printed so, 0 if there is none.
func (l *lexicon) find(spec string) ruleID {
	return ruleID(l.byText.Find(maphash.String(l.seed, spec), func(n uint32) bool {
		e := &l.entries[n]
		return e.told && !e.fickle && !e.odd() && e.rule.Spec == spec
	}))
}

// index lets find know of a rule's text.
func (l *lexicon) index(id ruleID) {
	if l.find(l.entries[id].rule.Spec) != 0 {
		return // other bytes that mean the same
	}
	l.byText.Add(uint32(id), func(n uint32) uint64 { return maphash.String(l.seed, l.entries[n].rule.Spec) })
}

var errPair = errors.New("the text is of another rule")

// tell says what iptables printed for the rule. It refuses a text whose
// comment or target is not the rule's. A rule that was printed in two ways
// is fickle from now on.
func (l *lexicon) tell(id ruleID, rule rules.Rule) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := &l.entries[id]
	if e.told && e.rule == rule {
		return nil
	}
	shape := shapeOf(l.rawOf(id))
	if err := shape.agrees(rule); err != nil {
		return err
	}
	switch {
	case e.fickle:
	case e.told:
		e.fickle = true
	default:
		e.rule = rule
		l.index(id)
		e.told = true
	}
	return nil
}

// odd reports whether the rule has no text that may be written back.
func (e *entry) odd() bool {
	_, opaque := e.rule.Opaque()
	return opaque
}

// known returns the text of a rule if it is certain.
func (l *lexicon) known(id ruleID) (rules.Rule, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	e := &l.entries[id]
	return e.rule, e.told && !e.fickle
}

// opaque returns a rule without text, for a reason that is not the rule's own.
func (l *lexicon) opaque(id ruleID, reason string) rules.Rule {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return opaque(l.rawOf(id), reason)
}

// anyOdd reports whether one of the rules is known to be odd, and perhaps printed over several
// lines.
func (l *lexicon) anyOdd(ids []ruleID) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return slices.ContainsFunc(ids, func(id ruleID) bool { return l.entries[id].odd() })
}

// release notes that a chain has lost these rules, or lost some of them.
func (l *lexicon) release(ids []ruleID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	for _, id := range ids {
		l.entries[id].left = now
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
// half. held must name every ruleID that is in use; afterwards it gives each
// its new name.
func (l *lexicon) forget(held []*[]ruleID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	keep, kept := l.kept(held)
	l.small = len(l.entries)
	if 2*kept > len(l.entries) {
		return
	}
	l.keepOnly(keep, held)
}

// givenUp is when a rule was left that is not to be remembered.
const givenUp = math.MaxUint32

// giveUp notes that these rules are of a chain that is left out: the next purge drops them.
func (l *lexicon) giveUp(ids []ruleID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		l.entries[id].left = givenUp
	}
}

// purge is forget, however little that is.
func (l *lexicon) purge(held []*[]ruleID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	keep, _ := l.kept(held)
	l.keepOnly(keep, held)
}

// kept returns which entries are not to be forgotten, and how many. Call it locked.
func (l *lexicon) kept(held []*[]ruleID) (keep []bool, kept int) {
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

// keepOnly drops the entries that are not to be kept, and gives those of held their new names. Call
// it locked.
func (l *lexicon) keepOnly(keep []bool, held []*[]ruleID) {
	fresh := newLexicon()
	renamed := make([]ruleID, len(l.entries))
	for id := 1; id < len(keep); id++ {
		if !keep[id] {
			continue
		}
		name, err := fresh.intern(l.rawOf(ruleID(id)))
		if err != nil {
			continue // it was interned before: this cannot be
		}
		renamed[id] = name
		fresh.entries[name] = l.entries[id]
		if e := l.entries[id]; e.told && !e.fickle && !e.odd() {
			fresh.index(name)
		}
	}
	for _, ids := range held {
		for i, id := range *ids {
			(*ids)[i] = renamed[id]
		}
	}
	l.atoms, l.keys, l.entries, l.byText, l.seed = fresh.atoms, fresh.keys, fresh.entries, fresh.byText, fresh.seed
	l.small = len(l.entries)
}

func (l *lexicon) now() uint32 { return uint32(time.Since(l.start) / time.Second) }

// makeKey sets l.key to what names the rule: the numbers of its atoms, and
// behind a zero its user data if it has any.
func (l *lexicon) makeKey(raw nft.Rule) error {
	l.key = l.key[:0]
	for rest := raw.Expressions; len(rest) > 0; {
		kind, elem, after, err := nft.NextAttr(rest)
		if err != nil {
			return err
		}
		if kind != unix.NFTA_LIST_ELEM {
			return fmt.Errorf("%w: attribute %d in a list of expressions", nft.ErrAttribute, kind)
		}
		number, err := l.atoms.Number(trim(rest[:unix.SizeofNlAttr+len(elem)]))
		if err != nil {
			return err
		}
		l.key = binary.AppendUvarint(l.key, uint64(number))
		rest = after
	}
	if raw.Userdata != nil {
		l.key = append(append(l.key, 0), raw.Userdata...)
	}
	return nil
}

// trim returns an attribute without the zeros at its end (a comment's match
// has up to 255). Its header says how many there were.
func trim(attribute []byte) []byte {
	end := len(attribute)
	for end > unix.SizeofNlAttr && attribute[end-1] == 0 {
		end--
	}
	return attribute[:end]
}

// rawOf builds the raw rule again.
func (l *lexicon) rawOf(id ruleID) nft.Rule { return l.rawIn(id, nil) }

// rawIn is rawOf in memory that is overwritten, as far as it suffices.
func (l *lexicon) rawIn(id ruleID, room []byte) nft.Rule {
	key := l.keys.Text(uint32(id))
	raw := nft.Rule{Expressions: room[:0]}
	for len(key) > 0 {
		number, n := binary.Uvarint(key)
		key = key[n:]
		if number == 0 {
			raw.Userdata = slices.Clone(key)
			break
		}
		atom := l.atoms.Text(uint32(number))
		size := int(binary.NativeEndian.Uint16(atom))
		padded := (size + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1)
		raw.Expressions = append(raw.Expressions, atom...)
		raw.Expressions = append(raw.Expressions, make([]byte, padded-len(atom))...)
	}
	return raw
}

// immediateVerdict returns what an "immediate" expression puts into the verdict
// register: a chain's name or a verdict's, "" if it is anything else.
func immediateVerdict(data []byte) (string, error) {
	value, err := nft.AttrOf(data, unix.NFTA_IMMEDIATE_DATA)
	if err != nil {
		return "", err
	}
	v, err := nft.AttrOf(value, unix.NFTA_DATA_VERDICT)
	if err != nil || v == nil {
		return "", err
	}
	if chain, err := nft.AttrOf(v, unix.NFTA_VERDICT_CHAIN); err != nil || chain != nil {
		return nft.String(chain), err
	}
	code, err := nft.AttrOf(v, unix.NFTA_VERDICT_CODE)
	if err != nil || len(code) != 4 {
		return "", err
	}
	switch int32(binary.BigEndian.Uint32(code)) {
	case 0: // NF_DROP
		return "DROP", nil
	case 1: // NF_ACCEPT
		return "ACCEPT", nil
	case unix.NFT_RETURN:
		return "RETURN", nil
	}
	return "", nil
}
