package native

import (
	"encoding/binary"
	"iter"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// This file names attributes of linux/netfilter/nf_tables.h that golang.org/x/sys lacks or lists
// incompletely. It also has the functions that walk lists of attributes.

const (
	tableFlags    = 2
	tableHandle   = 4
	tablePad      = 5
	tableUserdata = 6
	tableOwner    = 7

	chainFlags = 10
	chainID    = 11

	chainUserdata = 12

	setHandle      = 16
	setExpr        = 17
	setExpressions = 18
	setType        = 19 // dumped since Linux 6.16, refused by NEWSET
	setCount       = 20 // the same

	elemKeyEnd      = 10
	elemExpressions = 11

	objHandle = 6
	objPad    = 7

	flowOffloadTable = 1 // NFTA_FLOW_TABLE_NAME, of an expression

	flowHook   = 3
	flowUse    = 4
	flowHandle = 5
	flowPad    = 6

	hookDevs     = 4 // NFTA_HOOK_DEVS, a list
	flowHookDevs = 3 // NFTA_FLOWTABLE_HOOK_DEVS
	deviceName   = 1 // NFTA_DEVICE_NAME, in such a list
	devicePrefix = 2 // NFTA_DEVICE_PREFIX, of newer kernels: all devices whose names begin so

	dynsetExpressions = 10

	osfFlags = 3
)

// Flags of objects.
const (
	tableDormant = 1
	tableOwned   = 2

	chainBinding = 4

	setAnonymous = 1
	setConstant  = 2
	setInterval  = 4
	setTimeout   = 0x10
	setEval      = 0x20 // rules add elements

	elemIntervalEnd = 1
	elemCatchall    = 2
)

// An attr is one attribute of a list.
type attr struct {
	kind  uint16
	value []byte
	raw   []byte // the header, the value and the padding, if any
}

// attributes yields the attributes of a list. If the rest of the list is damaged, it yields an
// error and ends. Most callers then keep the list unchanged, or refuse the message.
func attributes(list []byte) iter.Seq2[attr, error] {
	return func(yield func(attr, error) bool) {
		for len(list) > 0 {
			kind, value, rest, err := nft.NextAttr(list)
			if err != nil {
				yield(attr{}, err)
				return
			}
			if !yield(attr{kind, value, list[:len(list)-len(rest)]}, nil) {
				return
			}
			list = rest
		}
	}
}

// appendRaw appends an attribute unchanged, for lists that are built again with some attributes
// changed. It adds the padding, which the last attribute of a list may lack.
func appendRaw(out []byte, a attr) []byte {
	out = append(out, a.raw...)
	for len(out)%4 != 0 {
		out = append(out, 0)
	}
	return out
}

// appendNested appends an attribute that is a list.
func appendNested(out []byte, kind uint16, list []byte) []byte {
	return nft.AppendAttr(out, kind|unix.NLA_F_NESTED, list, 0)
}

// appendNumber appends a number of 32 bits.
func appendNumber(out []byte, kind uint16, n uint32) []byte {
	return nft.AppendAttr(out, kind, binary.BigEndian.AppendUint32(nil, n), 0)
}

// without returns a list less the attributes of some kinds, in new memory. It returns a damaged
// list unchanged.
func without(list []byte, kinds ...uint16) []byte {
	var out []byte
	for a, err := range attributes(list) {
		if err != nil {
			return list
		}
		if !slices.Contains(kinds, a.kind) {
			out = appendRaw(out, a)
		}
	}
	return out
}

// number returns an attribute that is a number of 32 bits, 0 if there is none or it has another
// length. Where 0 is a value, callers check by has.
func number(list []byte, kind uint16) uint32 {
	n, err := nft.AttrUint32(nft.AttrPath(list, kind))
	if err != nil {
		return 0
	}
	return n
}

// has reports whether a list has an attribute of that kind.
func has(list []byte, kind uint16) bool {
	value, err := nft.AttrOf(list, kind)
	return err == nil && value != nil
}
