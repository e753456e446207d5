package native

import (
	"bytes"
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// Numbers of linux/netfilter/nf_tables.h that golang.org/x/sys does not name.
const (
	fibFlagDaddr      = 2
	fibResultAddrtype = 3
	fibDreg           = 1 // NFTA_FIB_DREG
	fibResult         = 2
	fibFlags          = 3
	ngDreg            = 1 // NFTA_NG_DREG
	ngModulus         = 2
	ngOffset          = 4
	immediateDreg     = 1
	routeLocal        = 2 // RTN_LOCAL
)

// A natVerdict is a verdict, with its target chain if it has one.
type natVerdict struct {
	code  int32
	chain string
}

// verdictIn reads a verdict from an immediate's or an element's data.
func verdictIn(data []byte) natVerdict {
	return natVerdict{int32(number(nft.AttrPath(data, unix.NFTA_DATA_VERDICT), unix.NFTA_VERDICT_CODE)), jumpOf(data)}
}

// ends follows an expression that gives a verdict, and reports whether it gives one. Ways then
// evaluates no later expression.
func (e *evaluation) ends(name string, data []byte) bool {
	switch name {
	case "immediate":
		if number(data, immediateDreg) != 0 {
			return false
		}
		e.follow(verdictIn(nft.AttrPath(data, immediateData)))
	case "lookup":
		if !has(data, unix.NFTA_LOOKUP_DREG) || number(data, unix.NFTA_LOOKUP_DREG) != 0 {
			return false
		}
		s := e.table.sets[nft.String(attrOf(data, unix.NFTA_LOOKUP_SET))]
		if s == nil {
			e.takes(nat.Way{Verdict: nat.Unclear})
			return true
		}
		e.branch(s, data)
	case "nat":
		if f := number(data, unix.NFTA_NAT_FAMILY); f != unix.NFPROTO_INET && f != uint32(e.family()) {
			return false // it does nothing (nft_nat_inet_eval)
		}
		e.translate(data)
	case "masq":
		e.takes(nat.Way{Verdict: nat.Masquerade})
	case "redir":
		e.takes(nat.Way{Verdict: nat.DNAT})
	case "reject", "queue":
		e.takes(nat.Way{Verdict: nat.Leave})
	case "target", "tproxy", "synproxy":
		e.takes(nat.Way{Verdict: nat.Unclear})
	case "payload":
		if has(data, unix.NFTA_PAYLOAD_DREG) {
			return false
		}
		e.takes(nat.Way{Verdict: nat.Unclear}) // it writes into the packet
	default:
		return false
	}
	return true
}

// branch follows a verdict map: to one chain if the key is known, else to each of them. s is
// the map, data the attributes of the lookup.
func (e *evaluation) branch(s *Set, data []byte) {
	index := e.table.indexOf(s)
	register := number(data, unix.NFTA_LOOKUP_SREG)
	key, known := e.regs.load(register, index.keyLength)
	element, found, sure := index.find(key)
	switch n := e.regs.choices(register); {
	case index.vague, known && !sure:
		e.takes(nat.Way{Verdict: nat.Unclear})
	case known && found:
		e.follow(verdictIn(attrOf(element, unix.NFTA_SET_ELEM_DATA)))
	case known:
		e.takes(nat.Way{})
	default:
		if n == 0 || !index.numbersAll(n) {
			e.takes(nat.Way{})
		}
		for _, element := range index.all {
			e.follow(verdictIn(attrOf(element, unix.NFTA_SET_ELEM_DATA)))
		}
	}
}

// expression evaluates an expression that gives no verdict, and changes the registers by it. An
// unknown expression may match or not, and leaves no register known.
func (e *evaluation) expression(name string, data []byte) nat.Answer {
	switch name {
	case "counter", "log", "last", "notrack", "dup", "nat": // the last is of another family
	case "objref":
		return useOf(data)
	case "cmp":
		return e.compare(data)
	case "range":
		return e.within(data)
	case "lookup":
		return e.lookup(data)
	case "immediate":
		e.regs.store(number(data, immediateDreg), nft.AttrPath(data, immediateData, unix.NFTA_DATA_VALUE))
	case "bitwise":
		e.bitwise(data)
	case "meta":
		e.meta(data)
	case "payload":
		e.payload(data)
	case "fib":
		e.fib(data)
	case "numgen":
		e.regs.choose(number(data, ngDreg), numgenMost(data))
	case "ct":
		if has(data, unix.NFTA_CT_DREG) {
			e.regs.forget(number(data, unix.NFTA_CT_DREG))
		}
	default:
		e.regs = registers{} // neither its result nor its match is known
		return nat.Maybe
	}
	return nat.Yes
}

// useOf answers whether a rule goes on behind a named object. A limit or quota may end it, and a
// map of objects may lack the key.
func useOf(data []byte) nat.Answer {
	kind := number(data, unix.NFTA_OBJREF_IMM_TYPE)
	if kind == unix.NFT_OBJECT_COUNTER || kind == unix.NFT_OBJECT_CT_HELPER {
		return nat.Yes
	}
	return nat.Maybe
}

// numgenMost returns the count of numbers that numgen chooses from, for registers.choose; 0 if
// they do not begin at 0.
func numgenMost(data []byte) uint32 {
	if number(data, ngOffset) != 0 {
		return 0
	}
	return number(data, ngModulus)
}

// compare answers whether a comparison matches; data has its attributes. It may match if the
// register is not fully known.
func (e *evaluation) compare(data []byte) nat.Answer {
	want := nft.AttrPath(data, unix.NFTA_CMP_DATA, unix.NFTA_DATA_VALUE)
	got, known := e.regs.load(number(data, unix.NFTA_CMP_SREG), len(want))
	if !known {
		return nat.Maybe
	}
	c, match := bytes.Compare(got, want), false // as the kernel's memcmp
	switch number(data, unix.NFTA_CMP_OP) {
	case unix.NFT_CMP_EQ:
		match = c == 0
	case unix.NFT_CMP_NEQ:
		match = c != 0
	case unix.NFT_CMP_LT:
		match = c < 0
	case unix.NFT_CMP_LTE:
		match = c <= 0
	case unix.NFT_CMP_GT:
		match = c > 0
	case unix.NFT_CMP_GTE:
		match = c >= 0
	default:
		return nat.Maybe
	}
	return nat.Sure(match)
}

// within answers whether a value is in a range, or is not, as the range's operator wants. data
// has its attributes. It may match if the value is not known.
func (e *evaluation) within(data []byte) nat.Answer {
	from := nft.AttrPath(data, unix.NFTA_RANGE_FROM_DATA, unix.NFTA_DATA_VALUE)
	to := nft.AttrPath(data, unix.NFTA_RANGE_TO_DATA, unix.NFTA_DATA_VALUE)
	got, known := e.regs.load(number(data, unix.NFTA_RANGE_SREG), len(from))
	if !known || len(from) != len(to) {
		return nat.Maybe
	}
	in := bytes.Compare(from, got) <= 0 && bytes.Compare(got, to) <= 0
	return nat.Sure(in == (number(data, unix.NFTA_RANGE_OP) == unix.NFT_RANGE_EQ))
}

// bitwise masks and flips bits of a register, such as those of the packet's mark. The result of
// shifts and of operations on two registers is not known.
func (e *evaluation) bitwise(data []byte) {
	mask := nft.AttrPath(data, unix.NFTA_BITWISE_MASK, unix.NFTA_DATA_VALUE)
	flip := nft.AttrPath(data, unix.NFTA_BITWISE_XOR, unix.NFTA_DATA_VALUE)
	to := number(data, unix.NFTA_BITWISE_DREG)
	from, bits := e.regs.bits(number(data, unix.NFTA_BITWISE_SREG), len(mask))
	if from == nil || len(flip) != len(mask) {
		e.regs.forget(to)
		return
	}
	out, known := make([]byte, len(mask)), make([]byte, len(mask))
	for i := range out {
		out[i], known[i] = from[i]&mask[i]^flip[i], bits[i]|^mask[i] // a bit that is masked out is known
	}
	if slices.ContainsFunc(known, func(bits byte) bool { return bits != 0xff }) {
		e.regs.storeBits(to, out, known)
		return
	}
	e.regs.store(to, out)
}

// lookup looks a value up in a set, or reads it from a map into a register. A vague set, or a
// key that is not known, makes the answer maybe.
func (e *evaluation) lookup(data []byte) nat.Answer {
	const inverted = 1 // NFT_LOOKUP_F_INV
	to, maps := number(data, unix.NFTA_LOOKUP_DREG), has(data, unix.NFTA_LOOKUP_DREG)
	s := e.table.sets[nft.String(attrOf(data, unix.NFTA_LOOKUP_SET))]
	if s == nil {
		e.regs = registers{}
		return nat.Maybe
	}
	index := e.table.indexOf(s)
	from := number(data, unix.NFTA_LOOKUP_SREG)
	if n := e.regs.choices(from); maps && n > 0 && !index.vague && index.numbersAll(n) {
		values := make([][]byte, len(index.all))
		for i, element := range index.all {
			values[i] = nft.AttrPath(element, unix.NFTA_SET_ELEM_DATA, unix.NFTA_DATA_VALUE)
		}
		e.regs.chooseValue(to, values)
		return nat.Yes
	}
	key, known := e.regs.load(from, index.keyLength)
	element, found, sure := index.find(key)
	switch invert := number(data, unix.NFTA_LOOKUP_FLAGS)&inverted != 0; {
	case !known || !sure:
		if maps {
			e.regs.forget(to)
		}
		return nat.Maybe
	case found == invert:
		return nat.No
	}
	if maps {
		e.regs.store(to, nft.AttrPath(attrOf(element, unix.NFTA_SET_ELEM_DATA), unix.NFTA_DATA_VALUE))
	}
	return nat.Yes
}

// meta loads the mark, the protocol or the family into a register, or sets the packet's mark.
// Other meta data is not known.
func (e *evaluation) meta(data []byte) {
	key := number(data, unix.NFTA_META_KEY)
	if !has(data, unix.NFTA_META_DREG) { // it sets something
		if key == unix.NFT_META_MARK {
			e.mark = e.regs.mark(number(data, unix.NFTA_META_SREG))
		}
		return
	}
	to := number(data, unix.NFTA_META_DREG)
	switch key {
	case unix.NFT_META_MARK:
		e.regs.storeMark(to, e.mark)
	case unix.NFT_META_L4PROTO:
		e.regs.store(to, []byte{e.Protocol})
	case unix.NFT_META_NFPROTO:
		e.regs.store(to, []byte{byte(e.family())})
	default:
		e.regs.forget(to)
	}
}

// family returns the family of the packet.
func (e *evaluation) family() tableid.Family {
	if e.Source.Addr().Is4() {
		return tableid.IPv4
	}
	return tableid.IPv6
}

// payload stores the packet's addresses and ports in a register; other parts of it are not
// known.
func (e *evaluation) payload(data []byte) {
	to := number(data, unix.NFTA_PAYLOAD_DREG)
	from, length := int(number(data, unix.NFTA_PAYLOAD_OFFSET)), int(number(data, unix.NFTA_PAYLOAD_LEN))
	begin, part := e.header(number(data, unix.NFTA_PAYLOAD_BASE))
	if from -= begin; from < 0 || length <= 0 || from+length > len(part) {
		e.regs.forget(to)
		return
	}
	e.regs.store(to, part[from:from+length]) // nft loads a part of an address for a prefix
}

// header returns the known part of a header: ports, or both addresses. begin is its offset in
// the header. base is the header (NFT_PAYLOAD_*); nil: no part of it is known.
func (e *evaluation) header(base uint32) (begin int, part []byte) {
	source, destination := e.Source, e.Destination
	switch {
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		return 0, binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, source.Port()), destination.Port())
	case base != unix.NFT_PAYLOAD_NETWORK_HEADER:
		return 0, nil
	case e.family() == tableid.IPv6:
		begin = 8
	default:
		begin = 12
	}
	return begin, append(source.Addr().AsSlice(), destination.Addr().AsSlice()...)
}

// fib stores in a register that the destination is one of the node's own addresses, if it is.
// All other results are not known: a rule that compares them may match or not.
func (e *evaluation) fib(data []byte) {
	to := number(data, fibDreg)
	if number(data, fibResult) == fibResultAddrtype && number(data, fibFlags) == fibFlagDaddr && e.Site.Local(e.Destination.Addr()) {
		e.regs.store(to, binary.NativeEndian.AppendUint32(nil, routeLocal))
		return
	}
	e.regs.forget(to)
}
