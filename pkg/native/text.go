package native

import (
	"encoding/hex"
	"fmt"
	"iter"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Line is one part of a table in words for people. The part is the table itself, a chain, a rule,
// a set, an element, an object or a flowtable.
type Line struct {
	Kind nft.ObjectKind
	Of   string // the chain of a rule, the set of an element, else the part's own name
	Text string
}

// Lines yields the whole table in words, in the order in which they would make it. The words are
// nft's, as far as this package knows them. An expression, type or object without words is a
// placeholder between brackets, and the rest of its rule is in nft's language. Counted values and
// the rest of timeouts are left out.
func (t *Table) Lines() iter.Seq[Line] {
	return func(yield func(Line) bool) {
		for l := range t.linesOf(func(nft.ObjectKind, string) bool { return true }, nil) {
			if !yield(l) {
				return
			}
		}
	}
}

// linesOf yields the lines of the parts that wanted accepts: chains with their rules, sets with
// their elements, and so on. With c it leaves out elements that packets and time change, and
// yields the digest of each rule. Two rules may have one text, as in nft itself.
func (t *Table) linesOf(wanted func(nft.ObjectKind, string) bool, c *contents) iter.Seq2[Line, Digest] {
	return func(yield func(Line, Digest) bool) {
		w := newWords(t)
		going := true
		say := func(kind nft.ObjectKind, of, text string) {
			going = going && yield(Line{kind, of, text}, Digest{})
		}
		if wanted(nft.Tables, t.ID.Name) {
			say(nft.Tables, t.ID.Name, "table "+t.ID.NFT()+tableFlagWords(t.Flags)+commentWords(attrOf(t.Attrs, tableUserdata)))
		}
		for i := 0; i < len(t.Chains) && going; i++ {
			if c := &t.Chains[i]; !c.Bound && wanted(nft.Chains, c.Name) {
				say(nft.Chains, c.Name, w.chain(c))
			}
		}
		for _, o := range t.Objects {
			if going && wanted(nft.Objects, o.Name) {
				say(nft.Objects, o.Name, objectWords(o))
			}
		}
		for _, f := range t.Flowtables {
			if going && wanted(nft.Flowtables, f.Name) {
				say(nft.Flowtables, f.Name, w.declaration(part{flowtable: &f}))
			}
		}
		for i := 0; i < len(t.Sets) && going; i++ {
			if s := &t.Sets[i]; !s.Anonymous() && wanted(nft.Sets, s.Name) {
				w.sayElements(s, c == nil, say)
			}
		}
		for i := 0; i < len(t.Chains) && going; i++ {
			ch := &t.Chains[i]
			for j := 0; !ch.Bound && wanted(nft.Chains, ch.Name) && j < len(ch.Rules) && going; j++ {
				var digest Digest
				if c != nil {
					digest = c.rule(ch.Rules[j])
				}
				going = yield(Line{nft.Rules, ch.Name, w.ruleLine(ch, j)}, digest)
			}
		}
	}
}

// sayElements says a set and its elements, each on a line of its own, for linesOf. all: also
// the elements that packets and time change.
func (w *words) sayElements(s *Set, all bool, say func(nft.ObjectKind, string, string)) {
	say(nft.Sets, s.Name, w.set(s))
	for _, text := range w.elements(s, typesOf(number(s.Attrs, unix.NFTA_SET_KEY_TYPE)), 0, all) {
		say(nft.Elements, s.Name, "element "+name(s.Name)+" "+text)
	}
}

// Difference returns in words the parts that a table has lost and gained, each in the order of
// its table. nil means no table. Rules in another order are in neither. Flush records and
// previews of a restore show it.
func Difference(was, now *Table) (lost, got []Line) {
	type part struct {
		kind nft.ObjectKind
		name string
	}
	changed := map[part]bool{}
	for _, c := range Diff(was, now) {
		changed[part{c.Kind, c.Name}] = true
	}
	wanted := func(kind nft.ObjectKind, name string) bool {
		return was == nil || now == nil || changed[part{kind, name}]
	}
	before, after := was.keyedLines(wanted), now.keyedLines(wanted)
	return linesWithout(before, after), linesWithout(after, before)
}

// A keyedLine is a line, with the rule's digest if it is a rule.
type keyedLine struct {
	Line
	digest Digest
}

// keyedLines returns the lines of some parts with digests, for Difference. A nil table has
// none.
func (t *Table) keyedLines(wanted func(nft.ObjectKind, string) bool) (all []keyedLine) {
	if t == nil {
		return nil
	}
	for l, digest := range t.linesOf(wanted, lazyContents(t)) {
		all = append(all, keyedLine{l, digest})
	}
	return all
}

// linesWithout returns the lines that are not among others, each as often as it is missing.
// Rules with one text are the same only if their digests are.
func linesWithout(lines, others []keyedLine) (rest []Line) {
	left := map[keyedLine]int{}
	for _, l := range others {
		left[l]++
	}
	for _, l := range lines {
		if left[l]--; left[l] < 0 {
			rest = append(rest, l.Line)
		}
	}
	return rest
}

// objectWords says an object without its counted values. An object without words of its own has
// its attributes by number in brackets.
func objectWords(o Object) string {
	var words string
	switch o.Type {
	case unix.NFT_OBJECT_COUNTER:
	case unix.NFT_OBJECT_QUOTA:
		words = strings.TrimPrefix(quotaWords(o.settings()), "quota ")
	case unix.NFT_OBJECT_LIMIT:
		words = strings.TrimPrefix(limitWords(o.settings()), "limit ")
	}
	if words == "" && o.Type != unix.NFT_OBJECT_COUNTER {
		words = "[" + generic(o.settings()) + "]"
	}
	return strings.TrimSpace(objectType(o.Type) + " " + name(o.Name) + " " + words)
}

// objectType names a type of objects, an unknown one by its number.
func objectType(kind uint32) string {
	if names, known := objectTypes[kind]; known {
		return names[0]
	}
	return fmt.Sprintf("object %d", kind)
}

const (
	// mostDepth bounds how deep the parts of a rule are shown within it, and mostInlined how many:
	// messages of a hostile kernel may have loops. 5,000 services have 10,000 such parts.
	mostDepth   = 8
	mostInlined = 1 << 20
)

// A words puts one table into words.
type words struct {
	family  tableid.Family
	chains  map[string]*Chain
	sets    map[string]*Set
	inlined int // rules and elements shown within a rule so far
}

// inlines reports whether n more rules and elements may be shown within a rule at that depth,
// and counts them. If not, the caller says the name of the chain or set instead.
func (w *words) inlines(n, depth int) bool {
	if depth >= mostDepth || w.inlined+n > mostInlined {
		return false
	}
	w.inlined += n
	return true
}

// name quotes the name of a part for a line of words, unless it is one plain word. So one line
// has one meaning.
func name(text string) string {
	if text != "" && !strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r == '"' || r == '\\' || r > '~' }) {
		return text
	}
	return strconv.Quote(text)
}

// tableFlagWords says a table's flags in the words of nft, behind its name; "" if it has none.
func tableFlagWords(flags uint32) string {
	var words []string
	for i, word := range []string{"dormant", "owner", "persist"} {
		if flags&(1<<i) != 0 {
			words = append(words, word)
		}
	}
	if unknown := flags &^ 7; unknown != 0 {
		words = append(words, fmt.Sprintf("%#x", unknown))
	}
	if len(words) == 0 {
		return ""
	}
	return " flags " + strings.Join(words, ", ")
}

// commentWords says the comment in a part's user data, behind its other words; "" if there is
// none. Its type is the same in all objects (NFTNL_UDATA_RULE_COMMENT and the like).
func commentWords(userdata []byte) string {
	if text := comment(userdata); text != "" {
		return " comment " + strconv.Quote(text)
	}
	return ""
}

// hookNames are the names of a family's hooks by their numbers, for the words of a base chain.
// The numbers are NF_INET_*, NF_BR_*, NF_ARP_* and NF_NETDEV_* in the kernel's headers.
func hookNames(f tableid.Family) []string {
	switch f {
	case tableid.Netdev:
		return []string{"ingress", "egress"}
	case tableid.ARP:
		return []string{"input", "output", "forward"}
	case tableid.Bridge:
		return []string{"prerouting", "input", "forward", "output", "postrouting"}
	}
	return []string{"prerouting", "input", "forward", "output", "postrouting", "ingress"}
}

// chain says how a chain is declared, without its rules: its line in Lines, and its text in
// quarantine.
func (w *words) chain(c *Chain) string {
	text := "chain " + name(c.Name)
	if c.Base {
		hook := attrOf(c.Attrs, unix.NFTA_CHAIN_HOOK)
		text += fmt.Sprintf(" type %s hook %s priority %d", name(nft.String(attrOf(c.Attrs, unix.NFTA_CHAIN_TYPE))),
			nameOf(hookNames(w.family), uint64(number(hook, unix.NFTA_HOOK_HOOKNUM))), int32(number(hook, unix.NFTA_HOOK_PRIORITY)))
		text += deviceWords(hook)
		if has(c.Attrs, unix.NFTA_CHAIN_POLICY) {
			text += " policy " + verdictName(int32(number(c.Attrs, unix.NFTA_CHAIN_POLICY)))
		}
	}
	return text + commentWords(attrOf(c.Attrs, chainUserdata))
}

// deviceWords says the network devices of a base chain's hook, "" if it has none. The kernel
// also dumps a single device in an attribute of its own.
func deviceWords(hook []byte) string {
	var devices []string
	for a, err := range attributes(attrOf(hook, hookDevs)) {
		switch {
		case err != nil:
		case a.kind == deviceName:
			devices = append(devices, name(nft.String(a.value)))
		case a.kind == devicePrefix:
			devices = append(devices, name(nft.String(a.value)+"*"))
		}
	}
	if one := attrOf(hook, unix.NFTA_HOOK_DEV); one != nil && len(devices) < 2 {
		devices = []string{name(nft.String(one))}
	}
	switch len(devices) {
	case 0:
		return ""
	case 1:
		return " device " + devices[0]
	}
	return " devices = { " + strings.Join(devices, ", ") + " }"
}

// rule says a rule with its comment, or other user data in hexadecimal digits. depth is that of
// the rule within others: 0 for a rule of a named chain.
func (w *words) rule(r Rule, depth int) string {
	text := w.expressions(r.expressions(), depth)
	if userdata := attrOf(r.Attrs, unix.NFTA_RULE_USERDATA); comment(userdata) == "" && len(userdata) > 0 {
		return text + " userdata 0x" + hex.EncodeToString(userdata)
	}
	return text + commentWords(attrOf(r.Attrs, unix.NFTA_RULE_USERDATA))
}

// verdict says the verdict in the data of an immediate or an element, and the rules of a chain
// that belongs to it. depth is that of the rule that has the verdict.
func (w *words) verdict(data []byte, depth int) string {
	v := verdictIn(data)
	text := verdictName(v.code)
	if v.chain == "" {
		return text
	}
	c := w.chains[v.chain]
	if c == nil || !c.Bound || !w.inlines(1+len(c.Rules), depth) {
		return text + " " + name(v.chain)
	}
	var rules []string
	for _, r := range c.Rules {
		rules = append(rules, w.rule(r, depth+1))
	}
	return text + " { " + strings.Join(rules, "; ") + " }"
}

// verdictName returns a verdict or a chain's policy in the words of nft.
func verdictName(code int32) string {
	switch code {
	case unix.NFT_CONTINUE:
		return "continue"
	case unix.NFT_BREAK:
		return "break"
	case unix.NFT_JUMP:
		return "jump"
	case unix.NFT_GOTO:
		return "goto"
	case unix.NFT_RETURN:
		return "return"
	case 0:
		return "drop"
	case 1:
		return "accept"
	}
	return fmt.Sprintf("verdict %d", code)
}

// nameOf returns a number's name, or the number if there are not so many names.
func nameOf(names []string, n uint64) string {
	if n < uint64(len(names)) {
		return names[n]
	}
	return strconv.FormatUint(n, 10)
}
