package protect

import (
	"slices"
	"strings"
	"unicode"

	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Proposal lists unguarded rules of a built-in chain, and the word of --protect that would
// guard them.
type Proposal struct {
	Unguarded     // the first rule
	Count     int // number of rules for the word, or of the same owner without a word
	Word      string
	// Alike: no single word names just these rules, which differ in numbers and addresses only.
	// Each has a word of its own.
	Alike bool
}

// alike is the number of rules, different in numbers and addresses only, from which on one word
// is proposed for all. A value of --protect has at most 64 words "rule:".
const alike = 5

// Propose returns the words for single rules of a built-in chain, in the chain's order. It
// returns at most most proposals; more counts the rules that have no place among them. in are
// the tables of that name of all families, including the rules' own table, because a word
// applies to each family. A word names only its rules and equal rules. But for a rule of an
// owner with a preset the word is the preset. For a rule that leads into a chain the word names
// the chain.
func Propose(list []Unguarded, t rules.TableName, in []*rules.Table, most int) (proposals []Proposal, more int) {
	if len(list) == 0 {
		return nil, 0
	}
	p := newProposer(t, list[0].Chain, in)
	forms := map[string]map[rules.Key]bool{} // the rules of each form
	for _, u := range list {
		if p.hasForm(u) {
			form := numberless(u.Rule.Label())
			if forms[form] == nil {
				forms[form] = map[rules.Key]bool{}
			}
			forms[form][u.Rule.Key()] = true
		}
	}
	type group struct {
		word, owner, manager, form string
		opaque                     bool
	}
	at, equal := map[group]int{}, map[rules.Key]int{}
	for _, u := range list {
		if i := equal[u.Rule.Key()]; i > 0 {
			proposals[i-1].Count++
			continue
		}
		made, form := Proposal{Unguarded: u, Count: 1}, numberless(u.Rule.Label())
		_, readable := u.Rule.Readable()
		opaque := !readable
		g := group{owner: u.Owner, manager: u.Manager, opaque: opaque}
		full := len(proposals) >= most
		switch {
		case u.Manager != "" || opaque: // no word, and one line for all
		case len(forms[form]) >= alike && p.hasForm(u):
			if g.form = form; !full && at[g] == 0 {
				made.Word = p.wordForForm(form, forms[form])
				made.Alike = made.Word == ""
			}
		case u.Owner != "" || !full: // other rules are not shown
			if made.Word = p.wordFor(u.Rule); made.Word == "" {
				g.form = u.Rule.Label()
			}
			g.word = made.Word
		default:
			more++
			continue
		}
		switch i := at[g]; {
		case i > 0:
			proposals[i-1].Count++
		case full:
			more++
		default:
			proposals = append(proposals, made)
			at[g] = len(proposals)
			equal[u.Rule.Key()] = len(proposals)
		}
	}
	return proposals, more
}

// hasForm reports whether a rule may be proposed together with others of its form. It must have
// a text, lead nowhere and have no known owner.
func (p proposer) hasForm(u Unguarded) bool {
	_, readable := u.Rule.Readable()
	return readable && u.Owner == "" && u.Manager == "" && !p.leads(u.Rule.Target)
}

// A proposer finds words for rules of one built-in chain.
type proposer struct {
	table rules.TableName
	chain string
	rules []wordedRule // all rules of the chain that a glob can match
	leads func(chain string) bool
}

// A wordedRule is a rule with the texts that a glob may match: its own and its comments. They
// have no slashes, because each is compared with each proposed glob.
type wordedRule struct {
	key   rules.Key
	texts []string
}

// newProposer returns a proposer for the rules of a built-in chain. in are the tables of
// that name of all families: a word must name no other rule in any of them.
func newProposer(t rules.TableName, chain string, in []*rules.Table) proposer {
	p := proposer{table: t, chain: chain}
	seen := map[rules.Key]bool{}
	for _, table := range in {
		for _, r := range table.Rules(chain) {
			text, readable := r.Readable()
			words, err := rules.Split(text)
			if !readable || err != nil || seen[r.Key()] {
				continue
			}
			seen[r.Key()] = true
			worded := wordedRule{r.Key(), []string{flat.Replace(text)}}
			for i := range len(words) - 1 {
				if words[i] == "--comment" {
					worded.texts = append(worded.texts, flat.Replace(words[i+1]))
				}
			}
			p.rules = append(p.rules, worded)
		}
	}
	p.leads = func(chain string) bool {
		for _, table := range in {
			if chain != "" && table.Chain(chain) != nil {
				return true
			}
		}
		return false
	}
	return p
}

// wordFor returns the word for one rule: its chain's, its owner's preset, or a glob of its
// comment or text. It is "" if there is none. Propose calls it.
func (p proposer) wordFor(r rules.Rule) string {
	text, readable := r.Readable()
	words, err := rules.Split(text)
	if !readable || err != nil {
		return ""
	}
	if p.leads(r.Target) {
		return WordForChain(r.Target)
	}
	if o, known := owners.OfRule(p.table, p.chain, words); known && o.Preset != "" {
		return o.Preset
	}
	own := map[rules.Key]bool{r.Key(): true}
	text = literal(text)
	if len(text) > maxRuleGlob {
		text = text[:maxRuleGlob-1] + "*"
	}
	if comment, found := r.Comment(); found {
		if word := p.word(literal(comment), own); word != "" {
			return word
		}
	}
	return p.word(text, own)
}

// wordForForm returns the word for the rules own, which differ in numbers and addresses
// only; "" if it would also name other rules. Propose calls it.
func (p proposer) wordForForm(form string, own map[rules.Key]bool) string {
	parts := strings.Split(form, numberPlace)
	for i := range parts {
		parts[i] = literal(parts[i])
	}
	return p.word(strings.Join(parts, "*"), own)
}

// word returns the word with this glob; "" if --protect refuses it, or if it does not name
// exactly the rules own.
func (p proposer) word(glob string, own map[rules.Key]bool) string {
	word := rulePrefix + p.table + ":" + p.chain + ":" + glob
	parsed, err := parseRule(word)
	if err != nil || strings.TrimSpace(word) != word || strings.Trim(glob, "*? ") == "" {
		return ""
	}
	named := 0
	for _, r := range p.rules {
		if !slices.ContainsFunc(r.texts, parsed.isFlat) {
			continue
		}
		if !own[r.key] {
			return ""
		}
		named++
	}
	if named != len(own) {
		return ""
	}
	return word
}

// literal returns a glob for a text, for a word that Propose prints. A ? replaces each
// character that could have another meaning in a glob, the flag's value, a shell's quotes, a
// manifest or a unit of systemd.
func literal(text string) string {
	return strings.Map(func(r rune) rune {
		if r > unicode.MaxASCII || r < ' ' || r == 0x7f || strings.ContainsRune("*?[]\\\"',$%`", r) {
			return '?'
		}
		return r
	}, text)
}

// numberPlace marks the place of a number or an address in the form of a rule's text. No text
// has it, because a rule that iptables prints over two lines is opaque.
const numberPlace = "\n"

// numberless returns the form of a rule's text, by which Propose groups rules that differ in
// numbers only. It cuts each word that has a digit and is no option at its first digit, and
// appends numberPlace.
func numberless(text string) string {
	pieces := strings.Split(text, " ")
	for i, piece := range pieces {
		if at := strings.IndexAny(piece, "0123456789"); at >= 0 && !strings.HasPrefix(piece, "-") {
			pieces[i] = piece[:at] + numberPlace
		}
	}
	return strings.Join(pieces, " ")
}
