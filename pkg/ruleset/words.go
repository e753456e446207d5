package ruleset

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// Words returns a rule of nf_tables as iptables-nft-save prints it, without "-A CHAIN ". It
// knows the rules that iptables-nft writes for kube-proxy, kubelet, CNI plugins, Docker,
// service meshes and network policies. All versions from 1.8.7 to 1.8.13 must print the same
// text. For any other rule it returns false, because an unknown byte may change the rule's
// meaning. So no two rules have the same words, unless the kernel treats both alike.
//
// Expressions are the content of NFTA_RULE_EXPRESSIONS in the kernel's own order. Counters are
// zero, and the numbers of ipsets are 0xffff. sets has the names of the ipsets, in the order of
// their places. A rule with user data has no words.
//
// A rule of x_tables, as iptables-legacy writes it, has the same expressions "match" and
// "target", and "immediate" for a verdict or a jump. Its conditions without an extension are in
// EntryHead, the first expression.
func Words(family tableid.Family, expressions, userdata []byte, sets []string) (string, bool) {
	if userdata != nil {
		return "", false
	}
	d := decoder{family: family, sets: sets}
	for rest := (fields{rest: expressions}); len(rest.rest) > 0; {
		e := rest.nested(unix.NFTA_LIST_ELEM)
		name, data := e.text(unix.NFTA_EXPR_NAME), e.nested(unix.NFTA_EXPR_DATA)
		if rest.bad || !e.done() || !d.expression(name, &data) || !data.done() {
			return "", false
		}
	}
	if d.loaded != nothing || !d.counted && !d.isEntry || d.goes || len(d.sets) > 0 {
		return "", false
	}
	return d.words(), true
}

// A decoder reads the expressions of a rule in the order in which iptables-nft writes them:
// options of no extension, matches, one counter, a target.
type decoder struct {
	family                   tableid.Family
	sets                     []string // names whose places were not read yet
	source, destination      []byte   // the words of each, nil for none
	in, out, proto           []byte
	protocol                 byte // 0 if the protocol is any, or is negated
	matches                  []byte
	native                   transport
	seen                     uint // kinds of matches
	counted                  bool
	target                   []byte
	ended                    bool
	loaded                   load
	register, offset, length uint32
	mask                     []byte // of the loaded field; nil for the whole field
	fragments                []byte
	// isEntry says that the rule is of x_tables: its first expression is EntryHead. goes says
	// that it has the flag of a goto, without the verdict so far.
	isEntry, goes bool
}

// A load is the content of the register that the next expression compares.
type load int

const (
	nothing load = iota
	inInterface
	outInterface
	layer4Protocol
	packetMark
	networkHeader
	transportHeader
)

// words joins the parts of the rule in the order in which iptables-nft-save prints them.
// Words and Label call it at the end.
func (d *decoder) words() string {
	parts := [...][]byte{d.source, d.destination, d.in, d.out, d.proto, d.fragments, d.matches, d.target}
	all := bytes.Join(parts[:], nil)
	return string(bytes.TrimPrefix(all, []byte(" ")))
}

// expression reads the next expression of a rule for Words and Label. False: it is unknown
// or in an unusual place, so Words has no words for the rule and Label shows a digest. Both
// callers check that it read all of data.
func (d *decoder) expression(name string, data *fields) bool {
	if d.ended {
		return false
	}
	switch {
	case d.loaded == nothing:
	case name == "bitwise":
		return d.bitwise(data)
	case name == "cmp":
		return d.cmp(data)
	case name == "range":
		return d.between(data)
	default:
		return false
	}
	if name != "payload" && !d.closeTransport() {
		return false
	}
	if d.isEntry {
		d.counted = name == "immediate" || name == "target" // each entry has counters
	}
	switch name {
	case EntryHead:
		return d.entryHead(data)
	case "meta":
		return d.meta(data)
	case "payload":
		return d.payload(data)
	case "match":
		return d.match(data)
	case "limit":
		return d.limit(data)
	case "counter":
		again := d.counted
		d.counted = true
		return !again && allZero(data.bytes(unix.NFTA_COUNTER_BYTES, 8)) && allZero(data.bytes(unix.NFTA_COUNTER_PACKETS, 8))
	case "immediate":
		d.ended = true
		return d.counted && d.verdict(data)
	case "target":
		d.ended = true
		return d.counted && d.xtTarget(data)
	case "log":
		d.ended = true
		return d.counted && d.log(data)
	}
	return false
}

// atHead reports whether no match was read yet. A match may count or log packets, so an option
// behind it does not mean the same as in front of it.
func (d *decoder) atHead() bool { return d.matches == nil && !d.native.open && !d.counted }

// meta notes the field of the packet that a meta expression loads; the comparison behind it
// adds the words. False: it loads another field, and the rule has no words.
func (d *decoder) meta(data *fields) bool {
	key := data.number(unix.NFTA_META_KEY)
	d.register, d.mask = data.number(unix.NFTA_META_DREG), nil
	switch key {
	case unix.NFT_META_IIFNAME:
		d.loaded = inInterface
	case unix.NFT_META_OIFNAME:
		d.loaded = outInterface
	case unix.NFT_META_L4PROTO:
		d.loaded = layer4Protocol
	case unix.NFT_META_MARK:
		d.loaded = packetMark
	default:
		return false
	}
	return true
}

// payload notes the bytes of a header that a payload expression loads; the comparison behind
// it adds the words. False: the rule has no words.
func (d *decoder) payload(data *fields) bool {
	d.register, d.mask = data.number(unix.NFTA_PAYLOAD_DREG), nil
	base := data.number(unix.NFTA_PAYLOAD_BASE)
	d.offset, d.length = data.number(unix.NFTA_PAYLOAD_OFFSET), data.number(unix.NFTA_PAYLOAD_LEN)
	switch base {
	case unix.NFT_PAYLOAD_NETWORK_HEADER:
		d.loaded = networkHeader
		return d.closeTransport()
	case unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		d.loaded = transportHeader
		return d.openTransport()
	}
	return false
}

// bitwise notes the mask for the comparison that follows; expression calls it. False: the
// rule has no words. Kernels before 5.5 have no other operation, so they do not name it.
func (d *decoder) bitwise(data *fields) bool {
	from, to, length := data.number(unix.NFTA_BITWISE_SREG), data.number(unix.NFTA_BITWISE_DREG), data.number(unix.NFTA_BITWISE_LEN)
	const operation, mask = 6, 0 // NFTA_BITWISE_OP and NFT_BITWISE_BOOL of linux/netfilter/nf_tables.h
	if data.has(operation) && data.number(operation) != mask {
		return false
	}
	if d.mask != nil || from != d.register || to != d.register || length > netip6Len {
		return false
	}
	d.mask = data.value(unix.NFTA_BITWISE_MASK, int(length))
	return d.mask != nil && allZero(data.value(unix.NFTA_BITWISE_XOR, int(length)))
}

// cmp adds the words of a comparison of the loaded field with one value; expression calls
// it. False: the rule has no words.
func (d *decoder) cmp(data *fields) bool {
	loaded, op := d.loaded, uint32(0)
	register := data.number(unix.NFTA_CMP_SREG)
	op = data.number(unix.NFTA_CMP_OP)
	value := data.value(unix.NFTA_CMP_DATA, anyLength)
	d.loaded = nothing
	if register != d.register || value == nil {
		return false
	}
	if loaded == transportHeader {
		return d.compareTransport(op, value)
	}
	if op != unix.NFT_CMP_EQ && op != unix.NFT_CMP_NEQ {
		return false
	}
	not := op == unix.NFT_CMP_NEQ
	switch loaded {
	case inInterface:
		return d.compareInterface(&d.in, "-i", not, value)
	case outInterface:
		return d.compareInterface(&d.out, "-o", not, value)
	case layer4Protocol:
		return d.compareProtocol(not, value)
	case packetMark:
		return d.compareMark(not, value)
	case networkHeader:
		return d.compareAddress(not, value)
	}
	return false
}

// protocols are the protocols for which every iptables prints the same name.
var protocols = map[byte]string{
	unix.IPPROTO_ICMP: "icmp", unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_ICMPV6: "ipv6-icmp", unix.IPPROTO_SCTP: "sctp",
	unix.IPPROTO_ESP: "esp", unix.IPPROTO_AH: "ah", unix.IPPROTO_UDPLITE: "udplite",
}

// compareProtocol adds -p for cmp, and for compareAddress where iptables 1.8.10 and later
// read the header's byte. not means "! -p". False: the rule has no words.
func (d *decoder) compareProtocol(not bool, value []byte) bool {
	if !d.atHead() || d.proto != nil || d.mask != nil || len(value) != 1 {
		return false
	}
	name, known := protocols[value[0]]
	if !known {
		return false
	}
	d.proto = option(nil, not, "-p", name)
	if !not {
		d.protocol = value[0]
	}
	return true
}

// compareInterface sets words, the place of option name (-i or -o); not means "!". The value
// ends with a zero, or is the beginning of names, which iptables prints with a +. iptables
// writes "no interface matches" as INVAL/D. That name, like any that is not plain, returns
// false.
func (d *decoder) compareInterface(words *[]byte, name string, not bool, value []byte) bool {
	if !d.atHead() || *words != nil || d.mask != nil {
		return false
	}
	bare, whole := bytes.CutSuffix(value, []byte{0})
	if len(bare) >= unix.IFNAMSIZ || !plainName(bare) || bytes.ContainsAny(bare, "+/") {
		return false
	}
	*words = option(nil, not, name, string(bare))
	if !whole {
		*words = append(*words, '+')
	}
	return true
}

// plainName reports whether iptables prints a name unchanged and reads it back unchanged. A
// rule with another name has no words.
func plainName(name []byte) bool {
	if len(name) == 0 || name[0] == '-' || name[0] == '!' {
		return false
	}
	for _, c := range name {
		if c <= ' ' || c > '~' || c == '"' || c == '\'' || c == '\\' {
			return false
		}
	}
	return true
}

const (
	netip6Len  = 16
	protocolAt = 9 // in IPv4's header
	fragmentAt = 6
)

// compareFragment adds -f for compareAddress: the offset of a fragment, which is not 0. So
// not means a plain -f, and its absence "! -f". False: the rule has no words.
func (d *decoder) compareFragment(not bool, value []byte) bool {
	if !d.atHead() || d.fragments != nil || !bytes.Equal(d.mask, []byte{0x1f, 0xff}) || len(value) != 2 || !allZero(value) {
		return false
	}
	if d.fragments = []byte(" -f"); !not {
		d.fragments = []byte(" ! -f")
	}
	return true
}

// compareAddress adds -s or -d for cmp, or the words of another field of the network header.
// If a prefix ends at a whole byte, iptables loads only its bytes. False: the rule has no
// words.
func (d *decoder) compareAddress(not bool, value []byte) bool {
	size, source, destination := 4, uint32(12), uint32(16)
	if d.family == tableid.IPv6 {
		size, source, destination = netip6Len, 8, 24
	}
	words, name := &d.source, "-s"
	switch {
	case d.family == tableid.IPv4 && d.offset == protocolAt && d.length == 1: // 1.8.10 and later
		return d.compareProtocol(not, value)
	case d.family == tableid.IPv4 && d.offset == fragmentAt && d.length == 2:
		return d.compareFragment(not, value)
	}
	switch d.offset {
	case source:
	case destination:
		words, name = &d.destination, "-d"
	default:
		return false
	}
	if !d.atHead() || *words != nil || len(value) != int(d.length) || len(value) > size {
		return false
	}
	bits := 8 * len(value)
	if d.mask != nil {
		if len(value) != size || len(d.mask) != size {
			return false
		}
		bits = prefixOf(d.mask)
	}
	return d.sayAddress(words, name, not, value, bits, size)
}

// sayAddress sets words, the place of option name (-s or -d), to an address and the number of
// its first bits that count. value may be the beginning of the size bytes of an address. False:
// the rule has no words, because iptables would print or read another address.
func (d *decoder) sayAddress(words *[]byte, name string, not bool, value []byte, bits, size int) bool {
	var whole [netip6Len]byte
	copy(whole[:], value)
	addr, _ := netip.AddrFromSlice(whole[:size])
	prefix, err := addr.Prefix(bits)
	if err != nil || bits == 0 || prefix.Addr() != addr || !plainAddress(addr) {
		return false
	}
	*words = option(nil, not, name, prefix.String())
	return true
}

// prefixOf returns the number of bits of a mask if all are at its beginning, and otherwise
// -1. compareAddress and connlimit have no words for a mask that is no prefix.
func prefixOf(mask []byte) int {
	n := 0
	for n < 8*len(mask) && mask[n/8]&(0x80>>(n%8)) != 0 {
		n++
	}
	for i := n; i < 8*len(mask); i++ {
		if mask[i/8]&(0x80>>(i%8)) != 0 {
			return -1
		}
	}
	return n
}

// plainAddress reports whether all programs print an address in the same way. The exceptions
// are IPv6 addresses that the C library prints with an IPv4 address. Their rules have no
// words.
func plainAddress(addr netip.Addr) bool {
	if addr.Is4() || addr == netip.IPv6Loopback() {
		return true
	}
	whole := addr.As16()
	return !allZero(whole[:10])
}

// compareMark adds -m mark for cmp, with d.mask as its mask; not means "!". False: the rule
// has no words.
func (d *decoder) compareMark(not bool, value []byte) bool {
	if len(value) != 4 || d.mask != nil && len(d.mask) != 4 || !d.once(markMatch) {
		return false
	}
	mask := ^uint32(0)
	if d.mask != nil {
		if mask = binary.NativeEndian.Uint32(d.mask); mask == ^uint32(0) {
			return false
		}
	}
	d.matches = appendMark(append(d.matches, " -m mark"...), not, binary.NativeEndian.Uint32(value), mask)
	return true
}

// appendMark appends --mark and its value, for matches mark and connmark; not means "!". A
// full mask is not printed.
func appendMark(out []byte, not bool, mark, mask uint32) []byte {
	out = option(out, not, "--mark", "")
	out = strconv.AppendUint(append(out, "0x"...), uint64(mark), 16)
	if mask != ^uint32(0) {
		out = strconv.AppendUint(append(out, "/0x"...), uint64(mask), 16)
	}
	return out
}

// option appends an option and its value behind a space; not means "!". With value "" the
// caller appends the value.
func option(out []byte, not bool, name, value string) []byte {
	if not {
		out = append(out, " !"...)
	}
	out = append(append(out, ' '), name...)
	return append(append(out, ' '), value...)
}
