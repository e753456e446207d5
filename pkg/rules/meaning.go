package rules

import (
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/sorting"
)

// Equal reports whether two rules mean the same to the kernel, in one family, in any
// spelling: whether their Meanings are equal. Comparisons of a read with the generation use
// it.
//
// It never reports two meanings as equal. It may report two spellings of one meaning as
// different, where this package does not know the match, the option or a name in it.
func (r Rule) Equal(o Rule) bool {
	if r.Is(o) {
		return true
	}
	if a, opaque := r.IdentityText(); opaque {
		b, too := o.IdentityText()
		return too && a == b
	}
	switch {
	case r.Target == o.Target:
	case r.Target != "" && o.Target != "", r.Target == "" && !r.mayLead(), o.Target == "" && !o.mayLead():
		return false
	}
	return r.Meaning() == o.Meaning()
}

// mayLead reports whether the text may have a target. A rule without a Target may be a text
// that was not parsed. But most are marks, and each look compares them with jumps.
func (r Rule) mayLead() bool { return r.Mentions("-j") || r.Mentions("-g") }

// Meaning returns the canonical spelling that all rules of r's meaning share. It is a rule's
// text, and its own Meaning. It is for comparisons and differs from the output of
// iptables-save.
//
// Rules get one Meaning if iptables 1.8.9 and the kernel treat them alike, measured on both
// backends. So the order of options within a match has no influence, nor have spellings of
// options, addresses, ports, protocols and marks. Matches that -p implies, defaults, and the
// place of comments have none either. The Meaning keeps the order of matches if any of them
// counts, remembers or may drop (xt_limit, xt_recent, xt_tcp's hotdrop). It keeps the words of
// unknown extensions, and all words of a rule that it cannot read.
//
// It needs no family: an address shows its family, and one family's defaults have no other
// meaning in the other family.
func (r Rule) Meaning() string {
	if digest, opaque := r.IdentityText(); opaque {
		return opaqueStart + digest
	}
	words, err := r.Words()
	if err != nil {
		return r.Spec
	}
	var exts roomForExtensions
	var opts roomForOptions
	f := form{exts: exts[:0], opts: opts[:0]}
	if !f.read(words) {
		return quoteAll(words)
	}
	w := writer{form: &f, text: make([]byte, 0, len(r.Spec)+16)}
	w.rule()
	return string(w.text)
}

// quoteAll returns words as a rule's text, each quoted where needed.
func quoteAll(words []string) string {
	quoted := make([]string, len(words))
	for i := range words {
		quoted[i] = Quote(words[i])
	}
	return strings.Join(quoted, " ")
}

// A writer writes the canonical text of a form.
type writer struct {
	*form
	text    []byte
	options []canonicalOption
}

// A canonicalOption is one option in its canonical spelling.
type canonicalOption struct {
	not         bool
	name, value string // value is quoted, and empty if there is none
}

// word adds a word to the canonical text, behind a space unless it is the first. The caller
// has quoted it.
func (w *writer) word(text string) {
	if len(w.text) > 0 {
		w.text = append(w.text, ' ')
	}
	w.text = append(w.text, text...)
}

// rule writes the canonical text of the whole rule for Meaning: base options, matches,
// comments, target. It sorts neighbouring pure matches.
func (w *writer) rule() {
	for i := range w.base {
		w.baseOption(&w.base[i])
	}
	order := w.order()
	for i := 0; i < len(order); {
		n := i + 1
		if w.isPure(order[i]) {
			for n < len(order) && w.isPure(order[n]) {
				n++
			}
		}
		w.run(order[i:n])
		i = n
	}
	for i := range w.exts {
		if w.isComment(i) {
			w.extension("-m", i)
		}
	}
	if w.target >= 0 {
		w.extension(w.jump, w.target)
	}
}

// order returns the matches without comments, in their order, for rule. A match that merges
// into an earlier one is not listed, and its options move to the earlier match.
func (w *writer) order() []int {
	order := make([]int, 0, len(w.form.exts))
	for i := range w.exts {
		if i == w.target || w.isComment(i) {
			continue
		}
		if first := w.mergesInto(order, i); first >= 0 {
			for j := range w.opts {
				if w.opts[j].owner == i {
					w.opts[j].owner = first
				}
			}
			continue
		}
		order = append(order, i)
	}
	return order
}

// mergesInto returns the earlier match, out of before, that takes the options of match i, or
// -1. Only pure matches may be between the two. order calls it.
func (w *writer) mergesInto(before []int, i int) int {
	known := w.exts[i].known
	if known == nil || !known.merges {
		return -1
	}
	n := len(before) - 1
	for n >= 0 && w.isPure(before[n]) {
		n--
	}
	if n < 0 || w.exts[before[n]].known != known || !w.disjoint(before[n], i) {
		return -1
	}
	return before[n]
}

// disjoint reports whether extensions a and b, of one name, share no option. mergesInto lets
// only such a pair merge. It overwrites w.options.
func (w *writer) disjoint(a, b int) bool {
	w.gather(a)
	first := slices.Clone(w.options)
	w.gather(b)
	return !slices.ContainsFunc(first, func(s canonicalOption) bool {
		return slices.ContainsFunc(w.options, func(o canonicalOption) bool { return o.name == s.name })
	})
}

func (w *writer) isComment(i int) bool { return i != w.target && w.exts[i].name == "comment" }

func (w *writer) isPure(i int) bool { return w.exts[i].known != nil && w.exts[i].known.pure }

// run writes a single match, or neighbouring matches whose order has no meaning; these it
// sorts. rule calls it for each such group.
func (w *writer) run(matches []int) {
	if len(matches) == 1 {
		w.extension("-m", matches[0])
		return
	}
	before := w.text
	texts := make([]string, len(matches))
	for i, m := range matches {
		w.text = nil
		w.extension("-m", m)
		texts[i] = string(w.text)
	}
	w.text = before
	slices.Sort(texts)
	for _, t := range texts {
		w.word(t)
	}
}

// baseOption writes one option that belongs to no extension (-s, -d, -p, -i, -o, -f) in its
// canonical spelling. rule calls it for each. It writes nothing if the rule lacks the option,
// or if every packet satisfies it, such as -s 0.0.0.0/0. A value that it cannot read stays as
// it is.
func (w *writer) baseOption(s *setting) {
	if !s.given {
		return
	}
	if s.name == "-f" {
		w.not(s.not)
		w.word("-f")
		return
	}
	text, ok := s.words[0], true
	any := false
	switch s.name {
	case "-s", "-d":
		text, ok = address(text)
		any = ok && strings.HasSuffix(text, "/0")
	case "-p":
		text, ok = protocol(text)
		any = text == "0"
	default:
		any = text == "+"
	}
	if !ok {
		text = s.words[0]
	}
	if any && !s.not { // every packet has an address, a protocol and an interface
		return
	}
	w.not(s.not)
	w.word(s.name)
	w.word(Quote(text))
}

// not adds "!" before an option that is negated.
func (w *writer) not(not bool) {
	if not {
		w.word("!")
	}
}

// extension writes extension i with its options behind flag, which is -m, -j or -g.
func (w *writer) extension(flag string, i int) {
	w.word(flag)
	w.word(Quote(w.exts[i].name))
	w.gather(i)
	for _, s := range w.options {
		w.not(s.not)
		w.word(s.name)
		if s.value != "" {
			w.word(s.value)
		}
	}
}

// gather sets w.options to the options of extension i in canonical spelling; it sorts those
// of a known extension. extension and disjoint call it.
func (w *writer) gather(i int) {
	w.options = w.options[:0]
	known := w.exts[i].known
	for j := range w.opts {
		if s := &w.opts[j]; s.owner == i {
			if known == nil {
				w.options = append(w.options, canonicalOption{not: s.not, name: Quote(s.name)})
			} else {
				w.translate(known, s)
			}
		}
	}
	if known != nil && len(w.options) > 1 {
		sorting.Stable(w.options, func(a, b canonicalOption) int { return strings.Compare(a.name, b.name) })
	}
}

// translate appends one option of a known extension in its canonical spelling, for gather.
// If a value cannot be read, the option stays as it is.
func (w *writer) translate(known *vocabulary, s *setting) {
	o := known.options[s.name]
	values := ""
	for i, word := range s.words {
		v, ok := o.values[i](word)
		if !ok {
			w.options = append(w.options, canonicalOption{s.not, s.name, quoteAll(s.words)})
			return
		}
		if i > 0 {
			values += " "
		}
		values += Quote(v)
	}
	not := s.not
	if not && o.opposite != nil {
		if v, ok := o.opposite(values); ok {
			not, values = false, v
		}
	}
	if o.means == nil {
		w.addUnlessDefault(known, canonicalOption{not, s.name, values})
		return
	}
	for _, m := range o.means {
		name, fixed, given := strings.Cut(m, " ")
		if !given {
			fixed = values
		}
		w.addUnlessDefault(known, canonicalOption{not, name, fixed})
	}
}

// addUnlessDefault adds an option to w.options, unless its value is the default of the
// extension: then it has no meaning.
func (w *writer) addUnlessDefault(known *vocabulary, s canonicalOption) {
	if s.not || !slices.Contains(known.defaults[s.name], s.value) {
		w.options = append(w.options, s)
	}
}
