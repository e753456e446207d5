package rules

import (
	"slices"
	"strings"
)

// A Key identifies a rule within its family: rules with one Key are the same rule. It is for
// comparisons, maps and hashes. It says nothing about the rule, and is never shown.
type Key string

// Key returns the rule's Key. Rules of one meaning in different spellings have different Keys;
// see Equal.
func (r Rule) Key() Key { return Key(r.Spec) }

// Is reports whether the two have the same Key.
func (r Rule) Is(o Rule) bool { return r.Key() == o.Key() }

// Words returns the words of the rule's text without their quotes. It fails if the text cannot
// be split, such as an opaque rule's with a lone quote in its reason.
func (r Rule) Words() ([]string, error) { return Split(r.Spec) }

// Mentions reports whether the rule's text has this piece: a cheap test before a call of Words.
func (r Rule) Mentions(piece string) bool { return strings.Contains(r.Spec, piece) }

// Comment returns the first comment of the rule's text, by which owners, containers and
// canaryd's marks are recognized; false if there is none.
func (r Rule) Comment() (comment string, found bool) {
	words, err := r.Words()
	i := slices.Index(words, "--comment")
	if err != nil || i < 0 || i+1 == len(words) {
		return "", false
	}
	return words[i+1], true
}

// Goto reports whether the rule leads to a chain by -g: packets do not return to the rule
// behind it. An opaque rule counts as -g unless its label shows -j. A replay decides by it
// which rules may follow missing ones (fates). It is false without a Target.
func (r Rule) Goto() bool {
	text, _ := r.Readable()
	end := " -g "
	_, opaque := r.Opaque()
	if opaque {
		end = " -j "
	}
	return r.Target != "" && strings.HasSuffix(" "+text, end+r.Target) != opaque
}
