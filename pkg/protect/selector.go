package protect

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Selector says which chains are protected, and which rules of built-in chains besides those
// that jump into them. The zero Selector protects none.
type Selector struct {
	exact  map[string]bool // chains by name; true: written piecewise
	forms  []owners.Form
	shared []owners.Form // those of forms that are written piecewise
	globs  []string
	rules  []owners.Straight
	native []nativeGlob
	auto   bool // Auto is one of the words

	ruleGlobs []ruleGlob
}

// canarySuffix ends the names of the chains by which kube-proxy, kubelet and others notice a flush.
const canarySuffix = "-CANARY"

// NewSelector reads the value of --protect: names of presets (see PresetNames), Auto and words such
// as "-docker" that take an owner out of it, globs of chain names, as path.Match has them,
// nft:FAMILY:NAME for native tables, and rule:TABLE:CHAIN:GLOB for rules of built-in chains. A word
// of lower-case letters and digits is a preset, and a word with two colons or with a space is no
// glob of chain names, so that a mistyped word is no silent glob. An error names the bad word.
func NewSelector(list []string) (Selector, error) {
	s := Selector{exact: map[string]bool{}}
	for _, word := range list {
		word = strings.TrimSpace(word)
		if strings.HasPrefix(word, nativePrefix) {
			glob, err := parseNative(word)
			if err != nil {
				return Selector{}, err
			}
			s.native = append(s.native, glob)
			continue
		}
		if strings.HasPrefix(word, rulePrefix) {
			glob, err := parseRule(word)
			if err != nil {
				return Selector{}, err
			}
			if s.ruleGlobs = append(s.ruleGlobs, glob); len(s.ruleGlobs) > maxRuleWords {
				return Selector{}, fmt.Errorf("more than %d words begin with %s", maxRuleWords, rulePrefix)
			}
			continue
		}
		if strings.HasPrefix(word, leaveOut) && !strings.Contains(word, " ") {
			if err := checkLeftOut(word, list); err != nil {
				return Selector{}, err
			}
			continue
		}
		rows := rowsOf(word, list)
		for _, o := range rows {
			s.name(o, word != Auto)
		}
		s.auto = s.auto || word == Auto
		switch {
		case len(rows) > 0 || word == Auto:
		case word == "" || strings.ToLower(word) == word && !strings.ContainsAny(word, "*?[-_"):
			return Selector{}, fmt.Errorf("%q is no preset (%s)%s", word, strings.Join(PresetNames(), ", "), chainHint(word))
		case strings.Count(word, ":") > 1:
			return Selector{}, fmt.Errorf("%q begins neither with %s nor with %s, and is no glob of chain names", word, nativePrefix, rulePrefix)
		case strings.ContainsAny(word, " \t\""):
			return Selector{}, fmt.Errorf("%q is not a glob of chain names: no chain of iptables has a space or a quote in its name (a word with a comma needs double quotes)", word)
		default:
			if _, err := path.Match(word, ""); err != nil {
				return Selector{}, fmt.Errorf("%q is not a glob of chain names: %w", word, err)
			}
			s.globs = append(s.globs, word)
		}
	}
	return s, nil
}

// chainHint says how to protect a chain whose name could be a mistyped preset; "" if there is no
// such chain.
func chainHint(word string) string {
	if word == "" {
		return ""
	}
	_, size := utf8.DecodeRuneInString(word)
	glob := "[" + word[:size] + "]" + word[size:]
	if ok, err := path.Match(glob, word); !ok || err != nil {
		return ""
	}
	return fmt.Sprintf("; a chain of just that name is protected by the glob '%s'", glob)
}

// Protects reports whether chain is protected. Built-in chains never are, and neither are
// canaries, even if a glob matches: an owner notices a flush by the loss of its canary, so only
// the owner may bring it back.
func (s Selector) Protects(chain string) bool {
	if chain == "" || strings.HasSuffix(chain, canarySuffix) || rules.Builtin(rules.Mangle, chain) {
		return false
	}
	if _, ok := s.exact[chain]; ok {
		return true
	}
	if anyMatches(s.forms, chain) {
		return true
	}
	return slices.ContainsFunc(s.globs, func(g string) bool {
		ok, _ := path.Match(g, chain) // the pattern was checked by NewSelector
		return ok
	})
}

// Piecewise reports whether a preset's chain is shared by many containers or networks, whose
// rules the owner writes one at a time. That such a chain holds rules says nothing of the other
// containers' rules. It is false for a chain that only a glob matches.
func (s Selector) Piecewise(chain string) bool {
	return s.exact[chain] || anyMatches(s.shared, chain)
}

// Protection returns all that the selector protects.
func (s Selector) Protection() rules.Protection {
	return rules.Protection{Chain: s.Protects, Rule: s.MatchesPreset, Piecewise: s.Piecewise, Follow: followed}
}

// followed reports whether a chain of another owner is guarded where protected rules lead to it.
// Built-in chains are not, and neither are canaries, as Protects says.
func followed(chain string) bool {
	return !strings.HasSuffix(chain, canarySuffix) && !rules.Builtin(rules.Mangle, chain)
}

// MatchesPreset reports whether a word rule: names r, or whether r is a rule that the owner of a
// preset writes into the built-in chain itself, such as Docker's MASQUERADE.
func (s Selector) MatchesPreset(t rules.TableName, chain string, r rules.Rule) bool {
	if s.namesRule(t, chain, r) {
		return true
	}
	if !slices.ContainsFunc(s.rules, func(r owners.Straight) bool { return r.Table == t && r.Chain == chain }) {
		return false // most rules of others stand in INPUT, and need not be taken apart
	}
	words, err := r.Words()
	return err == nil && slices.ContainsFunc(s.rules, func(r owners.Straight) bool { return r.Matches(t, chain, words) })
}

// anyMatches reports whether the chain's name has one of the forms.
func anyMatches(list []owners.Form, chain string) bool {
	return owners.AnyMatches(list, chain)
}
