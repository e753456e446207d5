package ruleset

import (
	"encoding/binary"
	"math/bits"
	"strconv"

	"golang.org/x/sys/unix"
)

// This file reads ports and flags that expressions of nf_tables compare.

// A transport holds the ports and flags of TCP or UDP that expressions of nf_tables compare one
// after the other (iptables 1.8.8 and later).
type transport struct {
	open                       bool
	source, destination, flags []byte
}

// openTransport begins the ports of TCP or UDP, or continues them; payload calls it. False:
// the rule had ports before or has another protocol. Then it has no words.
func (d *decoder) openTransport() bool {
	if d.native.open {
		return true
	}
	d.native.open = d.once(portsMatch) && (d.protocol == unix.IPPROTO_TCP || d.protocol == unix.IPPROTO_UDP)
	return d.native.open
}

// closeTransport adds the words of the ports and flags that were read, as soon as another
// expression follows. False: a load of the header had no comparison, so the rule has no
// words.
func (d *decoder) closeTransport() bool {
	t := d.native
	d.native = transport{}
	if !t.open {
		return true
	}
	d.matches = append(append(d.matches, " -m "...), protocols[d.protocol]...)
	d.matches = append(append(append(d.matches, t.source...), t.destination...), t.flags...)
	return t.source != nil || t.destination != nil || t.flags != nil
}

const tcpFlagsAt = 13

// compareTransport reads a comparison (op) of ports or of TCP's flags for cmp.
// closeTransport adds the words. False: the rule has no words.
func (d *decoder) compareTransport(op uint32, value []byte) bool {
	if d.offset == tcpFlagsAt && d.protocol == unix.IPPROTO_TCP {
		if d.length != 1 || len(value) != 1 || len(d.mask) != 1 || d.native.flags != nil || op > unix.NFT_CMP_NEQ {
			return false
		}
		d.native.flags = tcpFlags(nil, op == unix.NFT_CMP_NEQ, d.mask[0], value[0])
		return d.native.flags != nil
	}
	if len(value) != 2 {
		return false
	}
	first, last := binary.BigEndian.Uint16(value), binary.BigEndian.Uint16(value)
	switch op {
	case unix.NFT_CMP_EQ, unix.NFT_CMP_NEQ:
	case unix.NFT_CMP_LTE:
		if first = 0; last == 0 {
			return false
		}
	default:
		return false
	}
	return d.compareNativePorts(op == unix.NFT_CMP_NEQ, first, last)
}

// between reads a comparison with a range, which iptables-nft writes for ports only.
// expression calls it. False: the rule has no words.
func (d *decoder) between(data *fields) bool {
	loaded := d.loaded
	register, op := data.number(unix.NFTA_RANGE_SREG), data.number(unix.NFTA_RANGE_OP)
	from, to := data.value(unix.NFTA_RANGE_FROM_DATA, 2), data.value(unix.NFTA_RANGE_TO_DATA, 2)
	d.loaded = nothing
	if loaded != transportHeader || register != d.register || from == nil || to == nil || op > unix.NFT_RANGE_NEQ {
		return false
	}
	first, last := binary.BigEndian.Uint16(from), binary.BigEndian.Uint16(to)
	return first > 0 && first < last && d.compareNativePorts(op == unix.NFT_RANGE_NEQ, first, last)
}

// compareNativePorts keeps the words of a port or range until closeTransport; not means "!".
// d.offset decides between --sport and --dport. False: the rule has no words.
func (d *decoder) compareNativePorts(not bool, first, last uint16) bool {
	words, name := &d.native.source, "--sport"
	if d.offset == 2 {
		words, name = &d.native.destination, "--dport"
	}
	if d.offset > 2 || d.offset == 1 || d.length != 2 || d.mask != nil || *words != nil {
		return false
	}
	*words = appendPorts(nil, not, name, first, last)
	return true
}

// appendPorts appends option name with one port, or with a range of ports; not means "!".
func appendPorts(out []byte, not bool, name string, first, last uint16) []byte {
	out = strconv.AppendUint(option(out, not, name, ""), uint64(first), 10)
	if first != last {
		out = strconv.AppendUint(append(out, ':'), uint64(last), 10)
	}
	return out
}

// tcpFlags appends --tcp-flags with the tested flags (mask) and the flags that must be set;
// not means "!". It is nil if no rule can have them: then the rule has no words.
func tcpFlags(out []byte, not bool, mask, set byte) []byte {
	const all = 0x3f
	if mask == 0 || mask&^all != 0 || set&^mask != 0 {
		return nil
	}
	out = appendFlags(option(out, not, "--tcp-flags", ""), uint32(mask), tcpFlagNames)
	return appendFlags(append(out, ' '), uint32(set), tcpFlagNames)
}

var tcpFlagNames = []string{"FIN", "SYN", "RST", "PSH", "ACK", "URG"}

// appendFlags appends the names of bits with commas between them, or NONE. names begins with
// that of the lowest bit.
func appendFlags(out []byte, flags uint32, names []string) []byte {
	if flags == 0 {
		return append(out, "NONE"...)
	}
	for at := len(out); flags != 0; flags &= flags - 1 {
		if len(out) > at {
			out = append(out, ',')
		}
		out = append(out, names[bits.TrailingZeros32(flags)]...)
	}
	return out
}
