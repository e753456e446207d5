package iptables

import (
	"bytes"
	"encoding/binary"
	"math"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// This file knows the plain rules: iptables-legacy prints everything in their bytes. The text of
// any other rule may also be another rule's: iptables 1.8.9 prints nothing for "! -i +" or for
// "-m tcp ! --sport :". canaryd tries those texts; see xttrial.go.
//
// The list is closed. It has the extensions that kube-proxy, Docker, CNI plugins and Calico
// write by the thousand, so that these cost no trial. The sources are
// include/uapi/linux/netfilter of Linux 5.10 to 6.18, and extensions/ and iptables/iptables.c of
// iptables 1.8.7 to 1.8.11. Numbers are in the byte order of the machine, ports and addresses in
// that of the network.

// An xtKind is a revision of an extension.
type xtKind struct {
	name     string
	revision byte
}

// plainMatches and plainTargets report whether the text has all of an extension's data, which is
// padded to 8 bytes. The text of any other extension may omit something.
var (
	plainMatches = map[xtKind]func(xtData, rules.Family) bool{
		{"comment", 0}:   func(d xtData, _ rules.Family) bool { return d.text(0, 256) && d.zero(256, len(d)) },
		{"nfacct", 0}:    plainAccount,
		{"nfacct", 1}:    plainAccount,
		{"tcp", 0}:       plainTCP,
		{"udp", 0}:       func(d xtData, _ rules.Family) bool { return d.ports(8) && d.zero(9, len(d)) },
		{"sctp", 0}:      plainSCTP,
		{"multiport", 1}: plainMultiport,
		{"mark", 1}:      func(d xtData, _ rules.Family) bool { return d.byte(8) <= 1 && d.zero(9, len(d)) },
		{"conntrack", 3}: plainConntrack,
		{"addrtype", 1}:  plainAddrtype,
		{"statistic", 0}: plainStatistic,
		{"recent", 1}:    plainRecent,
		{"set", 1}:       plainSet,
		{"set", 2}:       plainSet,
		{"set", 3}:       plainSet,
		{"set", 4}:       plainSet,
	}
	plainTargets = map[xtKind]func(xtData, rules.Family) bool{
		{"MARK", 2}:       func(d xtData, _ rules.Family) bool { return d.zero(8, len(d)) },
		{"TCPMSS", 0}:     func(d xtData, _ rules.Family) bool { return d.zero(2, len(d)) },
		{"REJECT", 0}:     plainReject,
		{"MASQUERADE", 0}: func(d xtData, f rules.Family) bool { return d.natRange(f == rules.IPv4, natRandom|natRandomFully) },
		{"REDIRECT", 0}: func(d xtData, f rules.Family) bool { // 1.8.7 prints --random next to ports only
			return d.natRange(f == rules.IPv4, natPorts)
		},
		{"DNAT", 0}: func(d xtData, f rules.Family) bool { return f == rules.IPv4 && d.natRange(true, natToOne) },
		{"DNAT", 1}: func(d xtData, f rules.Family) bool { return f == rules.IPv6 && d.natRange(false, natToOne) },
		{"DNAT", 2}: func(d xtData, _ rules.Family) bool { return d.zero(40, len(d)) && d.natRange(false, natToOne) },
		{"SNAT", 0}: func(d xtData, f rules.Family) bool {
			return f == rules.IPv4 && d.natRange(true, natToOne|natRandomFully)
		},
		{"SNAT", 1}: func(d xtData, f rules.Family) bool {
			return f == rules.IPv6 && d.natRange(false, natToOne|natRandomFully)
		},
	}
)

// plain reports whether iptables prints everything in the rule's bytes; shape notes it. If not,
// another rule may have the same text, so that canaryd tries the text before it trusts it.
func (r xtRule) plain(family rules.Family) bool {
	plain := r.entry.plainHead(family)
	r.entry.eachMatch(func(m []byte) {
		says := plainMatches[kindOf(m)]
		plain = plain && says != nil && says(m[xtExtDataAt:], family)
	})
	if !plain || r.entry.isStandard {
		return plain
	}
	says := plainTargets[kindOf(r.entry.target)]
	return says != nil && says(r.entry.target[xtExtDataAt:], family)
}

func kindOf(ext []byte) xtKind { return xtKind{string(extName(ext)), ext[xtExtDataAt-1]} }

// The conditions that an entry may invert; IPT_INV_* of linux/netfilter_ipv4/ip_tables.h.
const viaIn, viaOut, source, destination, fragment, proto = 1, 2, 8, 16, 32, 64

// plainHead reports whether iptables prints all of an entry's struct ipt_ip or ip6t_ip6:
// addresses, interfaces, protocol and flags. plain calls it.
func (e xtEntry) plainHead(family rules.Family) bool {
	at, whole := xtLayoutOf(family), e.whole
	addressLen := 4
	if family == rules.IPv6 {
		addressLen = 16
	}
	inverse, flags := whole[at.inverse], whole[at.inverse-1]
	protocol := binary.NativeEndian.Uint16(whole[at.protocol:])
	mask := func(n int) []byte { return whole[(2+n)*addressLen : (3+n)*addressLen] }
	for n, inverted := range [2]byte{source, destination} {
		for i, b := range whole[n*addressLen : (n+1)*addressLen] {
			if b&^mask(n)[i] != 0 {
				return false
			}
		}
		if inverse&inverted != 0 && allZero(mask(n)) {
			return false
		}
	}
	const fragmentFlag, protocolFlag, tosFlag = 1, 1, 2
	if family == rules.IPv6 {
		named := flags&protocolFlag != 0
		if flags&tosFlag != 0 || whole[at.inverse-2] != 0 || inverse&fragment != 0 || named != (protocol != 0) {
			return false
		}
	} else if inverse&fragment != 0 && flags&fragmentFlag == 0 {
		return false
	}
	return e.plainInterface(at.in, at.inMask, inverse&viaIn != 0) && e.plainInterface(at.out, at.outMask, inverse&viaOut != 0) &&
		inverse&^(viaIn|viaOut|source|destination|fragment|proto) == 0 &&
		protocol <= 255 && (inverse&proto == 0 || protocol != 0)
}

// plainInterface reports whether an interface is printed in full: a name, or the beginning of a
// name and a +, with zeros behind. inverted says that the entry inverts it: an inverted empty
// name is not printed in full. plainHead calls it.
func (e xtEntry) plainInterface(nameAt, maskAt int, inverted bool) bool {
	name, mask := e.whole[nameAt:nameAt+xtInterfaceLen], e.whole[maskAt:maskAt+xtInterfaceLen]
	n := 0
	for n < xtInterfaceLen && mask[n] == 0xff {
		n++
	}
	rest := name[n:]
	if n > 0 && name[n-1] != 0 && len(rest) > 0 && rest[0] == '+' {
		rest = rest[1:]
	}
	return allZero(mask[n:]) && allZero(rest) && (n > 0 || !inverted)
}

func allZero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

// xtData are an extension's data. Data that are too short are never plain.
type xtData []byte

// byte returns a byte of the data; 0xff if the data are too short, as u16 does.
func (d xtData) byte(at int) byte {
	if at >= len(d) {
		return 0xff
	}
	return d[at]
}

// u16 returns two bytes of the data in the machine's byte order, port in the network's. If
// the data are too short, both return 0xffff, so that no rule is plain because of missing
// bytes.
func (d xtData) u16(at int) uint16 {
	if at+2 > len(d) {
		return 0xffff
	}
	return binary.NativeEndian.Uint16(d[at:])
}

func (d xtData) port(at int) uint16 {
	if at+2 > len(d) {
		return 0xffff
	}
	return binary.BigEndian.Uint16(d[at:])
}

// u32 is u16 for four bytes, with 0xffffffff for data that are too short.
func (d xtData) u32(at int) uint32 {
	if at+4 > len(d) {
		return 0xffffffff
	}
	return binary.NativeEndian.Uint32(d[at:])
}

// zero reports whether these bytes are zero.
func (d xtData) zero(from, to int) bool { return from <= to && to <= len(d) && allZero(d[from:to]) }

// text reports whether these bytes are a text with zeros behind its end.
func (d xtData) text(from, to int) bool {
	return to <= len(d) && d.zero(from+len(nft.UntilNUL(d[from:to])), to)
}

// plainAccount knows struct xt_nfacct_match_info of linux/netfilter/xt_nfacct.h: a name, and a
// pointer of the kernel, which the kernel clears for readers.
func plainAccount(d xtData, _ rules.Family) bool { return d.text(0, 32) && d.zero(32, len(d)) }

// ports reports whether iptables prints two ranges of ports at 0 and 4 in full, for tcp and
// udp. The byte at flagsAt inverts them. An inverted range of all ports is not printed.
func (d xtData) ports(flagsAt int) bool {
	flags := d.byte(flagsAt)
	for i, inverted := range [2]byte{1, 2} {
		first, last := d.u16(4*i), d.u16(4*i+2) // struct xt_tcp has them in the machine's order
		if first > last || flags&inverted != 0 && first == 0 && last == 0xffff {
			return false
		}
	}
	return flags&^3 == 0
}

// plainTCP reports whether iptables prints all of struct xt_tcp: ports and flags, but no
// option. xtRule.plain calls it; after false, canaryd tries the rule's text.
func plainTCP(d xtData, _ rules.Family) bool {
	const inverted, all = 4, 0x3f
	flags := d.byte(11)
	if len(d) < 12 || flags&^7 != 0 || d[8] != 0 || d[9]&^all != 0 || d[10]&^d[9] != 0 || flags&inverted != 0 && d[9] == 0 {
		return false
	}
	ranges := bytes.Clone(d[:12])
	ranges[11] &^= inverted
	return xtData(ranges).ports(11) && d.zero(12, len(d))
}

// plainMultiport reports whether iptables prints all data of match multiport revision 1
// (struct xt_multiport_v1). xtRule.plain calls it; after false, canaryd tries the rule's
// text. A port with a flag begins a range, and the next port ends it. Two flags in a row, or
// a flag at the last port, are malformed.
func plainMultiport(d xtData, _ rules.Family) bool {
	count := int(d.byte(1))
	if len(d) < 48 || d[0] > 2 || count < 1 || count > 15 || d[47] > 1 || !d.zero(2+2*count, 32) || !d.zero(32+count-1, 47) {
		return false
	}
	for i := range count - 1 {
		if d[32+i] > 1 || d[32+i] == 1 && d[33+i] == 1 {
			return false
		}
	}
	return d.zero(48, len(d))
}

// plainConntrack reports whether iptables prints all of struct xt_conntrack_mtinfo3. It accepts
// only states. xtRule.plain calls it; after false, canaryd tries the rule's text.
func plainConntrack(d xtData, _ rules.Family) bool {
	const flagsAt, inverseAt, stateAt, state, alias = 146, 148, 150, 1, 1 << 13
	known := uint16(0x1cf) // INVALID, ESTABLISHED, RELATED, NEW, SNAT, DNAT, UNTRACKED
	if d.u16(flagsAt) == state|alias {
		known = 0x10f // "-m state" prints no SNAT and no DNAT
	}
	states := d.u16(stateAt)
	return d.u16(flagsAt)&^alias == state && d.u16(inverseAt)&^state == 0 && states != 0 && states&^known == 0 &&
		d.zero(0, flagsAt) && d.zero(stateAt+2, len(d))
}

// plainAddrtype reports whether iptables prints all of struct xt_addrtype_info_v1. xtRule.plain
// calls it; after false, canaryd tries the rule's text.
func plainAddrtype(d xtData, _ rules.Family) bool {
	source, destination, flags := d.u16(0), d.u16(2), d.u32(4)
	return source < 1<<12 && destination < 1<<12 && flags < 16 && (flags&1 == 0 || source != 0) && (flags&2 == 0 || destination != 0) &&
		d.zero(8, len(d))
}

// plainStatistic reports whether iptables prints all of struct xt_statistic_info; after false,
// canaryd tries the rule's text. A probability has eleven printed digits, more than its 31 bits
// have. In either mode iptables sets the counter as in the other mode.
func plainStatistic(d xtData, _ rules.Family) bool {
	const random, nth = 0, 1
	probability, packet := d.u32(4), d.u32(8)
	counts := len(d) >= 16 && d.u32(12) == probability-packet && d.u16(2) == 0 && d.zero(16, len(d))
	return counts && (d.u16(0) == random && packet == 0 && probability <= 1<<31 || d.u16(0) == nth && packet <= probability && probability > 0)
}

// plainSCTP reports whether iptables prints all of struct xt_sctp_info. It accepts only ports.
// xtRule.plain calls it; after false, canaryd tries the rule's text.
func plainSCTP(d xtData, _ rules.Family) bool {
	const flagsAt, inverseAt = 284, 288
	flags := d.u32(flagsAt)
	if len(d) < inverseAt+4 || flags&^3 != 0 || d.u32(inverseAt)&^flags != 0 || !d.zero(8, 268) {
		return false
	}
	for i := range 4 { // no conditions for the flags of chunks
		if c := d[268+3*i : 271+3*i]; c[0] != 0xff || !allZero(c[1:]) {
			return false
		}
	}
	ranges := append(bytes.Clone(d[4:8]), d[:4]...) // in the reverse order of TCP's
	for i, set := range [2]uint32{1, 2} {
		all := flags&set == 0 && xtData(ranges).u16(4*i) == 0 && (xtData(ranges).u16(4*i+2) == 0 || xtData(ranges).u16(4*i+2) == 0xffff)
		if flags&set == 0 && !all || flags&set != 0 && xtData(ranges).u16(4*i) > xtData(ranges).u16(4*i+2) {
			return false
		}
	}
	return d.zero(280, flagsAt) && d.zero(inverseAt+4, len(d))
}

// plainRecent reports whether iptables prints all of struct xt_recent_mtinfo_v1, which must
// have exactly one action. xtRule.plain calls it; after false, canaryd tries the rule's text.
func plainRecent(d xtData, family rules.Family) bool {
	const check, set, update, remove, ttl, reap = 1, 2, 4, 8, 16, 32
	const nameAt, sideAt, maskAt, end = 10, 210, 212, 228
	flags := d.byte(8)
	do := flags & (check | set | update | remove)
	if d.u32(0) > math.MaxInt32 || d.u32(4) > math.MaxInt32 { // printed as signed numbers
		return false
	}
	if len(d) < end || do == 0 || do&(do-1) != 0 || flags&^(do|ttl|reap) != 0 || flags&reap != 0 && d.u32(0) == 0 {
		return false
	}
	maskLen := 4
	if family == rules.IPv6 {
		maskLen = 16
	}
	return d[9] <= 1 && d[nameAt] != 0 && d.text(nameAt, sideAt) && d[sideAt] <= 1 && d.zero(sideAt+1, maskAt) && d.zero(maskAt+maskLen, len(d))
}

// plainSet reports whether iptables prints all of struct xt_set_info; counters behind it are
// not plain. After false, canaryd tries the rule's text. The set's number is the kernel's, so
// the text identifies the set.
func plainSet(d xtData, _ rules.Family) bool {
	const inverted = 1
	dimensions, flags := d.byte(2), d.byte(3)
	return dimensions >= 1 && dimensions <= 6 && flags&^inverted>>(dimensions+1) == 0 && d.zero(4, len(d))
}

// plainReject reports whether all versions of iptables have a name for REJECT's answer.
// xtRule.plain calls it; after false, canaryd tries the rule's text.
func plainReject(d xtData, family rules.Family) bool {
	with := d.u32(0)
	if family == rules.IPv6 {
		return with <= 4 || with == 6
	}
	return with <= 8 && with != 4
}

// The flags of struct nf_nat_range (NF_NAT_RANGE_*).
const (
	natAddresses   = 1
	natPorts       = 2
	natRandom      = 4
	natPersistent  = 8
	natRandomFully = 16
	natToOne       = natAddresses | natPorts | natRandom | natPersistent
)

// natRange reports whether iptables prints all of a nat target's range. The range is a struct
// nf_nat_range or, if compact, nf_nat_ipv4_multi_range_compat. may has the flags that the
// target prints (NF_NAT_RANGE_*). plainTargets uses it.
func (d xtData) natRange(compact bool, may uint32) bool {
	addressLen := 16
	if compact {
		if d.u32(0) != 1 || len(d) < 20 {
			return false
		}
		d, addressLen = d[4:], 4
	}
	if len(d) < 8+2*addressLen {
		return false
	}
	flags, portsAt := d.u32(0), 4+2*addressLen
	low, high := d[4:4+addressLen], d[4+addressLen:portsAt]
	first, last := d.port(portsAt), d.port(portsAt+2)
	addresses := allZero(low) && allZero(high)
	if flags&natAddresses != 0 {
		addresses = !allZero(low) && bytes.Compare(low, high) <= 0
	}
	ports := first == 0 && last == 0
	if flags&natPorts != 0 {
		ports = first != 0 && first <= last
	}
	return flags&^may == 0 && addresses && ports && d.zero(portsAt+4, len(d))
}
