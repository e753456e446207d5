package protect

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
)

// rulePrefix begins a word of --protect that names rules of a built-in chain.
const rulePrefix = "rule:"

// Bounds of these words: each rule of a built-in chain is compared with each glob at each read.
const (
	maxRuleGlob  = 256 // bytes of a glob; a comment has 255 at most (XT_MAX_COMMENT_LEN)
	maxRuleWords = 64
)

// A ruleGlob names rules of a built-in chain by their text or by a comment.
type ruleGlob struct {
	table rules.TableName
	chain string
	glob  string // for path.Match, but a slash is an ordinary character; see flat
}

// flat replaces slashes, which * and ? of path.Match do not match. nf_tables allows slashes in
// the name of a table, and addresses have them.
var flat = strings.NewReplacer("/", "\x01")

// parseRule reads a word of --protect such as rule:filter:FORWARD:-i wg0 -j ACCEPT.
// NewSelector returns its error; Propose refuses a word with one.
func parseRule(word string) (ruleGlob, error) {
	table, rest, _ := strings.Cut(strings.TrimPrefix(word, rulePrefix), ":")
	chain, glob, found := strings.Cut(rest, ":")
	if !found || glob == "" {
		return ruleGlob{}, fmt.Errorf("%q is not rule:TABLE:CHAIN:GLOB, such as 'rule:filter:FORWARD:-i wg0 *'", word)
	}
	name := rules.TableName(table)
	switch {
	case !slices.Contains(Tables(), name):
		return ruleGlob{}, fmt.Errorf("%q names no table that canaryd guards: want one of %v", word, Tables())
	case !rules.Builtin(name, chain):
		return ruleGlob{}, fmt.Errorf("%q names no built-in chain of %s: a chain of its own is guarded by its name alone", word, table)
	case len(glob) > maxRuleGlob:
		return ruleGlob{}, fmt.Errorf("%.40q... has a glob of %d bytes: want %d at most", word, len(glob), maxRuleGlob)
	}
	if _, err := path.Match(flat.Replace(glob), ""); err != nil {
		return ruleGlob{}, fmt.Errorf("%q is not a glob of comments or rules: %w", word, err)
	}
	return ruleGlob{name, chain, flat.Replace(glob)}, nil
}

// of reports whether the word names rules of the built-in chain.
func (g ruleGlob) of(t rules.TableName, chain string) bool { return g.table == t && g.chain == chain }

// matches reports whether the glob matches the whole text of a rule, or the whole of a comment
// in it. The text is as canaryd shows it and as iptables-save prints it behind the chain's
// name.
func (g ruleGlob) matches(text string, words []string) bool {
	if g.is(text) {
		return true
	}
	for i := range len(words) - 1 {
		if words[i] == "--comment" && g.is(words[i+1]) {
			return true
		}
	}
	return false
}

func (g ruleGlob) is(text string) bool { return g.isFlat(flat.Replace(text)) }

// isFlat reports whether the glob matches a text without slashes.
func (g ruleGlob) isFlat(text string) bool {
	ok, _ := path.Match(g.glob, text) // parseRule checked the pattern
	return ok
}

// namesRule reports for MatchesPreset whether a word "rule:" names a rule of a built-in
// chain, by its text or its label.
func (s Selector) namesRule(t rules.TableName, chain string, r rules.Rule) bool {
	if !slices.ContainsFunc(s.ruleGlobs, func(g ruleGlob) bool { return g.of(t, chain) }) {
		return false
	}
	text, readable := r.Readable()
	words, err := rules.Split(text)
	return readable && err == nil && slices.ContainsFunc(s.ruleGlobs, func(g ruleGlob) bool {
		return g.of(t, chain) && g.matches(text, words)
	})
}
