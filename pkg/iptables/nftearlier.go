package iptables

import (
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An Earlier returns the opaque rule that holds the bytes of the rule of this Key, as they were
// kept before this Kernel was opened; false if they were not. It is called concurrently.
type Earlier func(f rules.Family, key rules.Key) (rules.Rule, bool)

// KnowEarlier has rules written by their bytes that this Kernel has not met: those of a generation
// on disk, which were flushed while canaryd did not run. It is called before the first Read.
func (k *Kernel) KnowEarlier(earlier Earlier) {
	if source, is := k.source.(lexicons); is {
		for _, l := range source {
			l.earlier = earlier
		}
	}
}

// InBytes returns the opaque rule that holds the bytes of a rule with a text; false if this Kernel
// has not met the rule, if other bytes may mean the same, or if they do not make the rule again. On
// legacy it is always false. It may be called concurrently.
func (k *Kernel) InBytes(f rules.Family, r rules.Rule) (rules.Rule, bool) {
	source, is := k.source.(lexicons)
	if !is || source[f] == nil {
		return rules.Rule{}, false
	}
	raw, ok := source[f].met(r.Key(), nil)
	if !ok {
		return rules.Rule{}, false
	}
	held := opaque(f, raw, "")
	return held, held.HasBytes()
}

// recall returns the bytes that were kept of a rule, and pairs them with its text, so that the rule
// is read back by it. Bytes that pkg/ruleset spells otherwise are of another rule.
func (l *lexicon) recall(rule rules.Rule) (nft.Rule, bool) {
	if l.earlier == nil {
		return nft.Rule{}, false
	}
	held, ok := l.earlier(l.family, rule.Key())
	if !ok {
		return nft.Rule{}, false
	}
	raw, ok := heldBytes(held)
	if !ok {
		return nft.Rule{}, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	id, err := l.intern(raw)
	if err != nil {
		return nft.Rule{}, false
	}
	if e := &l.entries[id]; !e.learned && !e.fickle {
		if err := l.pair(id, rule); err != nil {
			return nft.Rule{}, false
		}
	}
	if e := &l.entries[id]; !e.learned || e.fickle || !e.rule.Is(rule) {
		return nft.Rule{}, false
	}
	return raw, true
}
