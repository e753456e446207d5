package native

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/nft"
)

// setFlags has the words of a set's flags, by bit. nft says the other flags in other ways.
var setFlags = []string{"", "constant", "interval", "", "timeout", "dynamic"}

// set says how a set or map is declared, on one line, without its elements. It is the line of a
// set in Lines, and the text of a quarantined set. A type without words is shown by its number.
func (w *words) set(s *Set) string {
	const objects, verdicts = 0x40, 0xffffff00
	word, keys := "set", number(s.Attrs, unix.NFTA_SET_KEY_TYPE)
	types := typeNames(typesOf(keys))
	if types == "" {
		types = fmt.Sprintf("[0x%x, %d bytes]", keys, number(s.Attrs, unix.NFTA_SET_KEY_LEN))
	}
	flags := number(s.Attrs, unix.NFTA_SET_FLAGS)
	switch data := number(s.Attrs, unix.NFTA_SET_DATA_TYPE); {
	case flags&objects != 0:
		word, types = "map", types+" : "+objectTypes[number(s.Attrs, unix.NFTA_SET_OBJ_TYPE)][0]
	case !has(s.Attrs, unix.NFTA_SET_DATA_TYPE):
	case data == verdicts:
		word, types = "map", types+" : verdict"
	default:
		values := typeNames(typesOf(data))
		if values == "" {
			values = fmt.Sprintf("[0x%x, %d bytes]", data, number(s.Attrs, unix.NFTA_SET_DATA_LEN))
		}
		word, types = "map", types+" : "+values
	}
	parts := []string{"type " + types}
	if size := number(attrOf(s.Attrs, unix.NFTA_SET_DESC), 1); size != 0 { // NFTA_SET_DESC_SIZE
		parts = append(parts, fmt.Sprintf("size %d", size))
	}
	var on []string
	for i, word := range setFlags {
		if flags&(1<<i) != 0 && word != "" {
			on = append(on, word)
		}
	}
	if len(on) > 0 {
		parts = append(parts, "flags "+strings.Join(on, ","))
	}
	if timeout, err := nft.AttrUint64(attrOf(s.Attrs, unix.NFTA_SET_TIMEOUT)); err == nil {
		parts = append(parts, "timeout "+durationWords(timeout))
	}
	return word + " " + name(s.Name) + " { " + strings.Join(parts, "; ") + "; }"
}

// A span is an element as people see it. The kernel has an interval's beginning and end as two
// elements.
type span struct {
	element Element
	from    []byte
	to      []byte // the last value; nil: only from
}

// spans returns the elements of a set, for its words. Without all it leaves out elements that
// packets and time change, as a comparison of two tables needs. Intervals and the elements of
// an anonymous set are in the order of their keys.
func spans(s *Set, all bool) (list []span) {
	flags := number(s.Attrs, unix.NFTA_SET_FLAGS)
	for _, e := range s.Elements {
		p := span{element: e, from: nft.AttrPath(e, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE), to: nft.AttrPath(e, elemKeyEnd, unix.NFTA_DATA_VALUE)}
		list = append(list, p)
	}
	pairs := flags&setInterval != 0 && !slices.ContainsFunc(list, func(p span) bool { return p.to != nil })
	passes := func(p span) bool { return !all && fleeting(s, p.element) }
	if !pairs && !s.Anonymous() {
		return slices.DeleteFunc(list, passes)
	}
	ends := func(p span) bool { return isEnd(p.element) }
	sorting.Stable(list, func(a, b span) int {
		if c := bytes.Compare(a.from, b.from); c != 0 || ends(a) == ends(b) {
			return c
		}
		if ends(a) {
			return -1
		}
		return 1
	})
	if !pairs {
		return list
	}
	var joined []span
	for i, p := range list {
		switch {
		case ends(p):
			continue
		case number(p.element, unix.NFTA_SET_ELEM_FLAGS)&elemCatchall != 0:
		case i+1 < len(list):
			p.to = before(list[i+1].from)
		default:
			p.to = bytes.Repeat([]byte{0xff}, len(p.from))
		}
		joined = append(joined, p)
	}
	return slices.DeleteFunc(joined, passes)
}

// before returns the number before a value in network byte order: the end of an interval in the
// kernel is the first value behind it.
func before(value []byte) []byte {
	all := slices.Clone(value)
	for i := len(all) - 1; i >= 0; i-- {
		all[i]--
		if all[i] != 0xff {
			break
		}
	}
	return all
}

// elements says the elements of a set, with keys of these types; nil: unknown, shown in
// hexadecimal digits. depth is that of the rule in which they are shown (0: none). all is as
// for spans.
func (w *words) elements(s *Set, kinds []*dataType, depth int, all bool) (texts []string) {
	list := spans(s, all)
	if s.Flags&setInterval != 0 { // the numbers of intervals are in network byte order
		kinds = slices.Clone(kinds)
		for i, d := range kinds {
			if d != nil && d.host {
				swapped := *d
				swapped.host, kinds[i] = false, &swapped
			}
		}
	}
	if number := func(p span) uint64 { return kinds[0].number(p.from) }; s.Anonymous() && len(kinds) == 1 && kinds[0] != nil && kinds[0].host && s.Flags&setInterval == 0 {
		sorting.Stable(list, func(a, b span) int { return int(int64(number(a)) - int64(number(b))) })
	}
	for _, p := range list {
		texts = append(texts, w.element(s, p, kinds, depth))
	}
	return texts
}

// element says an element: its key, and a map's value for it. It leaves out the rest of a
// timeout, which changes all the time. kinds and depth are as for elements.
func (w *words) element(s *Set, p span, kinds []*dataType, depth int) string {
	e := p.element
	text := "*"
	if number(e, unix.NFTA_SET_ELEM_FLAGS)&elemCatchall == 0 {
		text = typed(p.from, p.to, kinds)
	}
	if timeout, err := nft.AttrUint64(attrOf(e, unix.NFTA_SET_ELEM_TIMEOUT)); err == nil && timeout != 0 {
		text += " timeout " + durationWords(timeout)
	}
	switch {
	case has(e, elemExpressions):
		text += " " + w.expressions(attrOf(e, elemExpressions), depth+1)
	case has(e, unix.NFTA_SET_ELEM_EXPR):
		text += " " + w.expressions(nft.AppendAttr(nil, unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, attrOf(e, unix.NFTA_SET_ELEM_EXPR), 0), depth+1)
	}
	text += commentWords(attrOf(e, unix.NFTA_SET_ELEM_USERDATA))
	if data := attrOf(e, unix.NFTA_SET_ELEM_DATA); data != nil {
		text += " : "
		if value := nft.AttrPath(data, unix.NFTA_DATA_VALUE); value != nil {
			text += w.data(s, value)
		} else {
			text += w.verdict(data, depth)
		}
	}
	if object := attrOf(e, unix.NFTA_SET_ELEM_OBJREF); object != nil {
		text += " : " + strconv.Quote(nft.String(object))
	}
	return text
}

// data says a map's value; s is the map. A map of ranges has two values for each key, the first
// and the last of the range.
func (w *words) data(s *Set, value []byte) string {
	kinds := typesOf(number(s.Attrs, unix.NFTA_SET_DATA_TYPE))
	if len(kinds) == 1 && kinds[0].size != 0 && len(value) == 2*((kinds[0].size+3)&^3) {
		return typed(value[:len(value)/2], value[len(value)/2:], kinds)
	}
	return typed(value, nil, kinds)
}

// setOfRule says a set in a rule: its name or, if it belongs to the rule, its elements with
// keys of these types. depth is that of the rule. Too deep or too large a set is shown by its
// name.
func (w *words) setOfRule(called string, kinds []*dataType, depth int) string {
	s := w.sets[called]
	if s == nil || !s.Anonymous() || !w.inlines(1+len(s.Elements), depth) {
		return "@" + name(called)
	}
	if slices.Contains(kinds, nil) {
		kinds = nil
	}
	return "{ " + strings.Join(w.elements(s, kinds, depth+1, true), ", ") + " }"
}

// numberOf reads a number in network byte order, of any length that the kernel uses. ok is
// false for another length: generic then shows digits.
func numberOf(value []byte) (n uint64, ok bool) {
	switch len(value) {
	case 1, 2, 4, 8:
	default:
		return 0, false
	}
	for _, b := range value {
		n = n<<8 | uint64(b)
	}
	return n, true
}

// generic says attributes by their numbers, for a flowtable or an object that has no words. If
// they are damaged, it shows all bytes.
func generic(list []byte) string {
	var all []string
	for a, err := range attributes(list) {
		if err != nil {
			return "0x" + hex.EncodeToString(list)
		}
		if n, ok := numberOf(a.value); ok {
			all = append(all, fmt.Sprintf("%d %d", a.kind, n))
			continue
		}
		all = append(all, fmt.Sprintf("%d 0x%s", a.kind, hex.EncodeToString(a.value)))
	}
	return strings.Join(all, " ")
}
