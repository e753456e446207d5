package native

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A term is the content of a register at one place of a rule, in words.
type term struct {
	text string
	kind *dataType
	size int // in bytes
	// value is the value of an immediate. The expression that reads it knows its type.
	value []byte
	// mask and xor are the operation (value & mask) ^ xor, if it is not in text yet.
	mask, xor []byte
	swapped   bool // the value is in the opposite of kind's byte order
	shifted   bool
	implies   layer   // a header of that layer implies a comparison with this term
	fields    []field // the adjacent fields, if a load has several
	// parts are the types of a map's data with several fields.
	parts []*dataType
}

// A layer is one of the headers of a packet.
type layer uint8

const (
	noLayer layer = iota
	linkLayer
	networkLayer
	transportLayer
)

// A sentence is a rule that is being put into the language of nft, expression by expression. An
// expression without words is a placeholder between brackets.
type sentence struct {
	w         *words
	depth     int
	said      []string
	registers map[int]term // by the place of the first byte
	network   string       // the protocol, once a comparison names it
	transport string
	implied   []implied // the last comparisons, which the next header may imply
	rest      []expression
}

type implied struct {
	layer layer
	text  string
}

// An expression is one expression of a rule, with its attributes.
type expression struct {
	name string
	data []byte
}

func (e expression) number(kind uint16) uint32 { return number(e.data, kind) }
func (e expression) has(kind uint16) bool      { return has(e.data, kind) }
func (e expression) value(kind uint16) []byte {
	return nft.AttrPath(e.data, kind, unix.NFTA_DATA_VALUE)
}

// expressions says a rule's list of expressions, as nft does. depth is that of the rule within
// others.
func (w *words) expressions(list []byte, depth int) string {
	s := &sentence{w: w, depth: depth, registers: map[int]term{}}
	switch w.family {
	case tableid.IPv4:
		s.network = "ip"
	case tableid.IPv6:
		s.network = "ip6"
	case tableid.ARP:
		s.network = "arp"
	}
	for a, err := range attributes(list) {
		if err != nil {
			s.say("[not readable]")
			break
		}
		s.rest = append(s.rest, expression{nft.String(attrOf(a.value, unix.NFTA_EXPR_NAME)), attrOf(a.value, unix.NFTA_EXPR_DATA)})
	}
	for len(s.rest) > 0 {
		e := s.rest[0]
		s.rest = s.rest[1:]
		if !s.expression(e) {
			s.placeholder(e)
		}
	}
	s.flush()
	return strings.Join(s.said, " ")
}

// expression says one expression by wordings, or keeps its value for later ones. false: it has
// no words, or an unknown attribute, and placeholder says it.
func (s *sentence) expression(e expression) bool {
	known := wordings[e.name]
	if known.say == nil {
		return false
	}
	for a, err := range attributes(e.data) {
		if err != nil || a.kind > known.last {
			return false // it has an attribute without words
		}
	}
	return known.say(s, e)
}

// placeholder says an expression without words, or keeps a placeholder for the register that it
// fills. Two different expressions have different texts.
func (s *sentence) placeholder(e expression) {
	text := "[" + name(e.name)
	data := e.data
	if less := withoutState(e.name, data); less != nil {
		data = less
	}
	if digits := hex.EncodeToString(data); len(digits) > 48 { // with a sum, so that two texts differ
		sum := sha256.Sum256(data)
		text += " 0x" + digits[:24] + ".." + hex.EncodeToString(sum[:4])
	} else if digits != "" {
		text += " 0x" + digits
	}
	text += "]"
	if kind := wordings[e.name].register; kind != 0 && e.has(kind) {
		s.store(e.number(kind), term{text: text, size: 16})
		return
	}
	if _, known := wordings[e.name]; !known {
		clear(s.registers) // it may have filled any register
	}
	s.say(text)
}

// say adds a statement, behind comparisons that no header implied.
func (s *sentence) say(text string) {
	s.flush()
	s.said = append(s.said, text)
}

// flush says the comparisons that may still be implied: no header implied them.
func (s *sentence) flush() {
	for _, d := range s.implied {
		s.said = append(s.said, d.text)
	}
	s.implied = nil
}

// imply drops the comparison that a header of a layer implies.
func (s *sentence) imply(l layer) {
	s.implied = slices.DeleteFunc(s.implied, func(d implied) bool { return d.layer == l })
}

// store notes a register's content until an expression reads it, and forgets terms that it
// overlaps.
func (s *sentence) store(register uint32, t term) {
	at := place(register)
	for other, has := range s.registers {
		if other < at+max(t.size, 4) && at < other+max(has.size, 4) {
			delete(s.registers, other)
		}
	}
	if at >= 0 {
		s.registers[at] = t
	}
}

// at returns the content of a register; if no expression has filled it, a placeholder.
func (s *sentence) at(register uint32) term {
	if t, known := s.registers[place(register)]; known {
		return t
	}
	return term{text: fmt.Sprintf("[register %d]", register)}
}

// masked returns a term's text, with its mask, as nft would write the operation.
func (t term) masked() string {
	if t.mask == nil {
		return t.text
	}
	// nft shows (v & mask) ^ xor as v & and ^ flip | or.
	and, flip, or := slices.Clone(t.mask), slices.Clone(t.xor), make([]byte, len(t.mask))
	for i := range and {
		or[i] = (and[i] & flip[i]) ^ flip[i]
		flip[i] &= and[i]
		and[i] |= or[i]
	}
	text := t.text
	if slices.ContainsFunc(and, func(b byte) bool { return b != 0xff }) {
		text += " & " + t.sayValue(and)
	}
	if !zero(flip) {
		text += " ^ " + t.sayValue(flip)
	}
	if !zero(or) {
		text += " | " + t.sayValue(or)
	}
	return text
}

func zero(value []byte) bool {
	return !slices.ContainsFunc(value, func(b byte) bool { return b != 0 })
}

// sayValue says a value that the term is compared or combined with, in the type and byte order
// of the term. A short value of an address is a prefix.
func (t term) sayValue(value []byte) string {
	if t.swapped {
		value = slices.Clone(value)
		slices.Reverse(value)
	}
	if k := t.kind; k != nil && k.size > len(value) && (k.style == address || k.style == interfaceName) {
		return k.sayPrefix(append(slices.Clone(value), make([]byte, k.size-len(value))...), 8*len(value))
	}
	return t.kind.say(value)
}

// sayRange says a range of values that the term is compared with, as sayValue does.
func (t term) sayRange(from, to []byte) string {
	if t.swapped {
		from, to = slices.Clone(from), slices.Clone(to)
		slices.Reverse(from)
		slices.Reverse(to)
	}
	return t.kind.sayRange(from, to)
}

// key returns the terms of size bytes from a register on, as a lookup reads them. kinds are the
// types of its fields; nil if a term is not known.
func (s *sentence) key(register uint32, size int) (text string, kinds []*dataType) {
	at, end := place(register), place(register)+size
	var texts []string
	for at >= 0 && at < end {
		t, known := s.registers[at]
		if !known || t.size == 0 {
			return strings.Join(append(texts, fmt.Sprintf("[register %d]", register)), " . "), nil
		}
		texts, kinds = append(texts, t.said(t.kind)), append(kinds, t.kind)
		at += (t.size + 3) &^ 3
	}
	return strings.Join(texts, " . "), kinds
}

// said returns the text of a term that is read as a value of type as. A constant has its type
// only from there.
func (t term) said(as *dataType) string {
	if t.value != nil {
		return as.say(t.value)
	}
	return t.masked()
}

var operators = []string{"==", "!=", "<", "<=", ">", ">="}

// compare says a comparison of a register with a value. A comparison that the next header may
// imply, as nft leaves it out, waits in implied.
func (s *sentence) compare(e expression) bool {
	t, value, op := s.at(e.number(unix.NFTA_CMP_SREG)), e.value(unix.NFTA_CMP_DATA), e.number(unix.NFTA_CMP_OP)
	if value == nil || op >= uint32(len(operators)) {
		return false
	}
	const equal, unequal, least, most = 0, 1, 5, 3
	operator := ""
	if op != equal {
		operator = operators[op] + " "
	}
	if op == least && len(s.rest) > 0 && s.rest[0].name == "cmp" {
		if next := s.rest[0]; next.number(unix.NFTA_CMP_OP) == most && next.number(unix.NFTA_CMP_SREG) == e.number(unix.NFTA_CMP_SREG) && t.mask == nil {
			if to := next.value(unix.NFTA_CMP_DATA); len(to) == len(value) && len(value) == t.size {
				s.rest = s.rest[1:]
				s.say(t.text + " " + t.sayRange(value, to))
				return true
			}
		}
	}
	switch {
	case t.mask == nil && t.shifted:
		s.say(t.text + " " + operators[op] + " " + t.sayValue(value))
	case t.mask == nil && op == equal && len(t.fields) > 0 && len(value) == t.size:
		s.imply(t.implies)
		if strings.HasPrefix(t.fields[0].name, "icmp") {
			s.imply(networkLayer)
		}
		for _, f := range t.fields {
			s.say(f.name + " " + f.kind.say(value[:f.size]))
			value = value[f.size:]
		}
	case t.mask == nil:
		text := t.text + " " + operator + t.sayValue(value)
		if op == equal && t.implies != noLayer && len(t.fields) == 0 {
			s.know(t, value)
			s.implied = append(s.implied, implied{t.implies, text})
			return true
		}
		if op == equal {
			s.know(t, value)
		}
		s.say(text)
	case t.kind != nil && t.kind.flags != nil && op == unequal && zero(value) && zero(t.xor):
		s.say(t.text + " " + t.sayValue(t.mask))
	case t.kind != nil && t.kind.style == address && (op == equal || op == unequal) && zero(t.xor) && len(value) == t.kind.size && leading(t.mask) > 0:
		s.say(t.text + " " + operator + t.kind.sayPrefix(value, leading(t.mask)))
	case t.kind != nil && t.kind.flags != nil && op <= unequal && zero(t.xor):
		s.say(t.text + " " + operator + t.sayValue(value) + " / " + t.sayValue(t.mask))
	default:
		s.say(t.masked() + " " + operators[op] + " " + t.sayValue(value))
	}
	return true
}

// leading returns the number of a mask's bits, if they are its first bits; else 0. compare then
// says the value as a prefix.
func leading(mask []byte) int {
	if length, is := prefixOf(make([]byte, len(mask)), complement(mask)); is {
		return length
	}
	return 0
}

// complement returns a mask with all bits flipped, in new memory, for leading.
func complement(mask []byte) []byte {
	all := make([]byte, len(mask))
	for i, b := range mask {
		all[i] = ^b
	}
	return all
}

// know notes the protocol that a comparison names. payload then names fields by it.
func (s *sentence) know(t term, value []byte) {
	switch {
	case t.kind == typeNFProto:
		s.network = map[string]string{"ipv4": "ip", "ipv6": "ip6"}[t.kind.say(value)]
	case t.kind == typeEthertype:
		s.network = t.kind.say(value)
	case t.kind == typeProto:
		s.transport = t.kind.say(value)
	}
}

// lookUp says a lookup, for wordings: whether a key is in a set, or the value that a map has
// for it. It has words for all forms (true).
func (s *sentence) lookUp(e expression) bool {
	set := s.w.sets[nft.String(attrOf(e.data, unix.NFTA_LOOKUP_SET))]
	size := 0
	if set != nil {
		size = int(number(set.Attrs, unix.NFTA_SET_KEY_LEN))
	}
	text, kinds := s.key(e.number(unix.NFTA_LOOKUP_SREG), size)
	if set == nil {
		text = s.at(e.number(unix.NFTA_LOOKUP_SREG)).masked()
	}
	in := s.w.setOfRule(nft.String(attrOf(e.data, unix.NFTA_LOOKUP_SET)), kinds, s.depth)
	const inverted = 1
	switch {
	case !e.has(unix.NFTA_LOOKUP_DREG) && e.number(unix.NFTA_LOOKUP_FLAGS) == inverted:
		s.say(text + " != " + in)
	case !e.has(unix.NFTA_LOOKUP_DREG):
		s.say(text + " " + in)
	case e.number(unix.NFTA_LOOKUP_DREG) == unix.NFT_REG_VERDICT:
		s.say(text + " vmap " + in)
	default:
		t := term{text: text + " map " + in, size: 16}
		if set != nil {
			t.size = int(number(set.Attrs, unix.NFTA_SET_DATA_LEN))
			if t.parts = typesOf(number(set.Attrs, unix.NFTA_SET_DATA_TYPE)); len(t.parts) == 1 {
				t.kind = t.parts[0]
			}
		}
		s.store(e.number(unix.NFTA_LOOKUP_DREG), t)
	}
	return true
}

// bitwise keeps an operation on the bits of a register in its term, for wordings. false: the
// operation, or one more of them, has no words.
func (s *sentence) bitwise(e expression) bool {
	const byMask, left, right = 0, 1, 2
	t := s.at(e.number(unix.NFTA_BITWISE_SREG))
	switch op := e.number(bitwiseOp); {
	case op == byMask && t.mask == nil && !t.shifted && t.value == nil:
		t.mask, t.xor = e.value(unix.NFTA_BITWISE_MASK), e.value(unix.NFTA_BITWISE_XOR)
		if len(t.mask) == 0 || len(t.mask) != len(t.xor) {
			return false
		}
	case (op == left || op == right) && t.mask == nil && t.value == nil:
		t.text += map[uint32]string{left: " << ", right: " >> "}[op] + typeNumber.say(e.value(bitwiseData))
		t.shifted = true
	default:
		return false
	}
	t.implies = noLayer
	s.store(e.number(unix.NFTA_BITWISE_DREG), t)
	return true
}

const (
	bitwiseOp   = 6
	bitwiseData = 7
)

// swap notes that a number is in the other byte order. nft shows no such step.
func (s *sentence) swap(e expression) bool {
	t := s.at(e.number(unix.NFTA_BYTEORDER_SREG))
	if t.kind == nil || t.mask != nil || t.value != nil || e.number(unix.NFTA_BYTEORDER_SIZE) != e.number(unix.NFTA_BYTEORDER_LEN) {
		return false
	}
	t.swapped = !t.swapped && hostIsLittle
	s.store(e.number(unix.NFTA_BYTEORDER_DREG), t)
	return true
}

// between says whether a value is in a range; false if it has no words.
func (s *sentence) between(e expression) bool {
	t, from, to := s.at(e.number(unix.NFTA_RANGE_SREG)), e.value(unix.NFTA_RANGE_FROM_DATA), e.value(unix.NFTA_RANGE_TO_DATA)
	if t.mask != nil || len(from) != len(to) || bytes.Equal(from, to) {
		return false
	}
	operator := map[uint32]string{0: " ", 1: " != "}[e.number(unix.NFTA_RANGE_OP)]
	if operator != "" {
		s.say(t.text + operator + t.sayRange(from, to))
	}
	return operator != ""
}

// immediate says the expression of that name: a verdict, or a constant in a register. A later
// expression, such as nat, says the constant. sentence.expression calls it through wordings. It
// returns true, because each such expression has words.
func (s *sentence) immediate(e expression) bool {
	data := attrOf(e.data, immediateData)
	if value := nft.AttrPath(data, unix.NFTA_DATA_VALUE); value != nil {
		s.store(e.number(unix.NFTA_IMMEDIATE_DREG), term{text: hexOf(value), size: len(value), value: value})
		return true
	}
	s.say(s.w.verdict(data, s.depth))
	return true
}
