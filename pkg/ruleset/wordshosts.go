package ruleset

import (
	"bytes"
	"fmt"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file reads the matches that host firewalls, hypervisors and VPN gateways use (ufw, CSF,
// libvirt, strongSwan, Suricata); see wordsmatch.go for the sources.

// hostMatch adds the words of such a match from its data x; match calls it last. A rule has
// each kind of match only once. False: the match is unknown, and the rule has no words.
func (d *decoder) hostMatch(name string, revision uint32, x xtInfo) bool {
	for _, m := range hostMatches {
		if m.name == name && m.revision == revision {
			return d.once(m.kind) && m.read(d, x)
		}
	}
	return false
}

// hostMatches are these matches by the kernel's names.
var hostMatches = []struct {
	name     string
	revision uint32
	kind     uint
	read     func(*decoder, xtInfo) bool
}{
	{"connlimit", 1, connlimitMatch, (*decoder).connlimit},
	{"dscp", 0, dscpMatch, (*decoder).dscp},
	{"helper", 0, helperMatch, (*decoder).helper},
	{"hl", 0, hopsMatch, func(d *decoder, x xtInfo) bool { return d.hops("hl", x) }},
	{"iprange", 1, iprangeMatch, (*decoder).iprange},
	{"length", 0, lengthMatch, func(d *decoder, x xtInfo) bool { return d.size("length", "--length", x) }},
	{"nfacct", 1, nfacctMatch, (*decoder).nfacct},
	{"policy", 0, policyMatch, (*decoder).policy},
	{"string", 1, stringMatch, (*decoder).string},
	{"tcpmss", 0, tcpmssMatch, func(d *decoder, x xtInfo) bool {
		return d.protocol == unix.IPPROTO_TCP && d.size("tcpmss", "--mss", x)
	}},
	{"tos", 1, tosMatch, (*decoder).tos},
	{"ttl", 0, hopsMatch, func(d *decoder, x xtInfo) bool { return d.hops("ttl", x) }},
	{"u32", 0, u32Match, (*decoder).u32},
}

// size adds the words of match length or tcpmss, with option --length or --mss, from its
// data, struct xt_length_info or xt_tcpmss_match_info. False: the rule has no words.
func (d *decoder) size(name, option string, x xtInfo) bool {
	if len(x) != 8 || x[4] > 1 || !x.zeroFrom(5) || x.u16(0) > x.u16(2) {
		return false
	}
	d.say(" -m " + name)
	d.matches = appendPorts(d.matches, x[4] == 1, option, x.u16(0), x.u16(2))
	return true
}

// hops adds the words of match ttl or hl (name) from its data, struct ipt_ttl_info or
// ip6t_hl_info. hostMatch calls it. False: the rule has no words.
func (d *decoder) hops(name string, x xtInfo) bool {
	if len(x) != 8 || int(x[0]) >= len(hopsOrders) || !x.zeroFrom(2) {
		return false
	}
	order := hopsOrders[x[0]]
	d.say(" -m " + name)
	d.matches = strconv.AppendUint(option(d.matches, order.not, "--"+name+order.name, ""), uint64(x[1]), 10)
	return true
}

var hopsOrders = []struct {
	not  bool
	name string
}{{false, "-eq"}, {true, "-eq"}, {false, "-lt"}, {false, "-gt"}}

// dscp adds the words of -m dscp from its data, struct xt_dscp_info; hostMatch calls it.
// False: the rule has no words.
func (d *decoder) dscp(x xtInfo) bool {
	if len(x) != 8 || x[0] > maxDSCP || x[1] > 1 || !x.zeroFrom(2) {
		return false
	}
	d.say(" -m dscp")
	d.matches = fmt.Appendf(option(d.matches, x[1] == 1, "--dscp", ""), "0x%02x", x[0])
	return true
}

const maxDSCP = 0x3f // XT_DSCP_MAX

// tos adds the words of -m tos from its data, struct xt_tos_match_info; hostMatch calls it.
// False: the rule has no words.
func (d *decoder) tos(x xtInfo) bool {
	if len(x) != 8 || x[2] > 1 || !x.zeroFrom(3) {
		return false
	}
	d.say(" -m tos")
	d.matches = fmt.Appendf(option(d.matches, x[2] == 1, "--tos", ""), "0x%02x/0x%02x", x[1], x[0])
	return true
}

// helper adds the words of -m helper from its data, struct xt_helper_info; hostMatch calls
// it. False: the rule has no words.
func (d *decoder) helper(x xtInfo) bool {
	const nameAt, end = 4, 34
	if len(x) != 40 || x.u32(0) > 1 || !x.zeroFrom(end) {
		return false
	}
	name, ended := untilZero(x[nameAt:end])
	if !ended || !plainName(name) {
		return false
	}
	d.say(" -m helper")
	if x.u32(0) == 1 {
		d.say(" !")
	}
	d.matches = appendQuoted(append(d.matches, " --helper"...), name)
	return true
}

// nfacct adds the words of -m nfacct from its data, struct xt_nfacct_match_info_v1.
// hostMatch calls it. iptables prints two spaces before the name. False: the rule has no
// words.
func (d *decoder) nfacct(x xtInfo) bool {
	const end = 32
	if len(x) != 40 || !x.zeroFrom(end) {
		return false
	}
	name, ended := untilZero(x[:end])
	d.matches = append(append(d.matches, " -m nfacct --nfacct-name "...), name...)
	return ended && plainName(name)
}

// iprange adds the words of -m iprange from its data, struct xt_iprange_mtinfo; hostMatch
// calls it. False: the rule has no words.
func (d *decoder) iprange(x xtInfo) bool {
	const flagsAt, invert = 64, 4
	if len(x) != 72 || !x.zeroFrom(flagsAt+1) || x[flagsAt]&3 == 0 || x[flagsAt]>>invert&^x[flagsAt] != 0 || x[flagsAt]&0xcc != 0 {
		return false
	}
	d.say(" -m iprange")
	for i, name := range [2]string{"--src-range", "--dst-range"} {
		at, bit := i*2*netip6Len, byte(1)<<i
		low, okLow := d.address(x[at : at+netip6Len])
		high, okHigh := d.address(x[at+netip6Len : at+2*netip6Len])
		switch {
		case x[flagsAt]&bit == 0:
			if !allZero(x[at : at+2*netip6Len]) {
				return false
			}
		case !okLow || !okHigh:
			return false
		default:
			d.matches = option(d.matches, x[flagsAt]&(bit<<invert) != 0, name, low+"-"+high)
		}
	}
	return true
}

// address returns the text of a union nf_inet_addr, for iprange, NAT and TEE. plain is false
// if programs print it differently (see plainAddress), or for 0.0.0.0, ::, or bytes behind
// the address. Then the rule has no words.
func (d *decoder) address(x []byte) (text string, plain bool) {
	size := 4
	if d.family == tableid.IPv6 {
		size = netip6Len
	}
	addr, _ := netip.AddrFromSlice(x[:size])
	return addr.String(), plainAddress(addr) && !addr.IsUnspecified() && (len(x) == size || allZero(x[size:]))
}

// connlimit adds the words of match connlimit from its data, struct xt_connlimit_info;
// hostMatch calls it. False: this package has no words for these data, and so none for the
// rule. The mask is a prefix length: all addresses within it count together.
func (d *decoder) connlimit(x xtInfo) bool {
	const limitAt, flagsAt, end, upTo, destination = 16, 20, 24, 1, 2
	size := 4
	if d.family == tableid.IPv6 {
		size = netip6Len
	}
	if len(x) != 32 || x.u32(flagsAt)&^3 != 0 || !x.zeroFrom(end) {
		return false
	}
	bits := prefixOf(x[:size])
	if every := bits == 8*size && allOnes(x[:limitAt]); bits < 0 || !every && !allZero(x[size:limitAt]) {
		return false // IPv4 ignores the rest, which is all ones without --connlimit-mask
	}
	name, side := " --connlimit-above ", " --connlimit-saddr"
	if x.u32(flagsAt)&upTo != 0 {
		name = " --connlimit-upto "
	}
	if x.u32(flagsAt)&destination != 0 {
		side = " --connlimit-daddr"
	}
	d.matches = fmt.Appendf(d.matches, " -m connlimit%s%d --connlimit-mask %d%s", name, x.u32(limitAt), bits, side)
	return true
}

// string adds the words of -m string from its data, struct xt_string_info; hostMatch calls
// it. False: the pattern is not printed unchanged, and the rule has no words.
func (d *decoder) string(x xtInfo) bool {
	const algorithmAt, patternAt, lengthAt, flagsAt, end = 4, 20, 148, 149, 152
	const invert, ignoreCase, last = 1, 2, 0xffff
	if len(x) != 160 || int(x[lengthAt]) > lengthAt-patternAt || x[lengthAt] == 0 || x[flagsAt]&^3 != 0 || !x.zeroFrom(flagsAt+1) {
		return false
	}
	algorithm, ended := untilZero(x[algorithmAt:patternAt])
	pattern, rest := x[patternAt:patternAt+int(x[lengthAt])], x[patternAt+int(x[lengthAt]):lengthAt]
	if !ended || !plainName(algorithm) || !printable(pattern) || bytes.ContainsAny(pattern, `"'\`) || !allZero(rest) {
		return false
	}
	d.say(" -m string")
	d.matches = append(option(d.matches, x[flagsAt]&invert != 0, "--string", `"`), pattern...)
	d.say(`" --algo ` + string(algorithm))
	if from := x.u16(0); from != 0 {
		d.matches = strconv.AppendUint(append(d.matches, " --from "...), uint64(from), 10)
	}
	if to := x.u16(2); to == 0 {
		return false
	} else if to != last {
		d.matches = strconv.AppendUint(append(d.matches, " --to "...), uint64(to), 10)
	}
	if x[flagsAt]&ignoreCase != 0 {
		d.say(" --icase")
	}
	return true
}

// policy adds the words of -m policy from its data, struct xt_policy_info; hostMatch calls
// it. False: the rule names addresses of tunnels or is otherwise unusual, and has no words.
func (d *decoder) policy(x xtInfo) bool {
	const elements, size, flagsAt, lengthAt, end = 4, 76, 304, 306, 308
	const in, out, none, strict = 1, 2, 4, 8
	if len(x) != 312 || !x.zeroFrom(end) || x.u16(lengthAt) > elements {
		return false
	}
	flags, used := x.u16(flagsAt), int(x.u16(lengthAt))
	if flags&^(in|out|none|strict) != 0 || flags&in != 0 == (flags&out != 0) || flags&none != 0 && flags&strict != 0 ||
		flags&none != 0 == (used > 0) || flags&strict == 0 && used > 1 || !allZero(x[used*size:flagsAt]) {
		return false
	}
	d.say(" -m policy --dir ")
	d.say([]string{"in", "out"}[flags>>1&1])
	d.say(" --pol ")
	d.say([]string{"ipsec", "none"}[flags>>2&1])
	if flags&strict != 0 {
		d.say(" --strict")
	}
	for i := range used {
		if i > 0 {
			d.say(" --next")
		}
		if !d.policyElement(x[i*size : (i+1)*size]) {
			return false
		}
	}
	return true
}

// policyElement adds the options of one element of a policy, struct xt_policy_elem; policy
// calls it for each. False: the rule has no words.
func (d *decoder) policyElement(x xtInfo) bool {
	const spiAt, requestAt, protoAt, modeAt, matchAt, invertAt = 64, 68, 72, 73, 74, 75
	const proto, mode, spi, request = 4, 8, 16, 32
	match, invert := x[matchAt], x[invertAt]
	if !allZero(x[:spiAt]) || match&^(proto|mode|spi|request) != 0 || invert&^match != 0 {
		return false
	}
	if match&request == 0 && x.u32(requestAt) != 0 || match&spi == 0 && x.u32(spiAt) != 0 ||
		match&proto == 0 && x[protoAt] != 0 || match&mode == 0 && x[modeAt] != 0 {
		return false
	}
	if match&request != 0 {
		d.matches = strconv.AppendUint(option(d.matches, invert&request != 0, "--reqid", ""), uint64(x.u32(requestAt)), 10)
	}
	if match&spi != 0 {
		d.matches = fmt.Appendf(option(d.matches, invert&spi != 0, "--spi", ""), "0x%x", x.u32(spiAt)) // as it was given
	}
	if match&proto != 0 {
		name := map[byte]string{unix.IPPROTO_ESP: "esp", unix.IPPROTO_AH: "ah"}[x[protoAt]]
		if d.matches = option(d.matches, invert&proto != 0, "--proto", name); name == "" {
			return false
		}
	}
	if match&mode != 0 {
		name := map[byte]string{0: "transport", 1: "tunnel"}[x[modeAt]] // XT_POLICY_MODE_*
		if d.matches = option(d.matches, invert&mode != 0, "--mode", name); name == "" {
			return false
		}
	}
	return true
}

// u32 adds the words of -m u32, tests of numbers in the packet, from its data, struct
// xt_u32. hostMatch calls it. False: the rule has no words.
func (d *decoder) u32(x xtInfo) bool {
	const most, testSize, valuesAt, countAt = 11, 180, 88, 176
	const testsAt, invertAt, end = most * testSize, most*testSize + 1, most*testSize + 2
	if len(x) != 1984 || x[testsAt] < 1 || x[testsAt] > most || x[invertAt] > 1 || !x.zeroFrom(end) || !allZero(x[int(x[testsAt])*testSize:testsAt]) {
		return false
	}
	d.say(" -m u32")
	d.matches = option(d.matches, x[invertAt] == 1, "--u32", `"`)
	for i := range int(x[testsAt]) {
		test := x[i*testSize : (i+1)*testSize]
		numbers, values := int(test[countAt]), int(test[countAt+1])
		if numbers < 1 || numbers > most || values < 1 || values > most || test.u32(4) != 0 || !test.zeroFrom(countAt+2) ||
			!allZero(test[8*numbers:valuesAt]) || !allZero(test[valuesAt+8*values:countAt]) {
			return false
		}
		if i > 0 {
			d.say("&&")
		}
		for n := range numbers {
			if n > 0 {
				if test.u32(8*n+4) >= uint32(len(u32Operators)) {
					return false
				}
				d.say(u32Operators[test[8*n+4]])
			}
			d.matches = fmt.Appendf(d.matches, "0x%x", test.u32(8*n))
		}
		for n := range values {
			d.say([2]string{"=", ","}[min(n, 1)])
			first, last := test.u32(valuesAt+8*n), test.u32(valuesAt+8*n+4)
			if d.matches = fmt.Appendf(d.matches, "0x%x", first); first != last {
				d.matches = fmt.Appendf(d.matches, ":0x%x", last)
			}
		}
	}
	d.say(`"`)
	return true
}

var u32Operators = []string{"&", "<<", ">>", "@"} // XT_U32_*
