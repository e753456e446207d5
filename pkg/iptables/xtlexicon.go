package iptables

import (
	"hash/maphash"
	"math/bits"
	"sync"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An xtLexicon knows what iptables-legacy-save printed for rules as x_tables
// holds them. It never decodes: the text is the one that was printed of the very
// same bytes, where a jump's offset counts as the name of the
// chain that begins there. It may be used concurrently.
//
// Memory: 46,578 rules of 5,000 services are 20 MB of bytes, and 3 MB here: of
// the bytes a hash of 128 bits is kept, under random seeds.
type xtLexicon struct {
	mu     sync.Mutex
	start  time.Time // xtWord.met counts from it
	seeds  [2]maphash.Seed
	words  []xtWord  // by number-1
	byKey  nft.Index // of their numbers
	byText nft.Index // of the numbers of the first rule of each Key
	small  int       // how many words there were when it was last tidied up
	// trials: texts that may be another rule's are tried. made is what iptables-restore made
	// of those.
	trials bool
	made   map[rules.Key]xtMade
	bytes  bool // rules without a text hold their bytes, as far as they can be written by them
	// exact are the rules that the present Session has written by their bytes, by chain. Until its
	// end they are read without a text there: the proof looks for the rules as they were planned.
	exact map[Place]map[xtKey]rules.Rule
}

// doubtFor is how long a rule stays opaque after iptables printed a text that cannot be its own:
// its bytes have no part in that, so another try may do better.
const doubtFor = 5 * time.Minute

// An xtKey names a rule by its bytes. The zero key is no rule's.
type xtKey [2]uint64

// An xtWord is the text of a rule.
type xtWord struct {
	key  xtKey
	rule rules.Rule
	base uint32 // a hash of what does not depend on how an iptables writes its extensions; 0: not known
	// kinds is a hash of the extensions' revisions.
	kinds uint32
	met   uint32 // when it was last met, in seconds
	// doubted is when iptables printed what cannot be the rule's text, so that it is opaque; 0 if
	// it did not.
	doubted uint32
	fickle  bool // it was printed in two ways, and is not certain
}

// An xtName is how a rule is called before its text is known.
type xtName struct {
	key     xtKey      // zero: its bytes do not say what they mean
	jump    int        // the offset to which it jumps; 0: nowhere
	goal    string     // the target that its text must have
	comment uint64     // a hash of the comment that its text must have; 0: none
	shape   *ruleShape // what else its text must have; nil if its text is known
}

func newXTLexicon(trials bool) *xtLexicon {
	return &xtLexicon{start: time.Now(), trials: trials, made: map[rules.Key]xtMade{}, seeds: [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}}
}

// name names a rule. A jump has yet to be directed.
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

func (k xtKey) with(goal xtKey) xtKey {
	for i := range k {
		k[i] ^= bits.RotateLeft64(goal[i], 17)
	}
	return k
}

// know notes what a rule says of which that is certain: a mark.
func (l *xtLexicon) know(name xtName, rule rules.Rule) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.learnRule(name, rule)
}

// rule returns the text of a rule, if it is known. Call it locked.
func (l *xtLexicon) rule(key xtKey, now uint32) (rules.Rule, bool) {
	w := l.find(key)
	if w == nil || w.fickle || w.doubted > 0 && now >= w.doubted+uint32(doubtFor/time.Second) {
		return rules.Rule{}, false
	}
	w.met = now
	return w.rule, true
}

func (l *xtLexicon) find(key xtKey) *xtWord {
	n := l.byKey.Find(key[0], func(n uint32) bool { return l.words[n-1].key == key })
	if n == 0 || key == (xtKey{}) {
		return nil
	}
	return &l.words[n-1]
}

// learnRule takes down what was printed for a rule, and refuses a text of another
// comment or target. Call it locked.
func (l *xtLexicon) learnRule(name xtName, rule rules.Rule) {
	reason, opaque := rule.Opaque()
	w := l.find(name.key)
	switch {
	case name.key == xtKey{}:
	case reason == saysUntried: // there were too many to try: the next read goes on
	case w != nil && w.rule.Is(rule):
		w.rule, w.met = rule, l.now() // the memory that others have of it now
		if w.doubted > 0 {
			w.doubted = max(1, w.met)
		}
	case !opaque && l.doubt(name, rule) != "":
	case w != nil && w.doubted > 0:
		*w = l.word(name, rule) // it is found by its key; its text need not be
	case w != nil:
		w.fickle = !opaque
	default:
		l.words = append(l.words, l.word(name, rule))
		l.index(uint32(len(l.words)))
	}
}

// word returns what is to be remembered of a rule.
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

// hashShape returns the hashes that a word keeps of a shape.
func (l *xtLexicon) hashShape(s *ruleShape) (base, kinds uint32) {
	return uint32(maphash.Bytes(l.seeds[0], s.base)) | 1, uint32(maphash.Bytes(l.seeds[0], s.kinds))
}

// contentOf names the bytes of a rule that names an ipset, but for the set's index.
func (l *xtLexicon) contentOf(r xtRule, goal string) xtKey {
	return l.hashBytes(r.withoutIndexes()).with(l.hash(goal))
}

// doubt returns why a text is not a rule's, or nothing. Two rules that go to different places,
// or ask for other interfaces or addresses, are not printed the same: one of them would be put
// back for the other, and a text that is equal would prove it. Call it locked.
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

// index lets find and findText know of the word with that number.
func (l *xtLexicon) index(number uint32) {
	w := &l.words[number-1]
	if l.find(w.key) != w {
		l.byKey.Add(number, func(n uint32) uint64 { return l.words[n-1].key[0] })
	}
	if l.findKey(w.rule.Key()) == nil {
		l.byText.Add(number, func(n uint32) uint64 { return l.hash(string(l.words[n-1].rule.Key()))[0] })
	}
}

// findKey returns the first word of a rule of this Key.
func (l *xtLexicon) findKey(key rules.Key) *xtWord {
	n := l.byText.Find(l.hash(string(key))[0], func(n uint32) bool { return l.words[n-1].rule.Key() == key })
	if n == 0 {
		return nil
	}
	return &l.words[n-1]
}

// agrees checks what can be known of a rule without understanding it.
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

// knows reports whether a rule's text is known, or that it has none that is certain.
func (l *xtLexicon) knows(key xtKey) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.find(key) != nil
}

// learn pairs rules with what was printed of the very same. What does not fit is
// not learned.
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

// purge forgets what was not met since that second: rules of chains that are left out now among it.
func (l *xtLexicon) purge(since uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget(int64(since))
}

// second returns what purge takes.
func (l *xtLexicon) second() uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.now()
}

// forgetUnused drops what was not met for long, once that may be the half.
func (l *xtLexicon) forgetUnused() {
	if len(l.words) <= max(2*l.small, fewEntries) {
		return
	}
	l.forget(int64(l.now()) - int64(remember/time.Second))
}

// forget forgets what was last met before that second. Call it locked.
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
