package native

import (
	"bytes"
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// An answer says whether a rule continues after one of its expressions.
type oldAnswer uint8

const (
	oldNo    oldAnswer = iota // the rule does not match
	oldMaybe                  // it may match or not
	oldYes                    // it continues
)

// Numbers of linux/netfilter/nf_tables.h that golang.org/x/sys does not name.
const (
	oldFibFlagDaddr      = 2
	oldFibResultAddrtype = 3
	oldFibDreg           = 1 // NFTA_FIB_DREG
	oldFibResult         = 2
	oldFibFlags          = 3
	oldNgDreg            = 1 // NFTA_NG_DREG
	oldNgModulus         = 2
	oldNgOffset          = 4
	oldImmediateDreg     = 1
	oldRouteLocal        = 2 // RTN_LOCAL
)

// A natVerdict is a verdict, with its target chain if it has one.
type oldNatVerdict struct {
	code  int32
	chain string
}

// verdictIn reads a verdict from an immediate's or an element's data.
func oldVerdictIn(data []byte) oldNatVerdict {
	return oldNatVerdict{int32(number(nft.AttrPath(data, unix.NFTA_DATA_VERDICT), unix.NFTA_VERDICT_CODE)), jumpOf(data)}
}

// rule takes the flow through one rule, and returns where the flow may continue; through calls
// it. If an expression may match or not, the flow may also continue with the next rule, and its
// mark may be as before the rule. depth counts the jumps.
func (w *oldNatWalk) rule(r Rule, depth int) oldNatStep {
	regs, sure, before := &oldRegisters{}, true, w.mark
	defer func() {
		if !sure { // the flow may not have reached this place
			w.mark = w.mark.or(before)
		}
	}()
	for a, err := range attributes(r.expressions()) {
		if err != nil {
			w.escapes, w.blind = true, true
			return oldNatStep{}
		}
		name := nft.String(nft.AttrPath(a.value, unix.NFTA_EXPR_NAME))
		data := attrOf(a.value, unix.NFTA_EXPR_DATA)
		if step, ends := w.end(name, data, regs, depth); ends {
			step.next = step.next || !sure
			return step
		}
		switch w.expression(name, data, regs) {
		case oldNo:
			return oldNatStep{next: true}
		case oldMaybe:
			sure = false
		}
	}
	return oldNatStep{next: true}
}

// end follows an expression that gives a verdict; is reports whether the expression gives one.
// rule then returns step, and evaluates no later expression. depth counts the jumps.
func (w *oldNatWalk) end(name string, data []byte, regs *oldRegisters, depth int) (step oldNatStep, is bool) {
	switch name {
	case "immediate":
		if number(data, oldImmediateDreg) != 0 {
			return oldNatStep{}, false
		}
		return w.follow(oldVerdictIn(nft.AttrPath(data, immediateData)), depth), true
	case "lookup":
		s := w.table.sets[nft.String(attrOf(data, unix.NFTA_LOOKUP_SET))]
		if s == nil || !has(data, unix.NFTA_LOOKUP_DREG) || number(data, unix.NFTA_LOOKUP_DREG) != 0 {
			return oldNatStep{}, false
		}
		return w.branch(s, data, regs, depth), true
	case "nat":
		w.elsewhere(regs, data)
		return oldNatStep{}, true
	case "masq":
		w.otherSource()
		return oldNatStep{}, true
	case "redir", "reject", "queue", "tproxy", "synproxy", "target":
		w.escapes, w.blind = true, w.blind || name == "target"
		return oldNatStep{}, true
	}
	return oldNatStep{}, false
}

// branch follows a verdict map: to one chain if the key is known, else to each of them. s is
// the map, data the attributes of the lookup. The step says whether any way continues.
func (w *oldNatWalk) branch(s *Set, data []byte, regs *oldRegisters, depth int) oldNatStep {
	index := w.table.indexOf(s)
	register := number(data, unix.NFTA_LOOKUP_SREG)
	key, known := regs.load(register, index.keyLength)
	n := regs.choices(register)
	element, found, sure := index.find(key)
	switch {
	case index.vague, known && !sure:
		w.escapes, w.blind = true, true
		return oldNatStep{}
	case known && !found:
		return oldNatStep{next: true}
	case known:
		return w.follow(oldVerdictIn(attrOf(element, unix.NFTA_SET_ELEM_DATA)), depth)
	}
	all, before := oldNatStep{next: n == 0 || !index.numbersAll(n)}, w.mark
	var after oldMarkWays
	if all.next {
		after.add(before)
	}
	defer func() { w.mark = after.mark }()
	for _, element := range index.all {
		if w.passed++; w.passed > oldMostRules {
			w.escapes = true
			return oldNatStep{}
		}
		w.mark = before
		step := w.follow(oldVerdictIn(attrOf(element, unix.NFTA_SET_ELEM_DATA)), depth)
		if all.next, all.falls = all.next || step.next, all.falls || step.falls; step.next || step.falls {
			after.add(w.mark)
		}
	}
	return all
}

// expression evaluates an expression that gives no verdict, and changes regs by it. An unknown
// expression may match or not, and leaves no register known.
func (w *oldNatWalk) expression(name string, data []byte, regs *oldRegisters) oldAnswer {
	switch name {
	case "counter", "log", "objref", "last", "notrack", "dup":
		return oldYes
	case "immediate":
		regs.store(number(data, oldImmediateDreg), nft.AttrPath(data, immediateData, unix.NFTA_DATA_VALUE))
		return oldYes
	case "cmp":
		return oldCompare(data, regs)
	case "range":
		return oldWithin(data, regs)
	case "bitwise":
		oldBitwise(data, regs)
		return oldYes
	case "lookup":
		return w.lookup(data, regs)
	case "meta":
		return w.meta(data, regs)
	case "payload":
		return w.payload(data, regs)
	case "fib":
		w.fib(data, regs)
		return oldYes
	case "numgen":
		regs.choose(number(data, oldNgDreg), oldNumgenMost(data))
		return oldYes
	case "ct":
		if has(data, unix.NFTA_CT_DREG) {
			regs.forget(number(data, unix.NFTA_CT_DREG))
		}
		return oldYes
	}
	*regs = oldRegisters{} // neither its result nor its match is known
	return oldMaybe
}

// numgenMost returns the count of numbers that numgen chooses from, for registers.choose; 0 if
// they do not begin at 0.
func oldNumgenMost(data []byte) uint32 {
	if number(data, oldNgOffset) != 0 {
		return 0
	}
	return number(data, oldNgModulus)
}

// compare answers whether a comparison matches; data has its attributes. It may match if the
// register is not fully known.
func oldCompare(data []byte, regs *oldRegisters) oldAnswer {
	want := nft.AttrPath(data, unix.NFTA_CMP_DATA, unix.NFTA_DATA_VALUE)
	got, known := regs.load(number(data, unix.NFTA_CMP_SREG), len(want))
	if !known {
		return oldMaybe
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
		return oldMaybe
	}
	if match {
		return oldYes
	}
	return oldNo
}

// within answers whether a value is in a range, or is not, as the range's operator wants. data
// has its attributes. It may match if the value is not known.
func oldWithin(data []byte, regs *oldRegisters) oldAnswer {
	from := nft.AttrPath(data, unix.NFTA_RANGE_FROM_DATA, unix.NFTA_DATA_VALUE)
	to := nft.AttrPath(data, unix.NFTA_RANGE_TO_DATA, unix.NFTA_DATA_VALUE)
	got, known := regs.load(number(data, unix.NFTA_RANGE_SREG), len(from))
	if !known || len(from) != len(to) {
		return oldMaybe
	}
	in := bytes.Compare(from, got) <= 0 && bytes.Compare(got, to) <= 0
	if in == (number(data, unix.NFTA_RANGE_OP) == unix.NFT_RANGE_EQ) {
		return oldYes
	}
	return oldNo
}

// bitwise masks and flips bits of a register, such as those of the packet's mark. The result of
// shifts and of operations on two registers is not known.
func oldBitwise(data []byte, regs *oldRegisters) {
	mask := nft.AttrPath(data, unix.NFTA_BITWISE_MASK, unix.NFTA_DATA_VALUE)
	flip := nft.AttrPath(data, unix.NFTA_BITWISE_XOR, unix.NFTA_DATA_VALUE)
	to := number(data, unix.NFTA_BITWISE_DREG)
	from, bits := regs.bits(number(data, unix.NFTA_BITWISE_SREG), len(mask))
	if from == nil || len(flip) != len(mask) {
		regs.forget(to)
		return
	}
	out, known := make([]byte, len(mask)), make([]byte, len(mask))
	for i := range out {
		out[i], known[i] = from[i]&mask[i]^flip[i], bits[i]|^mask[i] // a bit that is masked out is known
	}
	if slices.ContainsFunc(known, func(bits byte) bool { return bits != 0xff }) {
		regs.storeBits(to, out, known)
		return
	}
	regs.store(to, out)
}

// lookup looks a value up in a set, or reads it from a map into a register. A vague set, or a
// key that is not known, makes the answer maybe.
func (w *oldNatWalk) lookup(data []byte, regs *oldRegisters) oldAnswer {
	const inverted = 1 // NFT_LOOKUP_F_INV
	to, maps := number(data, unix.NFTA_LOOKUP_DREG), has(data, unix.NFTA_LOOKUP_DREG)
	s := w.table.sets[nft.String(attrOf(data, unix.NFTA_LOOKUP_SET))]
	if s == nil {
		*regs = oldRegisters{}
		return oldMaybe
	}
	index := w.table.indexOf(s)
	from := number(data, unix.NFTA_LOOKUP_SREG)
	if n := regs.choices(from); maps && n > 0 && !index.vague && index.numbersAll(n) {
		var values [][]byte
		for _, element := range index.all {
			values = append(values, nft.AttrPath(element, unix.NFTA_SET_ELEM_DATA, unix.NFTA_DATA_VALUE))
		}
		regs.chooseValue(to, values)
		return oldYes
	}
	key, known := regs.load(from, index.keyLength)
	element, found, sure := index.find(key)
	switch invert := number(data, unix.NFTA_LOOKUP_FLAGS)&inverted != 0; {
	case !known || !sure:
		if maps {
			regs.forget(to)
		}
		return oldMaybe
	case found == invert:
		return oldNo
	}
	if maps {
		regs.store(to, nft.AttrPath(attrOf(element, unix.NFTA_SET_ELEM_DATA), unix.NFTA_DATA_VALUE))
	}
	return oldYes
}

// meta loads the mark, the protocol or the family into a register, or sets the packet's mark.
// Other meta data is not known. The answer is always yes.
func (w *oldNatWalk) meta(data []byte, regs *oldRegisters) oldAnswer {
	key := number(data, unix.NFTA_META_KEY)
	if !has(data, unix.NFTA_META_DREG) { // it sets something
		if key == unix.NFT_META_MARK {
			w.mark = oldMarkIn(regs, number(data, unix.NFTA_META_SREG))
		}
		return oldYes
	}
	to := number(data, unix.NFTA_META_DREG)
	switch key {
	case unix.NFT_META_MARK:
		regs.storeBits(to, w.mark.value[:], w.mark.known[:])
	case unix.NFT_META_L4PROTO:
		regs.store(to, []byte{w.flow.Protocol})
	case unix.NFT_META_NFPROTO:
		regs.store(to, []byte{byte(w.t.family)})
	default:
		regs.forget(to)
	}
	return oldYes
}

// payload stores the flow's addresses and ports in a register; other parts of the packet are
// not known. A rule that writes into the packet makes the walk uncertain.
func (w *oldNatWalk) payload(data []byte, regs *oldRegisters) oldAnswer {
	if !has(data, unix.NFTA_PAYLOAD_DREG) {
		*regs = oldRegisters{}
		w.escapes = true // it writes into the packet
		return oldYes
	}
	to := number(data, unix.NFTA_PAYLOAD_DREG)
	from, length := int(number(data, unix.NFTA_PAYLOAD_OFFSET)), int(number(data, unix.NFTA_PAYLOAD_LEN))
	begin, part := w.header(number(data, unix.NFTA_PAYLOAD_BASE))
	if from -= begin; from < 0 || length <= 0 || from+length > len(part) {
		regs.forget(to)
		return oldYes
	}
	regs.store(to, part[from:from+length]) // nft loads a part of an address for a prefix
	return oldYes
}

// header returns the known part of a header: ports, or both addresses. begin is its offset in
// the header. base is the header (NFT_PAYLOAD_*); nil: no part of it is known.
func (w *oldNatWalk) header(base uint32) (begin int, part []byte) {
	source, destination := w.flow.Source, w.flow.Destination
	switch {
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		return 0, binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, source.Port()), destination.Port())
	case base != unix.NFT_PAYLOAD_NETWORK_HEADER:
		return 0, nil
	case w.t.family == tableid.IPv6:
		begin = 8
	default:
		begin = 12
	}
	return begin, append(source.Addr().AsSlice(), destination.Addr().AsSlice()...)
}

// fib stores in a register that the destination is one of the node's own addresses, if it is.
// All other results are not known: a rule that compares them may match or not.
func (w *oldNatWalk) fib(data []byte, regs *oldRegisters) {
	to := number(data, oldFibDreg)
	if number(data, oldFibResult) == oldFibResultAddrtype && number(data, oldFibFlags) == oldFibFlagDaddr && w.t.local(w.flow.Destination.Addr()) {
		regs.store(to, binary.NativeEndian.AppendUint32(nil, oldRouteLocal))
		return
	}
	regs.forget(to)
}
