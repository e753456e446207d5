package iptables

import (
	"encoding/binary"
	"errors"
	"sync"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A RawRule is a rule as the kernel stores it, for disk; see xtraw.go for legacy. Bytes are in
// the Kernel's own format. Text is the text from which iptables-restore made the bytes. It is
// empty if pkg/ruleset can spell the bytes, as it can for most rules.
type RawRule struct {
	Text  string
	Bytes []byte
}

// Earlier calls add with each rule of a family that was stored before the Kernel was opened. The
// callee may use Bytes only during the call.
type Earlier func(f rules.Family, add func(RawRule))

// KnowEarlier lets the Kernel write rules by their bytes that it has not read itself. These are
// the rules of a generation on disk that were flushed while canaryd did not run. It is called
// before the first Read.
func (k *Kernel) KnowEarlier(earlier Earlier) {
	for family, l := range k.source {
		l.earlier = earlier
		earlier(family, func(kept RawRule) {
			if kept.Text != "" { // the first read must show this text
				l.meet(kept)
			}
		})
	}
}

// RawRule returns a rule with a text as the kernel stores it, to be saved with the generation.
// It is false if this Kernel has not met the rule. Bytes are in room, if it is large enough. It
// may be called concurrently.
func (k *Kernel) RawRule(f rules.Family, r rules.Rule, room []byte) (RawRule, bool) {
	l := k.source[f]
	if l == nil {
		return RawRule{}, false
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	id := l.find(r.Key())
	if id == 0 {
		return RawRule{}, false
	}
	scratch, _ := scratches.Get().(*[]byte)
	if scratch == nil {
		scratch = new([]byte)
	}
	rule := l.store.Rule(id, (*scratch)[:0])
	raw := RawRule{Bytes: appendRaw(room[:0], rule)}
	if cap(rule.Expressions) > cap(*scratch) {
		*scratch = rule.Expressions
	}
	scratches.Put(scratch)
	if e := &l.entries[id]; !e.spelled || !e.rule.Is(r) {
		raw.Text = r.Spec
	}
	return raw, true
}

// scratches have room for one rule each: a save needs tens of thousands of rules.
var scratches sync.Pool

// appendRaw appends a rule for RawRule: the length of its expressions, the expressions, and 1
// with the user data, if it has any. parseRaw reads it.
func appendRaw(out []byte, r nft.Rule) []byte {
	out = append(binary.AppendUvarint(out, uint64(len(r.Expressions))), r.Expressions...)
	if r.Userdata == nil {
		return out
	}
	return append(append(out, 1), r.Userdata...)
}

var errRaw = errors.New("no rule as nf_tables holds it")

// parseRaw parses a rule that appendRaw wrote, from a file that may be damaged; meet ignores
// the rule after an error. The rule is in the same memory.
func parseRaw(text []byte) (nft.Rule, error) {
	size, n := binary.Uvarint(text)
	if n <= 0 || size > uint64(len(text)-n) {
		return nft.Rule{}, errRaw
	}
	r, rest := nft.Rule{Expressions: text[n : n+int(size)]}, text[n+int(size):]
	if len(rest) > 0 {
		if rest[0] != 1 {
			return nft.Rule{}, errRaw
		}
		r.Userdata = rest[1:]
	}
	return r, r.Each(func(nft.Expression) error { return nil })
}

// recall takes in the stored rules and returns a rule if it is among them. raw calls it for a
// rule that no read has met. It takes them in at most once in the time that the lexicon
// remembers rules, because it reads the whole file. It may use room.
func (l *lexicon) recall(rule rules.Rule, room []byte) (nft.Rule, bool) {
	if l.earlier == nil {
		return nft.Rule{}, false
	}
	l.recalling.Lock()
	defer l.recalling.Unlock()
	if now := time.Now(); l.recalled.IsZero() || now.Sub(l.recalled) >= remember {
		l.recalled = now
		l.earlier(l.family, l.meet)
	}
	return l.met(rule, room)
}

// meet takes in a stored rule, for KnowEarlier and recall. It does not trust a text that leads
// to another target: then it takes in only the bytes. It ignores damaged bytes.
func (l *lexicon) meet(kept RawRule) {
	raw, err := parseRaw(kept.Bytes)
	if err != nil || isEntry(raw) != l.legacy {
		return
	}
	if rule, err := rules.ParseRule(kept.Text); kept.Text != "" && err == nil && rule.Target == targetOf(raw) {
		_ = l.name(raw, rule) // after an error the rule is not found
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = l.intern(raw)
}
