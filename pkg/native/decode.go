package native

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A form has the attributes that name an object. drop lists attributes that the kernel dumps, but
// does not accept in a message that makes the object.
type form struct {
	table, name, handle uint16
	drop                []uint16
}

// forms has the form of each kind. A rule's name is the name of its chain.
var forms = map[nft.ObjectKind]form{
	nft.Tables: {unix.NFTA_TABLE_NAME, unix.NFTA_TABLE_NAME, tableHandle,
		[]uint16{unix.NFTA_TABLE_USE, tablePad, tableOwner}},
	nft.Chains: {unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME, unix.NFTA_CHAIN_HANDLE,
		[]uint16{unix.NFTA_CHAIN_USE, unix.NFTA_CHAIN_PAD, chainID}},
	nft.Rules: {unix.NFTA_RULE_TABLE, unix.NFTA_RULE_CHAIN, unix.NFTA_RULE_HANDLE,
		[]uint16{unix.NFTA_RULE_POSITION, unix.NFTA_RULE_PAD, unix.NFTA_RULE_ID}},
	nft.Sets: {unix.NFTA_SET_TABLE, unix.NFTA_SET_NAME, setHandle,
		[]uint16{unix.NFTA_SET_ID, unix.NFTA_SET_PAD, setType, setCount}},
	nft.Objects: {unix.NFTA_OBJ_TABLE, unix.NFTA_OBJ_NAME, objHandle,
		[]uint16{unix.NFTA_OBJ_USE, objPad}},
	nft.Flowtables: {unix.NFTA_TABLE_NAME, unix.NFTA_OBJ_NAME, flowHandle,
		[]uint16{flowUse, flowPad}},
}

// A decoded is the result of decoding one message.
type decoded struct {
	table, name string
	handle      uint64
	attrs       []byte // the other attributes, in memory of their own
}

var errNameless = errors.New("an object has no name")

// decode splits the attributes of a message into names, handle and the rest, for reads and for
// the follower. It repairs the rest so that the kernel accepts it. An error means that the
// message is damaged, so the read fails or the table is read again.
func decode(kind nft.ObjectKind, list []byte) (d decoded, err error) {
	f := forms[kind]
	for a, err := range attributes(list) {
		switch {
		case err != nil:
			return decoded{}, fmt.Errorf("reading a %s: %w", kind, err)
		case a.kind == f.table:
			d.table = nft.String(a.value)
		case a.kind == f.handle:
			if d.handle, err = nft.AttrUint64(a.value); err != nil {
				return decoded{}, fmt.Errorf("reading a %s: %w", kind, err)
			}
		}
		switch {
		case a.kind == f.name:
			d.name = nft.String(a.value)
		case a.kind == f.table, a.kind == f.handle, slices.Contains(f.drop, a.kind):
		default:
			if d.attrs, err = appendRepaired(d.attrs, kind, a, list); err != nil {
				return decoded{}, fmt.Errorf("reading a %s: %w", kind, err)
			}
		}
	}
	if d.table == "" || d.name == "" {
		return decoded{}, fmt.Errorf("reading a %s: %w", kind, errNameless)
	}
	return d, nil
}

// appendRepaired appends attribute a of an object in a form that the kernel accepts. list has
// all attributes of the object: a quota is known by its type there.
func appendRepaired(out []byte, kind nft.ObjectKind, a attr, list []byte) ([]byte, error) {
	value, err := a.value, error(nil)
	switch {
	case kind == nft.Rules && a.kind == unix.NFTA_RULE_EXPRESSIONS,
		kind == nft.Sets && a.kind == setExpressions,
		kind == nft.Elements && a.kind == elemExpressions:
		value, err = mapExpressions(a.value, repair)
	case kind == nft.Sets && a.kind == setExpr,
		kind == nft.Elements && a.kind == unix.NFTA_SET_ELEM_EXPR:
		value, err = mapExpression(a.value, repair)
	case kind == nft.Objects && a.kind == unix.NFTA_OBJ_DATA && number(list, unix.NFTA_OBJ_TYPE) == unix.NFT_OBJECT_QUOTA:
		if repaired := repairQuota(a.value); repaired != nil {
			value = repaired
		}
	}
	if err != nil {
		return nil, err
	}
	if sameList(value, a.value) {
		return appendRaw(out, a), nil
	}
	return appendNested(out, a.kind, value), nil
}

// decodeTable decodes a table's own message, without its content. list has its attributes.
// readTable and the follower call it.
func decodeTable(family tableid.Family, list []byte) (*Table, error) {
	d, err := decode(nft.Tables, list)
	if err != nil {
		return nil, err
	}
	return &Table{ID: family.Table(d.name), Handle: d.handle, Attrs: d.attrs,
		Flags: number(list, unix.NFTA_TABLE_FLAGS), Owner: number(list, tableOwner)}, nil
}

// chain returns the decoded message as a chain, without rules. list has the message's
// attributes.
func (d decoded) chain(list []byte) Chain {
	return Chain{Name: d.name, Handle: d.handle, Attrs: d.attrs,
		Base:  has(list, unix.NFTA_CHAIN_HOOK),
		Bound: number(list, chainFlags)&chainBinding != 0}
}

// set returns the decoded message as a set, without elements.
func (d decoded) set(list []byte) Set {
	return Set{Name: d.name, Handle: d.handle, Attrs: d.attrs, Flags: number(list, unix.NFTA_SET_FLAGS)}
}

// object returns the decoded message as a stateful object.
func (d decoded) object(list []byte) Object {
	return Object{d.name, number(list, unix.NFTA_OBJ_TYPE), d.handle, d.attrs}
}

// decodeElements calls f for each element of a message, in a form that the kernel accepts.
// After an error f may have been called for some of them.
func decodeElements(list []byte, f func(Element)) error {
	elements, err := nft.AttrOf(list, unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	if err != nil {
		return fmt.Errorf("reading set elements: %w", err)
	}
	for e, err := range attributes(elements) {
		if err != nil {
			return fmt.Errorf("reading set elements: %w", err)
		}
		out := make([]byte, 0, len(e.value)+4)
		end := isEnd(e.value)
		for a, err := range attributes(e.value) {
			if err == nil && !droppedOfElement(a.kind, end) {
				out, err = appendRepaired(out, nft.Elements, a, e.value)
			}
			if err != nil {
				return fmt.Errorf("reading a set element: %w", err)
			}
		}
		f(out)
	}
	return nil
}

// isEnd reports whether an element is the end of an interval.
func isEnd(e Element) bool { return number(e, unix.NFTA_SET_ELEM_FLAGS)&elemIntervalEnd != 0 }

// droppedOfElement reports whether no message that adds an element may have this attribute.
// end: the element is the end of an interval. In a set with a timeout, Linux 6.18 dumps a
// timeout of 0 for such an end, and refuses it there (nf_tables_fill_setelem,
// nft_add_set_elem).
func droppedOfElement(kind uint16, end bool) bool {
	switch kind {
	case unix.NFTA_SET_ELEM_PAD:
		return true
	case unix.NFTA_SET_ELEM_TIMEOUT, unix.NFTA_SET_ELEM_EXPIRATION:
		return end
	}
	return false
}

// sort sorts the elements by key, the end of an interval before the beginning of the next, as
// nft sends them. A dump of a hash table has no order, and a dump of a tree has the reverse
// order. sort drops duplicates, which a dump has if the hash table grew meanwhile. Ranges of
// several fields keep their order: the kernel accepts a wide range behind a narrow one within
// it, but not the reverse (nft_pipapo_insert).
func (s *Set) sort() {
	if !s.ranges() {
		s.Elements = sortElements(s.Elements)
	}
}

// ranges reports whether the set has ranges of several fields.
func (s *Set) ranges() bool {
	const concat = 2 // NFTA_SET_DESC_CONCAT
	return s.Flags&setInterval != 0 && has(attrOf(s.Attrs, unix.NFTA_SET_DESC), concat)
}

// sortElements sorts elements by key, without duplicates, for Set.sort. Of two with one key,
// the end of an interval is first. It returns them in the memory of all.
func sortElements(all []Element) []Element {
	type sorted struct {
		key   []byte
		begin bool
		e     Element
	}
	list := make([]sorted, len(all))
	for i, e := range all {
		list[i] = sorted{attrOf(e, unix.NFTA_SET_ELEM_KEY), !isEnd(e), e}
	}
	sorting.Stable(list, func(a, b sorted) int {
		c := bytes.Compare(a.key, b.key)
		if c == 0 && a.begin != b.begin {
			if a.begin {
				return 1
			}
			return -1
		}
		return cmp.Or(c, bytes.Compare(a.e, b.e))
	})
	out := all[:0]
	for i, s := range list {
		if i == 0 || !bytes.Equal(s.e, list[i-1].e) {
			out = append(out, s.e)
		}
	}
	return out
}

// attrOf returns an attribute's value, nil if there is none or the list cannot be read.
func attrOf(list []byte, kind uint16) []byte { return nft.AttrPath(list, kind) }
