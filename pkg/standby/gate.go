package standby

import (
	"encoding/binary"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file writes gates. Each hook has a set, and is open while the set has an element. The
// element is the family's own number, which all of its packets have. For inet there are two: the
// numbers of IPv4 and IPv6.

// openMost is the timeout of an element in a gate's set, so that a stopped process leaves no hook
// open for longer. It is a second more than canaryd's own limits. gateSweep is the interval in
// which the kernel frees expired elements. Packets do not see an expired element.
const (
	openMost  = 32 * time.Second
	gateSweep = time.Minute
)

// gateFlags allow rules to add elements, and elements to expire. gateRoom is the number of elements
// in a set, including expired elements until the next sweep.
const (
	gateFlags = unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL
	gateRoom  = 16
)

// setOf returns the name of the set that opens a hook while it has an element.
func setOf(h Hook) string { return "open-" + h.String() }

// gateSet returns the attributes of a gate's set behind its names. The writers of nat's copy
// and of native copies make such a set for each hook. Its elements expire after openMost.
func gateSet() []byte {
	attrs := number(nil, unix.NFTA_SET_FLAGS, gateFlags)
	attrs = number(number(attrs, unix.NFTA_SET_KEY_TYPE, typeNFProto), unix.NFTA_SET_KEY_LEN, 1)
	attrs = nft.AppendAttr(attrs, unix.NFTA_SET_DESC|unix.NLA_F_NESTED, number(nil, unix.NFTA_SET_DESC_SIZE, gateRoom), 0)
	attrs = nft.AppendAttr(attrs, unix.NFTA_SET_TIMEOUT, binary.BigEndian.AppendUint64(nil, uint64(openMost.Milliseconds())), 0)
	return number(attrs, unix.NFTA_SET_GC_INTERVAL, uint32(gateSweep.Milliseconds()))
}

// gate returns the rule of a base chain that accepts packets unless the hook is open.
func gate(h Hook) rule { return rule{expressions: verdict(ifShut(nil, h), nfAccept)} }

// ifShut appends expressions that match while the hook is shut. gate accepts such packets;
// missed logs them. They use the register NFT_REG_1.
func ifShut(list []byte, h Hook) []byte {
	lookup := nft.AppendAttr(nil, unix.NFTA_LOOKUP_SET, setOf(h), 1)
	lookup = number(number(lookup, unix.NFTA_LOOKUP_SREG, unix.NFT_REG_1), unix.NFTA_LOOKUP_FLAGS, lookupInvert)
	return expression(expression(list, "meta", nfProto()), "lookup", lookup)
}

// nfProto returns the attributes of an expression that loads the number of a packet's family.
func nfProto() []byte {
	return number(number(nil, unix.NFTA_META_KEY, unix.NFT_META_NFPROTO), unix.NFTA_META_DREG, unix.NFT_REG_1)
}

// inFront returns the rules in front of the copied rules of a nat base chain, for both kinds of
// copies. They are the gate and, in OUTPUT before it, the rules that match the knocks of all
// hooks.
func inFront(h Hook) (front []rule) {
	if h == Output {
		for _, at := range Hooks() {
			front = append(front, knocked(at))
		}
	}
	return append(front, gate(h))
}

// packetsOf returns the families of the packets that a table of one family sees. A gate needs
// an element and a knock for each of them.
func packetsOf(family tableid.Family) []tableid.Family {
	if family == tableid.Inet {
		return []tableid.Family{tableid.IPv4, tableid.IPv6}
	}
	return []tableid.Family{family}
}

// element writes an element that opens a hook. writer.open calls it for a table with gates. The
// element expires after openMost.
func element(b *nft.Batch, t *table, h Hook) {
	b.Begin(unix.NFT_MSG_NEWSETELEM, netlink.Create, t.id.Family)
	b.Text(unix.NFTA_SET_ELEM_LIST_TABLE, t.name)
	b.Text(unix.NFTA_SET_ELEM_LIST_SET, setOf(h))
	var list []byte
	for _, f := range packetsOf(t.id.Family) {
		list = nft.AppendAttr(list, unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, value(nil, unix.NFTA_SET_ELEM_KEY, []byte{uint8(f)}), 0)
	}
	b.Blob(unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED, list)
	b.End()
}

// noElement shuts a hook: it empties the set, even if its element has expired. shut calls it,
// and the removal of a base chain, whose set stays for a later copy.
func noElement(b *nft.Batch, t *table, h Hook) {
	b.Begin(unix.NFT_MSG_DELSETELEM, 0, t.id.Family)
	b.Text(unix.NFTA_SET_ELEM_LIST_TABLE, t.name)
	b.Text(unix.NFTA_SET_ELEM_LIST_SET, setOf(h))
	b.End()
}
