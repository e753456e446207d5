package iptables

import (
	"hash/maphash"
	"math/bits"
	"sync"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An xtLexicon knows the texts that iptables-legacy-save printed for rules as x_tables stores
// them. It never decodes bytes: a rule's text was printed for exactly the same bytes. In these
// bytes, the offset of a jump counts as the name of the chain that begins at it. An xtLexicon
// may be used concurrently.
//
// 46,578 rules of 5,000 services are 20 MB of bytes, and need 3 MB here. The lexicon stores only
// a hash of 128 bits for the bytes, under random seeds.
type xtLexicon struct {
	mu     sync.Mutex
	start  time.Time // xtWord.met counts from it
	seeds  [2]maphash.Seed
	words  []xtWord  // by number-1
	byKey  nft.Index // of their numbers
	byText nft.Index // of the numbers of the first rule of each Key
	small  int       // the number of words at the last tidying up
	// trials reports that ambiguous texts, which may be another rule's, are tried. made are the
	// results.
	trials bool
	made   map[rules.Key]xtMade
	bytes  bool // textless rules store their bytes, if these can be written
	// exact are the rules, by chain, that the present Session has written by their bytes. Until
	// its end they are read without a text there, because the proof looks for the planned rules.
	exact map[Place]map[xtKey]rules.Rule
}

// doubtFor is how long a rule stays opaque after iptables printed a text that cannot be its own.
// Its bytes are not the cause, so another try may succeed.
const doubtFor = 5 * time.Minute

// An xtKey identifies a rule by its bytes. No rule has the zero key.
type xtKey [2]uint64

// An xtWord is the text of a rule.
type xtWord struct {
	key  xtKey
	rule rules.Rule
	base uint32 // a hash of the parts that are equal in all versions of iptables; 0: not known
	// kinds is a hash of the extensions' revisions.
	kinds uint32
	met   uint32 // when it was last used, in seconds
	// doubted is the time when iptables printed a text that cannot be the rule's, so that it is
	// opaque; else 0.
	doubted uint32
	fickle  bool // printed in two ways, and so not certain
}

// An xtName identifies a rule before its text is known.
type xtName struct {
	key     xtKey      // zero: its bytes alone do not determine its meaning
	jump    int        // the offset that it jumps to; 0: nowhere
	goal    string     // the target that its text must have
	comment uint64     // a hash of the comment that its text must have; 0: none
	shape   *ruleShape // other required facts of its text; nil if its text is known
}

func newXTLexicon(trials bool) *xtLexicon {
	return &xtLexicon{start: time.Now(), trials: trials, made: map[rules.Key]xtMade{}, seeds: [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}}
}

// name names a rule of a walk, so that its text can be found; nameTable calls it. The target of
// a jump is added later, by direct. A zero key means that the bytes alone do not determine the
// rule's meaning, so that no text is stored for it.
func (l *xtLexicon) name(r xtRule) xtName {
	name, whole := xtName{}, r.entry.whole
	switch {
	case !r.entry.isStandard:
		name.goal = targetName(extName(r.entry.target))
	case len(r.entry.target) != xtStandardLen:
		return xtName{}
	default:
		whole = whole[:len(whole)-xtStandardLen+xtExtDataAt]
		switch verdict := r.entry.verdict(); {
		case verdict >= 0 && r.target:
			name.jump = verdict
		case verdict >= 0:
		case verdictName(verdict) == "":
			return xtName{}
		default:
			name.goal = verdictName(verdict)
		}
	}
	name.key = l.hashBytes(whole)
	if r.hasComment {
		name.comment = l.commentHash(r.comment)
	}
	if name.jump == 0 {
		name.key = name.key.with(l.hash(name.goal))
	}
	if r.entry.indexed() {
		name.key = xtKey{}
	}
	return name
}

func (l *xtLexicon) commentHash(comment []byte) uint64 { return maphash.Bytes(l.seeds[0], comment) | 1 }

func (l *xtLexicon) hash(text string) xtKey {
	return xtKey{maphash.String(l.seeds[0], text), maphash.String(l.seeds[1], text)}
}

func (l *xtLexicon) hashBytes(b []byte) xtKey {
	return xtKey{maphash.Bytes(l.seeds[0], b), maphash.Bytes(l.seeds[1], b)}
}

// with returns the key of a rule from the hash of its bytes and the hash of its target.
func (k xtKey) with(goal xtKey) xtKey {
	for i := range k {
		k[i] ^= bits.RotateLeft64(goal[i], 17)
	}
	return k
}

// know notes a rule with a certain meaning: a mark, or a rule that cannot have a text.
// nameTable and shapes call it, so that nothing needs to be printed for the rule.
func (l *xtLexicon) know(name xtName, rule rules.Rule) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.learnRule(name, rule)
}

// rule returns the text of a rule, or its opaque form. It is false if iptables has to print the
// rule: its text is unknown or not certain, or a doubt is older than doubtFor. now is the time
// in seconds since l.start. Call it locked.
func (l *xtLexicon) rule(key xtKey, now uint32) (rules.Rule, bool) {
	w := l.find(key)
	if w == nil || w.fickle || w.doubted > 0 && now >= w.doubted+uint32(doubtFor/time.Second) {
		return rules.Rule{}, false
	}
	w.met = now
	return w.rule, true
}

// find returns the word of a rule, nil if there is none or the key is zero. Call it locked.
func (l *xtLexicon) find(key xtKey) *xtWord {
	n := l.byKey.Find(key[0], func(n uint32) bool { return l.words[n-1].key == key })
	if n == 0 || key == (xtKey{}) {
		return nil
	}
	return &l.words[n-1]
}

// learnRule notes the text that was printed for a rule, for learn and know. It refuses a text
// with another comment or target. A rule that was printed in two ways becomes fickle, and is
// printed at each read. Call it locked.
func (l *xtLexicon) learnRule(name xtName, rule rules.Rule) {
	reason, opaque := rule.Opaque()
	w := l.find(name.key)
	switch {
	case name.key == xtKey{}:
	case reason == saysUntried: // too many to try at once: the next read continues
	case w != nil && w.rule.Is(rule):
		w.rule, w.met = rule, l.now() // the memory that others have now
		if w.doubted > 0 {
			w.doubted = max(1, w.met)
		}
	case !opaque && l.doubt(name, rule) != "":
	case w != nil && w.doubted > 0:
		*w = l.word(name, rule) // found by its key; a search by its text may fail
	case w != nil:
		w.fickle = !opaque
	default:
		l.words = append(l.words, l.word(name, rule))
		l.index(uint32(len(l.words)))
	}
}

// word returns a new word for a rule; learnRule stores it. A rule that is opaque only because
// of its printed text counts as doubted, and is printed again after doubtFor.
func (l *xtLexicon) word(name xtName, rule rules.Rule) xtWord {
	w := xtWord{key: name.key, rule: rule, met: l.now()}
	if name.shape != nil {
		w.base, w.kinds = l.hashShape(name.shape)
		if reason, opaque := rule.Opaque(); opaque && name.shape.odd == "" && reason != saysAnother {
			w.doubted = max(1, w.met)
		}
	}
	return w
}

// hashShape returns the hashes of a shape for a word. differs compares them, to find out
// whether two rules with one text are the same rule.
func (l *xtLexicon) hashShape(s *ruleShape) (base, kinds uint32) {
	return uint32(maphash.Bytes(l.seeds[0], s.base)) | 1, uint32(maphash.Bytes(l.seeds[0], s.kinds))
}

// contentOf returns a key of a rule's bytes without the indexes of its ipsets, for the shape of
// a rule that has no other key. Trials compare it.
func (l *xtLexicon) contentOf(r xtRule, goal string) xtKey {
	return l.hashBytes(r.withoutIndexes()).with(l.hash(goal))
}

// doubt returns the reason why a text is not a rule's, or "". The rule is then opaque (verify,
// learnRule). Two rules with different targets, interfaces or addresses cannot have the same
// text. With a wrong text, canaryd would put back one rule for the other, and the equal text
// would pass as a proof. Call it locked.
func (l *xtLexicon) doubt(name xtName, rule rules.Rule) string {
	if reason, opaque := rule.Opaque(); opaque {
		return reason
	}
	if name.shape != nil {
		if err := name.shape.agrees(rule); err != nil {
			return err.Error()
		}
		return l.doubtText(name, rule)
	}
	if !l.agrees(name, rule) {
		return errPair.Error()
	}
	return ""
}

// index makes the word with that number findable for find and findKey. learnRule and forget
// call it after they appended the word.
func (l *xtLexicon) index(number uint32) {
	w := &l.words[number-1]
	if l.find(w.key) != w {
		l.byKey.Add(number, func(n uint32) uint64 { return l.words[n-1].key[0] })
	}
	if l.findKey(w.rule.Key()) == nil {
		l.byText.Add(number, func(n uint32) uint64 { return l.hash(string(l.words[n-1].rule.Key()))[0] })
	}
}

// findKey returns the first word of a rule with this Key, nil if there is none. Another rule
// with the same text is a reason for a doubt or a trial. Call it locked.
func (l *xtLexicon) findKey(key rules.Key) *xtWord {
	n := l.byText.Find(l.hash(string(key))[0], func(n uint32) bool { return l.words[n-1].rule.Key() == key })
	if n == 0 {
		return nil
	}
	return &l.words[n-1]
}

// agrees reports whether a text has the target and the comment of the named rule. doubt calls
// it for a rule without a shape.
func (l *xtLexicon) agrees(name xtName, rule rules.Rule) bool {
	if name.goal != rule.Target && !(name.goal == "CT" && rule.Target == "NOTRACK") { // two words for one
		return false
	}
	comment, found := rule.Comment()
	if !found {
		return name.comment == 0
	}
	return name.comment == l.commentHash([]byte(comment))
}

// knows reports whether a rule's text is known, or its lack of a certain text. Any other rule
// needs a shape, against which its printed text is checked (shapes).
func (l *xtLexicon) knows(key xtKey) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.find(key) != nil
}

// learn pairs rules with the texts that were printed for the same rules. It skips texts that do
// not fit. spellOut calls it only under the xtables lock, and if the tables did not change
// meanwhile: another rule's text would be learned otherwise.
func (l *xtLexicon) learn(walked xtFamily, printed rules.Ruleset) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range walked.tables {
		for i := range t.chains {
			names, chain := t.names(i), printed[t.name].Chain(t.chains[i].name)
			if chain == nil || t.chains[i].out || len(chain.Rules) != len(names) {
				continue
			}
			for at, name := range names {
				l.learnRule(name, chain.Rules[at])
			}
		}
	}
	l.forgetUnused()
}

// purge forgets all rules that were not used since that second (see second), such as rules of
// chains that are now left out. spell calls it after such a change.
func (l *xtLexicon) purge(since uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget(int64(since))
}

// second returns the current time for purge, in seconds since l.start. spell takes it before it
// looks up the rules that are still used.
func (l *xtLexicon) second() uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.now()
}

// forgetUnused drops words that were not used for long, once they may be half of all; learn
// calls it. Call it locked.
func (l *xtLexicon) forgetUnused() {
	if len(l.words) <= max(2*l.small, fewEntries) {
		return
	}
	l.forget(int64(l.now()) - int64(remember/time.Second))
}

// forget drops all words that were last used before that second, also results of trials. purge
// and forgetUnused call it, locked.
func (l *xtLexicon) forget(horizon int64) {
	old := l.words
	l.words, l.byKey, l.byText = nil, nft.Index{}, nft.Index{}
	for _, w := range old {
		if int64(w.met) >= horizon {
			l.words = append(l.words, w)
			l.index(uint32(len(l.words)))
		}
	}
	l.small = len(l.words)
	l.forgetMade(horizon)
}

func (l *xtLexicon) now() uint32 { return uint32(time.Since(l.start) / time.Second) }
