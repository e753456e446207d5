package native

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// A dataType is one of nft's types of values.
type dataType struct {
	name  string
	size  int  // in bytes; 0: any
	host  bool // a number in the host's byte order; else in network byte order
	names map[uint64]string
	flags []string // the names of bits, from the lowest on
	style typeStyle
}

type typeStyle uint8

const (
	decimal typeStyle = iota
	hexadecimal
	hexadecimalShort
	address
	interfaceName
	etherAddress
	handle // of traffic control, such as 1:2
)

// number reads a value in the type's byte order, for its name or its digits, and to sort
// elements. Of more than 8 bytes only the last count.
func (d *dataType) number(value []byte) uint64 {
	var n uint64
	for i := range value {
		at := i
		if d.host && hostIsLittle {
			at = len(value) - 1 - i
		}
		n = n<<8 | uint64(value[at])
	}
	return n
}

var hostIsLittle = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// say says a value as nft does; in hexadecimal digits if it does not fit the type. A nil type
// is unknown.
func (d *dataType) say(value []byte) string {
	if d == nil || len(value) == 0 || d.size != 0 && len(value) != d.size || len(value) > 8 && d.size == 0 {
		return hexOf(value)
	}
	switch d.style {
	case address:
		ip, _ := netip.AddrFromSlice(value)
		return ip.String()
	case interfaceName:
		text, _, _ := strings.Cut(string(value), "\x00")
		return strconv.Quote(text)
	case etherAddress:
		var all []string
		for _, b := range value {
			all = append(all, fmt.Sprintf("%02x", b))
		}
		return strings.Join(all, ":")
	}
	n := d.number(value)
	switch {
	case d.names[n] != "":
		return d.names[n]
	case d.flags != nil:
		return d.flagWords(n)
	case d.style == handle:
		return fmt.Sprintf("%x:%x", n>>16, n&0xffff)
	case d.style == hexadecimalShort:
		return fmt.Sprintf("0x%x", n)
	case d.style == hexadecimal:
		return fmt.Sprintf("0x%0*x", 2*len(value), n)
	}
	return strconv.FormatUint(n, 10)
}

// flagWords says a number as the names of its bits. Bits without a name are in a number behind
// them, so that two values never have one text.
func (d *dataType) flagWords(n uint64) string {
	var all []string
	for i, name := range d.flags {
		if name != "" && n&(1<<i) != 0 {
			all, n = append(all, name), n&^(1<<i)
		}
	}
	if n != 0 || len(all) == 0 {
		all = append(all, fmt.Sprintf("0x%x", n))
	}
	return strings.Join(all, ",")
}

// sayPrefix says a value with length significant bits, as an address with a prefix or as the
// beginning of an interface's name.
func (d *dataType) sayPrefix(value []byte, length int) string {
	if d != nil && d.style == interfaceName {
		return strconv.Quote(string(value[:length/8]) + "*")
	}
	return d.say(value) + "/" + strconv.Itoa(length)
}

// sayRange says the values from one to another, the last included. A range of addresses or
// names that is a prefix is said as one.
func (d *dataType) sayRange(from, to []byte) string {
	if slices.Equal(from, to) {
		return d.say(from)
	}
	if d != nil && (d.style == address || d.style == interfaceName) {
		if length, is := prefixOf(from, to); is && (d.style == address || length%8 == 0) {
			return d.sayPrefix(from, length)
		}
	}
	return d.say(from) + "-" + d.say(to)
}

// prefixOf returns the number of leading bits that two values share. is: the other bits are all
// zero in from, and all one in to. Then the range is a prefix, which sayRange says shorter;
// else length is 0.
func prefixOf(from, to []byte) (length int, is bool) {
	length = 8 * len(from)
	for i := range from {
		if from[i] == to[i] {
			continue
		}
		length = 8*i + bits.LeadingZeros8(from[i]^to[i])
		break
	}
	for i := range from {
		mask := byte(0xff)
		if left := length - 8*i; left >= 8 {
			mask = 0
		} else if left > 0 {
			mask >>= left
		}
		if from[i]&mask != 0 || to[i]&mask != mask {
			return 0, false
		}
	}
	return length, true
}

func hexOf(value []byte) string { return "0x" + hex.EncodeToString(value) }

// enumerated returns the names of the numbers from 0 on, for a dataType. "": the number has no
// name.
func enumerated(list ...string) map[uint64]string {
	all := map[uint64]string{}
	for i, name := range list {
		if name != "" {
			all[uint64(i)] = name
		}
	}
	return all
}

var (
	typeIPv4      = &dataType{name: "ipv4_addr", size: 4, style: address}
	typeIPv6      = &dataType{name: "ipv6_addr", size: 16, style: address}
	typeEther     = &dataType{name: "ether_addr", size: 6, style: etherAddress}
	typePort      = &dataType{name: "inet_service", size: 2}
	typeMark      = &dataType{name: "mark", size: 4, host: true, style: hexadecimal}
	typeIfname    = &dataType{name: "ifname", size: 16, style: interfaceName}
	typeInteger   = &dataType{name: "integer"}
	typeNumber    = &dataType{name: "integer", host: true}
	typePriority  = &dataType{name: "classid", size: 4, host: true, style: handle}
	typeNFProto   = &dataType{name: "nf_proto", size: 1, names: map[uint64]string{2: "ipv4", 10: "ipv6"}}
	typeEthertype = &dataType{name: "ether_type", size: 2, names: map[uint64]string{0x0800: "ip", 0x0806: "arp", 0x86dd: "ip6", 0x8100: "8021q", 0x88a8: "8021ad"}}
	typeArpOp     = &dataType{name: "arp_op", size: 2, names: map[uint64]string{1: "request", 2: "reply", 3: "rrequest", 4: "rreply", 8: "inrequest", 9: "inreply", 10: "nak"}}
	typeProto     = &dataType{name: "inet_proto", size: 1, names: map[uint64]string{1: "icmp", 2: "igmp", 4: "ipencap", 6: "tcp", 17: "udp", 33: "dccp", 47: "gre", 50: "esp", 51: "ah", 58: "ipv6-icmp", 108: "ipcomp", 132: "sctp", 136: "udplite"}}
	typeICMP      = &dataType{name: "icmp_type", size: 1, names: enumerated("echo-reply", "", "", "destination-unreachable", "source-quench", "redirect", "", "", "echo-request",
		"router-advertisement", "router-solicitation", "time-exceeded", "parameter-problem", "timestamp-request", "timestamp-reply", "info-request", "info-reply",
		"address-mask-request", "address-mask-reply")}
	typeICMP6 = &dataType{name: "icmpv6_type", size: 1, names: map[uint64]string{1: "destination-unreachable", 2: "packet-too-big", 3: "time-exceeded", 4: "parameter-problem",
		128: "echo-request", 129: "echo-reply", 130: "mld-listener-query", 131: "mld-listener-report", 132: "mld-listener-done", 133: "nd-router-solicit",
		134: "nd-router-advert", 135: "nd-neighbor-solicit", 136: "nd-neighbor-advert", 137: "nd-redirect", 138: "router-renumbering",
		141: "ind-neighbor-solicit", 142: "ind-neighbor-advert", 143: "mld2-listener-report"}}
	typeICMPCode  = &dataType{name: "icmp_code", size: 1, names: icmpCodes}
	typeICMP6Code = &dataType{name: "icmpv6_code", size: 1, names: icmp6Codes}
	typeTCPFlags  = &dataType{name: "tcp_flag", size: 1, flags: []string{"fin", "syn", "rst", "psh", "ack", "urg", "ecn", "cwr"}}
	typeCTState   = &dataType{name: "ct_state", size: 4, host: true, flags: []string{"invalid", "established", "related", "new", "", "", "untracked"}}
	typeCTStatus  = &dataType{name: "ct_status", size: 4, host: true, flags: []string{"expected", "seen-reply", "assured", "confirmed", "snat", "dnat", "", "", "", "dying"}}
	typeDirection = &dataType{name: "ct_dir", size: 1, names: enumerated("original", "reply")}
	typePkttype   = &dataType{name: "pkt_type", size: 1, names: enumerated("host", "broadcast", "multicast", "other")}
	typeFib       = &dataType{name: "fib_addrtype", size: 4, host: true, names: enumerated("unspec", "unicast", "local", "broadcast", "anycast", "multicast", "blackhole", "unreachable", "prohibit")}
	typeExists    = &dataType{name: "boolean", host: true, names: enumerated("missing", "exists")}
	typeHardware  = &dataType{name: "iface_type", size: 2, host: true, names: map[uint64]string{1: "ether", 772: "loopback"}}
)

// dataTypes has the types of nft (enum datatypes) that sets use, by number.
var dataTypes = map[uint32]*dataType{
	2: typeNFProto, 7: typeIPv4, 8: typeIPv6, 9: typeEther, 10: typeEthertype, 11: typeArpOp, 12: typeProto, 13: typePort, 14: typeICMP, 15: typeTCPFlags,
	19: typeMark, 26: typeCTState, 27: typeDirection, 28: typeCTStatus, 29: typeICMP6, 31: typePkttype, 38: typeFib, 41: typeIfname,
}

// typesOf returns the types of a value's fields, for the words of elements. kind is a set's
// number of its key or data type: nft stores the types there, in six bits for each field. It
// returns nil if a type is not known.
func typesOf(kind uint32) (all []*dataType) {
	for ; kind != 0; kind >>= 6 {
		d := dataTypes[kind&0x3f]
		if d == nil {
			return nil
		}
		all = append(all, d)
	}
	slices.Reverse(all)
	return all
}

// typeNames names types as a set's declaration does; "" if a type is not known. set then shows
// the number.
func typeNames(kinds []*dataType) string {
	var all []string
	for _, d := range kinds {
		all = append(all, d.name)
	}
	return strings.Join(all, " . ")
}

// typed says an element's key or a map's value, or the range from one to another of the same
// length. to is nil for one value. Each field but the last takes whole words of four bytes. If
// the types do not fit the length, it says hexadecimal digits.
func typed(from, to []byte, kinds []*dataType) string {
	var fields []string
	rest, end := from, to
	for i, d := range kinds {
		length, padded := d.size, (d.size+3)&^3
		if length == 0 && len(kinds) == 1 {
			length, padded = len(rest), len(rest)
		}
		if last := i == len(kinds)-1; length == 0 || len(rest) < length || !last && len(rest) < padded || last && len(rest) > padded || to != nil && len(end) != len(rest) {
			fields = nil
			break
		}
		if to == nil {
			fields = append(fields, d.say(rest[:length]))
		} else {
			fields = append(fields, d.sayRange(rest[:length], end[:length]))
			end = end[min(padded, len(end)):]
		}
		rest = rest[min(padded, len(rest)):]
	}
	switch {
	case len(fields) > 0:
		return strings.Join(fields, " . ")
	case to == nil || slices.Equal(from, to):
		return hexOf(from)
	}
	return hexOf(from) + "-" + hexOf(to)
}
