package native

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Line is one part of a table in words for people: the table itself, a chain, a rule, a set, an
// element, an object or a flowtable.
type Line struct {
	Kind nft.ObjectKind
	Of   string // the chain of a rule, the set of an element, else the part's own name
	Text string
}

// Lines yields the whole table in words, in the order in which they would make it. A rule is its
// expressions as the kernel has them, each between brackets, and not in the language of nft: that
// is known to nft of the owner's version only. What counters counted and what is left of timeouts
// is not in it.
func (t *Table) Lines() iter.Seq[Line] {
	return t.linesOf(func(nft.ObjectKind, string) bool { return true }, true)
}

// linesOf is Lines of some parts: chains with their rules, sets with their elements, and so on.
// Without all it leaves out elements that packets and time change.
func (t *Table) linesOf(wanted func(nft.ObjectKind, string) bool, all bool) iter.Seq[Line] {
	return func(yield func(Line) bool) {
		w := &words{family: t.ID.Family, chains: t.chainsByName(), sets: t.setsByName()}
		going := true
		say := func(kind nft.ObjectKind, of, text string) {
			going = going && yield(Line{kind, of, text})
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
				say(nft.Flowtables, f.Name, fmt.Sprintf("flowtable %s %s", name(f.Name), generic(f.Attrs)))
			}
		}
		for i := 0; i < len(t.Sets) && going; i++ {
			if s := &t.Sets[i]; !s.Anonymous() && wanted(nft.Sets, s.Name) {
				w.sayElements(s, all, say)
			}
		}
		for i := 0; i < len(t.Chains) && going; i++ {
			c := &t.Chains[i]
			for j := 0; !c.Bound && wanted(nft.Chains, c.Name) && j < len(c.Rules) && going; j++ {
				say(nft.Rules, c.Name, "rule "+name(c.Name)+" "+w.rule(c.Rules[j], 0))
			}
		}
	}
}

// sayElements says a set and its elements.
func (w *words) sayElements(s *Set, all bool, say func(nft.ObjectKind, string, string)) {
	say(nft.Sets, s.Name, w.set(s))
	for _, e := range s.Elements {
		if all || !fleeting(s, e) {
			say(nft.Elements, s.Name, "element "+name(s.Name)+" "+w.element(s, e, 0))
		}
	}
}

// Difference returns in words what a table has lost and got, each in the order of its table. A nil
// table is none. Rules in another order are in neither.
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
	var before, after []Line
	if was != nil {
		before = slices.Collect(was.linesOf(wanted, false))
	}
	if now != nil {
		after = slices.Collect(now.linesOf(wanted, false))
	}
	return linesWithout(before, after), linesWithout(after, before)
}

// linesWithout returns the lines that others are not among, each as often as it is missing.
func linesWithout(lines, others []Line) (rest []Line) {
	left := map[Line]int{}
	for _, l := range others {
		left[l]++
	}
	for _, l := range lines {
		if left[l]--; left[l] < 0 {
			rest = append(rest, l)
		}
	}
	return rest
}

// objectWords says an object, less what it counted.
func objectWords(o Object) string {
	return strings.TrimSpace(fmt.Sprintf("object %s type %d %s", name(o.Name), o.Type, generic(o.settings())))
}

const (
	// mostDepth is how deep what belongs to a rule is shown within it, and mostInlined how much of
	// it in all: no message of a hostile kernel's may lead in circles. 5,000 services have 10,000.
	mostDepth   = 8
	mostInlined = 1 << 20
)

// words say what is in one table.
type words struct {
	family  tableid.Family
	chains  map[string]*Chain
	sets    map[string]*Set
	inlined int // rules and elements that were shown within a rule
}

// inlines reports whether so much more is to be shown within a rule.
func (w *words) inlines(n, depth int) bool {
	if depth >= mostDepth || w.inlined+n > mostInlined {
		return false
	}
	w.inlined += n
	return true
}

// name quotes a name that is more than one plain word.
func name(text string) string {
	if text != "" && !strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r == '"' || r == '\\' || r > '~' }) {
		return text
	}
	return strconv.Quote(text)
}

// tableFlagWords says a table's flags in the words of nft.
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

func flagWords(attrs []byte, kind uint16) string {
	if n := number(attrs, kind); n != 0 {
		return fmt.Sprintf(" flags %#x", n)
	}
	return ""
}

// commentWords says the comment in user data; "" if there is none. Its type is the same in all
// objects (NFTNL_UDATA_RULE_COMMENT and the like).
func commentWords(userdata []byte) string {
	if text := comment(userdata); text != "" {
		return " comment " + strconv.Quote(text)
	}
	return ""
}

// hookNames are the names of a family's hooks by their numbers (NF_INET_*, NF_BR_*, NF_ARP_* and
// NF_NETDEV_* in the kernel's headers).
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

// deviceWords says the network devices of a hook. The kernel has one in an attribute of its own,
// too.
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

func (w *words) set(s *Set) string {
	text := fmt.Sprintf("set %s key %d bytes", name(s.Name), number(s.Attrs, unix.NFTA_SET_KEY_LEN))
	if has(s.Attrs, unix.NFTA_SET_DATA_TYPE) {
		text += fmt.Sprintf(" data %d bytes", number(s.Attrs, unix.NFTA_SET_DATA_LEN))
	}
	text += flagWords(s.Attrs, unix.NFTA_SET_FLAGS)
	if timeout, err := nft.AttrUint64(attrOf(s.Attrs, unix.NFTA_SET_TIMEOUT)); err == nil {
		text += fmt.Sprintf(" timeout %dms", timeout)
	}
	if size := number(attrOf(s.Attrs, unix.NFTA_SET_DESC), 1); size != 0 { // NFTA_SET_DESC_SIZE
		text += fmt.Sprintf(" size %d", size)
	}
	return text
}

// element says an element's key and where it leads.
func (w *words) element(s *Set, e Element, depth int) string {
	var text string
	switch flags := number(e, unix.NFTA_SET_ELEM_FLAGS); {
	case flags&elemCatchall != 0:
		text = "*"
	default:
		keys := number(s.Attrs, unix.NFTA_SET_KEY_TYPE)
		text = typed(nft.AttrPath(e, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE), keys)
		if end := nft.AttrPath(e, elemKeyEnd, unix.NFTA_DATA_VALUE); end != nil {
			text += " to " + typed(end, keys)
		}
		if flags&elemIntervalEnd != 0 {
			text = "before " + text
		}
	}
	if data := attrOf(e, unix.NFTA_SET_ELEM_DATA); data != nil {
		text += " : "
		if value := nft.AttrPath(data, unix.NFTA_DATA_VALUE); value != nil {
			text += typed(value, number(s.Attrs, unix.NFTA_SET_DATA_TYPE))
		} else {
			text += w.verdict(data, depth)
		}
	}
	if object := attrOf(e, unix.NFTA_SET_ELEM_OBJREF); object != nil {
		text += " : object " + name(nft.String(object))
	}
	if timeout, err := nft.AttrUint64(attrOf(e, unix.NFTA_SET_ELEM_TIMEOUT)); err == nil {
		text += fmt.Sprintf(" timeout %dms", timeout)
	}
	return text + commentWords(attrOf(e, unix.NFTA_SET_ELEM_USERDATA))
}

// rule says a rule's expressions.
func (w *words) rule(r Rule, depth int) string {
	text := w.expressions(r.expressions(), depth)
	if userdata := attrOf(r.Attrs, unix.NFTA_RULE_USERDATA); comment(userdata) == "" && len(userdata) > 0 {
		return text + " userdata 0x" + hex.EncodeToString(userdata)
	}
	return text + commentWords(attrOf(r.Attrs, unix.NFTA_RULE_USERDATA))
}

// verdict says a verdict, and the rules of a chain that belongs to it.
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

// verdictName is a verdict in the words of nft.
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

// nameOf is a number's name, or the number.
func nameOf(names []string, n uint64) string {
	if n < uint64(len(names)) {
		return names[n]
	}
	return strconv.FormatUint(n, 10)
}

// nft's numbers of data types (enum datatypes), and how many bytes a value has.
var dataTypes = map[uint32]int{7: 4, 8: 16, 12: 1, 13: 2}

// typed says a value. nft keeps the type with the set: several fields have six bits each, and each
// field takes whole words of four bytes.
func typed(value []byte, kind uint32) string {
	var kinds []uint32
	for ; kind != 0; kind >>= 6 {
		kinds = append(kinds, kind&0x3f)
	}
	slices.Reverse(kinds)
	var fields []string
	rest := value
	for i, k := range kinds {
		length := dataTypes[k]
		padded := (length + 3) &^ 3
		if last := i == len(kinds)-1; length == 0 || len(rest) < length || !last && len(rest) < padded || last && len(rest) > padded {
			return "0x" + hex.EncodeToString(value)
		}
		fields = append(fields, typedField(rest[:length], k))
		rest = rest[min(padded, len(rest)):]
	}
	if len(fields) == 0 {
		return "0x" + hex.EncodeToString(value)
	}
	return strings.Join(fields, " . ")
}

func typedField(value []byte, kind uint32) string {
	switch kind {
	case 12:
		if protocol := map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp"}[value[0]]; protocol != "" {
			return protocol
		}
		return strconv.Itoa(int(value[0]))
	case 13:
		return strconv.Itoa(int(binary.BigEndian.Uint16(value)))
	}
	address, _ := netip.AddrFromSlice(value) // of 4 or 16 bytes
	return address.String()
}
