package native

import (
	"bytes"
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/nft"
)

// A setIndex finds elements by their key.
type setIndex struct {
	keyLength int
	all       [][]byte // elements that a key may lead to
	byKey     map[string][]byte
	// bounds are the beginnings and ends of intervals, in the order of keys. An interval lasts
	// until the next bound. ranges are the ranges of several fields, and fields the lengths of
	// these.
	bounds []setBound
	ranges []setRange
	fields []int
	other  []byte // the catch-all element
	// vague: the content is not certain, because of timeouts or of rules that add elements.
	vague bool
}

type setBound struct{ key, element []byte } // no element: an end

type setRange struct{ from, to, element []byte }

// indexOf returns the index of a set, made when the first flow reaches the set. A set whose
// elements time or rules change is vague: no lookup in it is certain.
func (t *natTable) indexOf(s *Set) *setIndex {
	if index := t.index[s.Name]; index != nil {
		return index
	}
	index := &setIndex{keyLength: int(number(s.Attrs, unix.NFTA_SET_KEY_LEN)), byKey: make(map[string][]byte, len(s.Elements)),
		vague: s.Flags&(setTimeout|setEval) != 0}
	if s.ranges() {
		index.fields = fieldsOf(s)
		index.vague = index.vague || index.fields == nil
	}
	for _, e := range s.Elements {
		index.add(s, e)
	}
	// An end is before a beginning with the same key: Set.sort has this order, and a stable sort
	// keeps it.
	sorting.Stable(index.bounds, func(a, b setBound) int { return bytes.Compare(a.key, b.key) })
	t.index[s.Name] = index
	return index
}

// fieldsOf returns the lengths, in bytes, of the fields of a set with ranges of several fields.
// nil: they are not known, so the set is vague.
func fieldsOf(s *Set) (all []int) {
	const concat, length = 2, 1 // NFTA_SET_DESC_CONCAT, NFTA_SET_FIELD_LEN
	for a, err := range attributes(nft.AttrPath(s.Attrs, unix.NFTA_SET_DESC, concat)) {
		if err != nil {
			return nil
		}
		all = append(all, int(number(a.value, length)))
	}
	return all
}

// add adds an element of s to the index, for indexOf. Ends of intervals are no elements that a
// key may lead to. An element that it cannot read makes the set vague.
func (i *setIndex) add(s *Set, e Element) {
	flags := number(e, unix.NFTA_SET_ELEM_FLAGS)
	key := nft.AttrPath(e, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE)
	i.vague = i.vague || mayBreak(e)
	switch {
	case flags&elemCatchall != 0:
		i.other = e
	case len(key) != i.keyLength:
		i.vague = true
	case i.fields != nil:
		to := nft.AttrPath(e, elemKeyEnd, unix.NFTA_DATA_VALUE)
		if to == nil {
			to = key
		}
		i.vague = i.vague || len(to) != len(key)
		i.ranges = append(i.ranges, setRange{key, to, e})
	case s.Flags&setInterval != 0 && flags&elemIntervalEnd != 0:
		i.bounds = append(i.bounds, setBound{key: key})
		return
	case s.Flags&setInterval != 0:
		i.bounds = append(i.bounds, setBound{key, e})
	default:
		i.byKey[string(key)] = e
	}
	i.all = append(i.all, e)
}

// mayBreak reports whether an element has an expression that may end the rule that looks it up,
// such as a limit.
func mayBreak(element []byte) bool {
	breaks := func(expression []byte) bool {
		name := nft.String(attrOf(expression, unix.NFTA_EXPR_NAME))
		return name != "counter" && name != "last"
	}
	if list := attrOf(element, elemExpressions); list != nil {
		for a, err := range attributes(list) {
			if err != nil || breaks(a.value) {
				return true
			}
		}
	}
	one := attrOf(element, unix.NFTA_SET_ELEM_EXPR)
	return one != nil && breaks(one)
}

// find returns the element of a key, for rules that look up a set or a map. If sure is false,
// it may be another element or none, so the walk must not rely on it.
func (i *setIndex) find(key []byte) (element []byte, found, sure bool) {
	switch {
	case i.vague || len(key) != i.keyLength:
		return nil, false, false
	case i.fields != nil:
		for _, r := range i.ranges {
			if !i.holds(r, key) {
				continue
			}
			if found { // the kernel takes one of them
				return nil, false, false
			}
			element, found = r.element, true
		}
	case i.bounds != nil:
		at, _ := slices.BinarySearchFunc(i.bounds, key, func(b setBound, key []byte) int {
			if bytes.Compare(b.key, key) <= 0 {
				return -1
			}
			return 1
		})
		if at > 0 {
			element = i.bounds[at-1].element
		}
		found = element != nil
	default:
		element, found = i.byKey[string(key)]
	}
	if !found && i.other != nil {
		return i.other, true, true
	}
	return element, found, true
}

// holds reports whether each field of a key is in a range, as the kernel compares them. A field
// takes whole words of four bytes.
func (i *setIndex) holds(r setRange, key []byte) bool {
	at := 0
	for _, length := range i.fields {
		end := at + length
		if length <= 0 || end > len(key) || bytes.Compare(key[at:end], r.from[at:end]) < 0 || bytes.Compare(key[at:end], r.to[at:end]) > 0 {
			return false
		}
		at += (length + 3) &^ 3
	}
	return true
}

// numbersAll reports whether the keys are exactly the numbers below n. Then each number that
// numgen may choose has an element, and a rule certainly finds one of them.
func (i *setIndex) numbersAll(n uint32) bool {
	if i.keyLength != 4 || i.other != nil || uint32(len(i.byKey)) != n || len(i.all) != len(i.byKey) {
		return false
	}
	for number := range n {
		if _, there := i.byKey[string(binary.NativeEndian.AppendUint32(nil, number))]; !there {
			return false
		}
	}
	return true
}
