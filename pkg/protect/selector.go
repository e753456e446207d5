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

// A Selector decides which chains are protected, and which rules of built-in chains apart from
// the jumps into them. The zero Selector protects nothing.
type Selector struct {
	exact  map[string]bool // chains by name; true: written piecewise
	forms  []owners.Form
	shared []owners.Form // the forms of chains that are written piecewise
	globs  []string
	rules  []owners.Straight
	native []nativeGlob
	auto   bool // the words include Auto

	ruleGlobs []ruleGlob
}

// canarySuffix ends the names of the chains by which kube-proxy, kubelet and others notice a flush.
const canarySuffix = "-CANARY"

// NewSelector reads the value of --protect. A word is a preset (see PresetNames), Auto, or a
// glob of chain names for path.Match. A word such as "-docker" takes an owner out of Auto.
// Words nft:FAMILY:NAME name native tables, and words rule:TABLE:CHAIN:GLOB name rules of
// built-in chains. A word of lower-case letters and digits is a preset, and a word with two
// colons or a space is no glob of chain names. So a mistyped word does not silently become a
// glob. An error names the bad word.
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

// chainHint describes how to protect a chain whose name looks like a mistyped preset, for
// NewSelector's error; "" if there can be no such chain.
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

// Protects reports whether chain is protected: read, learned and put back. Built-in chains
// and canaries never are, even if a glob matches. An owner notices a flush by the loss of
// its canary, so only the owner may bring it back.
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

// Piecewise reports whether many containers or networks share a preset's chain, and the owner
// writes their rules one at a time. So the presence of some rules says nothing about the other
// containers' rules. It is false for a chain that only a glob matches.
func (s Selector) Piecewise(chain string) bool {
	return s.exact[chain] || anyMatches(s.shared, chain)
}

// Protection returns all that the selector protects.
func (s Selector) Protection() rules.Protection {
	return rules.Protection{Chain: s.Protects, Rule: s.MatchesPreset, Piecewise: s.Piecewise, Follow: followed}
}

// followed reports whether a chain of another owner is guarded if protected rules lead to it.
// Built-in chains and canaries are not; see Protects.
func followed(chain string) bool {
	return !strings.HasSuffix(chain, canarySuffix) && !rules.Builtin(rules.Mangle, chain)
}

// MatchesPreset reports whether a word "rule:" or a preset names r: it is then guarded like
// a jump. A preset names the rules that its owner writes into the built-in chain itself,
// such as Docker's MASQUERADE.
func (s Selector) MatchesPreset(t rules.TableName, chain string, r rules.Rule) bool {
	if s.namesRule(t, chain, r) {
		return true
	}
	if !slices.ContainsFunc(s.rules, func(r owners.Straight) bool { return r.Table == t && r.Chain == chain }) {
		return false // most rules of others are in INPUT; do not split them
	}
	words, err := r.Words()
	return err == nil && slices.ContainsFunc(s.rules, func(r owners.Straight) bool { return r.Matches(t, chain, words) })
}

// anyMatches reports whether the chain's name has any of the forms.
func anyMatches(list []owners.Form, chain string) bool {
	return owners.AnyMatches(list, chain)
}
