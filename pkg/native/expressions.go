package native

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// mapExpression rewrites one expression, the content of an NFTA_LIST_ELEM. f gets its name and
// its own attributes, and returns nil to leave it unchanged. Repairs of a dump and digests use
// it. An error means that the expression is damaged, or is f's.
func mapExpression(elem []byte, f func(name string, data []byte) ([]byte, error)) ([]byte, error) {
	name, err := nft.AttrOf(elem, unix.NFTA_EXPR_NAME)
	if err != nil {
		return nil, err
	}
	data, err := nft.AttrOf(elem, unix.NFTA_EXPR_DATA)
	if err != nil {
		return nil, err
	}
	changed, err := f(nft.String(name), data)
	if err != nil || changed == nil {
		return elem, err
	}
	out := nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, nft.String(name), 1)
	return appendNested(out, unix.NFTA_EXPR_DATA, changed), nil
}

// mapExpressions is mapExpression for a list of NFTA_LIST_ELEM. It returns the list itself if
// nothing changed. Some callers only visit the expressions: their f returns nil.
func mapExpressions(list []byte, f func(name string, data []byte) ([]byte, error)) ([]byte, error) {
	var out []byte
	changed := false
	for a, err := range attributes(list) {
		if err != nil {
			return nil, err
		}
		if a.kind != unix.NFTA_LIST_ELEM {
			return nil, fmt.Errorf("%w: attribute %d in a list of expressions", nft.ErrAttribute, a.kind)
		}
		elem, err := mapExpression(a.value, f)
		if err != nil {
			return nil, err
		}
		changed = changed || !sameList(elem, a.value)
		out = appendNested(out, unix.NFTA_LIST_ELEM, elem)
	}
	if !changed {
		return list, nil
	}
	return out, nil
}

// repair turns a dumped expression into a form that the kernel accepts; nil: it needs no
// change. decode and decodeElements repair all content by it. The kernel refuses its own dump
// of four kinds (measured on Linux 6.18).
func repair(name string, data []byte) ([]byte, error) {
	switch name {
	case "dynset":
		return repairDynset(data)
	case "quota":
		return repairQuota(data), nil
	case "exthdr":
		switch {
		case has(data, unix.NFTA_EXTHDR_SREG): // it writes
			return without(data, unix.NFTA_EXTHDR_FLAGS), nil
		case !has(data, unix.NFTA_EXTHDR_DREG): // it strips
			return without(data, unix.NFTA_EXTHDR_FLAGS, unix.NFTA_EXTHDR_OFFSET, unix.NFTA_EXTHDR_LEN), nil
		}
	case "osf":
		if has(data, osfFlags) && number(data, osfFlags) == 0 {
			return without(data, osfFlags), nil
		}
	}
	return nil, nil
}

// repairDynset drops a timeout of zero, for repair. It adds the flag that the kernel requires
// for a list of expressions, but does not dump. It also repairs these expressions.
func repairDynset(data []byte) ([]byte, error) {
	const hasExpressions = 2 // NFT_DYNSET_F_EXPR
	var out []byte
	flags := number(data, unix.NFTA_DYNSET_FLAGS)
	for a, err := range attributes(data) {
		if err != nil {
			return nil, err
		}
		switch a.kind {
		case unix.NFTA_DYNSET_FLAGS:
			continue
		case unix.NFTA_DYNSET_TIMEOUT:
			if timeout, err := nft.AttrUint64(a.value); err == nil && timeout == 0 {
				continue
			}
		case unix.NFTA_DYNSET_EXPR:
			elem, err := mapExpression(a.value, repair)
			if err != nil {
				return nil, err
			}
			out = appendNested(out, a.kind, elem)
			continue
		case dynsetExpressions:
			flags |= hasExpressions
			list, err := mapExpressions(a.value, repair)
			if err != nil {
				return nil, err
			}
			out = appendNested(out, a.kind, list)
			continue
		}
		out = appendRaw(out, a)
	}
	if flags != 0 {
		out = appendNumber(out, unix.NFTA_DYNSET_FLAGS, flags)
	}
	return out, nil
}

// repairQuota clears the flag of a used up quota, in a rule or an object: the consumed bytes
// show the same. It returns nil if the flag is not set.
func repairQuota(data []byte) []byte {
	const depleted = 2 // NFT_QUOTA_F_DEPLETED
	flags := number(data, unix.NFTA_QUOTA_FLAGS)
	if flags&depleted == 0 {
		return nil
	}
	return appendNumber(without(data, unix.NFTA_QUOTA_FLAGS), unix.NFTA_QUOTA_FLAGS, flags&^depleted)
}

// setNameOf returns the attribute in which an expression of that name (such as "lookup") names
// a set, 0 if it names none.
func setNameOf(expression string) uint16 {
	switch expression {
	case "lookup":
		return unix.NFTA_LOOKUP_SET
	case "dynset":
		return unix.NFTA_DYNSET_SET_NAME
	case "objref":
		return unix.NFTA_OBJREF_SET_NAME
	}
	return 0
}

// jumpOf returns the chain to which a verdict leads, "" if it leads to none. data is the data of an
// immediate or of an element.
func jumpOf(data []byte) string {
	return nft.String(nft.AttrPath(data, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CHAIN))
}

// immediateData is NFTA_IMMEDIATE_DATA.
const immediateData = 2

// names calls set for each set that a list of expressions names, and chain for each chain. It
// ends silently at damaged expressions. It does not find chains to which a set's elements lead.
func names(list []byte, set, chain func(string)) {
	_, _ = mapExpressions(list, func(name string, data []byte) ([]byte, error) {
		if kind := setNameOf(name); kind != 0 && has(data, kind) {
			set(nft.String(nft.AttrPath(data, kind)))
		}
		if name == "immediate" {
			if to := jumpOf(nft.AttrPath(data, immediateData)); to != "" {
				chain(to)
			}
		}
		return nil, nil
	})
}

// withoutState returns an expression's attributes without the values that packets change; nil
// if it has no such values. So neither a digest nor a rule's text changes with each packet.
func withoutState(name string, data []byte) []byte {
	switch name {
	case "counter", "last":
		return []byte{}
	case "quota":
		return without(data, unix.NFTA_QUOTA_CONSUMED, unix.NFTA_QUOTA_PAD)
	}
	return nil
}

// milliseconds encodes a duration as an attribute of elements.
func milliseconds(kind uint16, n uint64) []byte {
	return nft.AppendAttr(nil, kind, binary.BigEndian.AppendUint64(nil, n), 0)
}
