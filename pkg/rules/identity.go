package rules

import (
	"slices"
	"strings"
)

// A Key identifies a rule among those of a family: rules of one Key are the same rule. It is for
// comparing, for maps and for hashes. It says nothing about the rule, and is never shown.
type Key string

// Key returns the rule's Key. Rules of one meaning that are spelled otherwise have different Keys;
// see Equal.
func (r Rule) Key() Key { return Key(r.Spec) }

// Is reports whether the two have the same Key.
func (r Rule) Is(o Rule) bool { return r.Key() == o.Key() }

// Words returns the words of the rule's text without their quotes. An error means that the text
// cannot be split, as that of an opaque rule with a lone quote in its reason.
func (r Rule) Words() ([]string, error) { return Split(r.Spec) }

// Mentions reports whether the rule's text has this piece: a cheap no before its Words are asked.
func (r Rule) Mentions(piece string) bool { return strings.Contains(r.Spec, piece) }

// Comment returns the first comment of the rule's text.
func (r Rule) Comment() (comment string, found bool) {
	words, err := r.Words()
	i := slices.Index(words, "--comment")
	if err != nil || i < 0 || i+1 == len(words) {
		return "", false
	}
	return words[i+1], true
}

// Goto reports whether a packet may not come back behind the rule from the chain that it leads to:
// the text has -g, or the rule is opaque and its label does not say -j.
func (r Rule) Goto() bool {
	text, _ := r.Readable()
	end := " -g "
	_, opaque := r.Opaque()
	if opaque {
		end = " -j "
	}
	return r.Target != "" && strings.HasSuffix(" "+text, end+r.Target) != opaque
}
