package ruleset

import (
	"encoding/binary"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file reads matches. The structs are from include/uapi/linux/netfilter of Linux 5.10 to
// 6.18, padded with zeros to a multiple of 8 bytes. The words are from the save functions in
// extensions of iptables 1.8.7 to 1.8.13.

// The kinds of matches that a rule has only once: iptables would print two of them as a single
// match, or in another order.
const (
	markMatch = 1 << iota
	connmarkMatch
	limitMatch
	portsMatch
	multiportMatch
	conntrackMatch
	statisticMatch
	addrtypeMatch
	recentMatch
	icmpMatch
	ownerMatch
	physdevMatch
	pkttypeMatch
	rpfilterMatch
	socketMatch
	connlimitMatch
	dscpMatch
	helperMatch
	hopsMatch
	iprangeMatch
	lengthMatch
	nfacctMatch
	policyMatch
	stringMatch
	tcpmssMatch
	tosMatch
	u32Match
)

// once notes that the rule has a match of that kind. It returns false if the rule had one
// before, or if its counter was read already: iptables-nft writes matches first. Then the
// rule has no words.
func (d *decoder) once(kind uint) bool {
	before := d.seen
	d.seen |= kind
	return before&kind == 0 && !d.counted
}

// match adds the words of a match of x_tables; expression calls it. False: the name, the
// revision or the data are unknown. Then Words has no words for the rule, and Label shows a
// digest.
func (d *decoder) match(data *fields) bool {
	name, revision := data.text(unix.NFTA_MATCH_NAME), data.number(unix.NFTA_MATCH_REV)
	info := xtInfo(data.bytes(unix.NFTA_MATCH_INFO, anyLength))
	if data.bad || d.counted {
		return false
	}
	switch {
	case name == "limit" && revision == 0 && d.isEntry:
		return d.once(limitMatch) && d.xtLimit(info)
	case name == "comment" && revision == 0:
		return d.comment(info)
	case name == "tcp" && revision == 0:
		return d.once(portsMatch) && d.protocol == unix.IPPROTO_TCP && d.tcp(info)
	case name == "udp" && revision == 0:
		return d.once(portsMatch) && d.protocol == unix.IPPROTO_UDP && d.udp(info)
	case name == "sctp" && revision == 0:
		return d.once(portsMatch) && d.protocol == unix.IPPROTO_SCTP && d.sctp(info)
	case name == "multiport" && revision == 1:
		return d.once(multiportMatch) && d.hasPorts() && d.multiport(info)
	case name == "mark" && revision == 1:
		return d.once(markMatch) && d.mark(name, info)
	case name == "connmark" && revision == 1:
		return d.once(connmarkMatch) && d.mark(name, info)
	case name == "conntrack" && revision == 3:
		return d.once(conntrackMatch) && d.conntrack(info)
	case name == "statistic" && revision == 0:
		return d.once(statisticMatch) && d.statistic(info)
	case name == "addrtype" && revision == 1:
		return d.once(addrtypeMatch) && d.addrtype(info)
	case name == "recent" && revision == 1:
		return d.once(recentMatch) && d.recent(info)
	case name == "icmp" && revision == 0:
		return d.once(icmpMatch) && d.protocol == unix.IPPROTO_ICMP && d.icmp(name, "--icmp-type", info)
	case name == "icmp6" && revision == 0:
		return d.once(icmpMatch) && d.protocol == unix.IPPROTO_ICMPV6 && d.icmp(name, "--icmpv6-type", info)
	case name == "owner" && revision == 1:
		return d.once(ownerMatch) && d.owner(info)
	case name == "physdev" && revision == 0:
		return d.once(physdevMatch) && d.physdev(info)
	case name == "pkttype" && revision == 0:
		return d.once(pkttypeMatch) && d.pkttype(info)
	case name == "rpfilter" && revision == 0:
		return d.once(rpfilterMatch) && d.flagged(name, info, "--loose", "--validmark", "--accept-local", "--invert")
	case name == "set" && revision == 4:
		return d.set(info)
	case name == "socket" && revision == 3:
		return d.once(socketMatch) && d.flagged(name, info, "--transparent", "--nowildcard", "--restore-skmark")
	}
	return d.hostMatch(name, revision, info)
}

// hasPorts reports whether the rule's protocol has ports.
func (d *decoder) hasPorts() bool {
	return d.protocol == unix.IPPROTO_TCP || d.protocol == unix.IPPROTO_UDP || d.protocol == unix.IPPROTO_SCTP
}

// xtInfo is the data of an extension. Numbers have the byte order of the machine, and ports and
// addresses of targets have network byte order.
type xtInfo []byte

func (x xtInfo) u16(at int) uint16    { return binary.NativeEndian.Uint16(x[at:]) }
func (x xtInfo) u32(at int) uint32    { return binary.NativeEndian.Uint32(x[at:]) }
func (x xtInfo) port(at int) uint16   { return binary.BigEndian.Uint16(x[at:]) }
func (x xtInfo) zeroFrom(at int) bool { return allZero(x[at:]) }

func (d *decoder) say(words string) { d.matches = append(d.matches, words...) }

// comment adds the words of -m comment from its data, struct xt_comment_info. match calls
// it. False: a byte is not printable, and the rule has no words.
func (d *decoder) comment(x xtInfo) bool {
	const size = 256
	if len(x) != size {
		return false
	}
	text, ended := untilZero(x)
	if !ended || !printable(text) {
		return false
	}
	d.say(" -m comment --comment")
	d.matches = appendQuoted(d.matches, text)
	return true
}

// printable reports whether text has no byte that could break a line or be read differently
// elsewhere. A rule with another comment, log prefix or pattern has no words.
func printable(text []byte) bool {
	for _, c := range text {
		if c < ' ' || c > '~' {
			return false
		}
	}
	return true
}

// appendQuoted appends a text, such as a comment or a log's prefix, as xtables_save_string
// of libxtables does. It quotes a text with characters other than letters, digits, _ and -.
func appendQuoted(out, text []byte) []byte {
	bare := len(text) > 0
	for _, c := range text {
		bare = bare && (c == '_' || c == '-' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z')
	}
	if out = append(out, ' '); bare {
		return append(out, text...)
	}
	out = append(out, '"')
	for _, c := range text {
		if c == '"' || c == '\\' || c == '\'' {
			out = append(out, '\\')
		}
		out = append(out, c)
	}
	return append(out, '"')
}

// tcp adds the words of -m tcp from its data, struct xt_tcp; match calls it. False: the rule
// has no words. That holds for an inverted range of all ports too: iptables prints nothing
// for it.
func (d *decoder) tcp(x xtInfo) bool {
	const invertFlags = 4
	if len(x) != 16 || !x.zeroFrom(12) || x[8] != 0 || x[11]&^7 != 0 {
		return false
	}
	d.say(" -m tcp")
	if !d.xtPorts(x, 0, "--sport", x[11]&1 != 0) || !d.xtPorts(x, 4, "--dport", x[11]&2 != 0) {
		return false
	}
	if x[9] == 0 {
		return x[10] == 0 && x[11]&invertFlags == 0
	}
	words := tcpFlags(nil, x[11]&invertFlags != 0, x[9], x[10])
	d.matches = append(d.matches, words...)
	return words != nil
}

// udp adds the words of -m udp from its data, struct xt_udp; match calls it. False: the rule
// has no words.
func (d *decoder) udp(x xtInfo) bool {
	if len(x) != 16 || !x.zeroFrom(9) || x[8]&^3 != 0 {
		return false
	}
	d.say(" -m udp")
	return d.xtPorts(x, 0, "--sport", x[8]&1 != 0) && d.xtPorts(x, 4, "--dport", x[8]&2 != 0)
}

// xtPorts adds the range of ports at x[at:] as option name, for tcp and udp. not: the range
// is inverted. All ports add nothing. False: such a range is inverted, or ends before it
// begins.
func (d *decoder) xtPorts(x xtInfo, at int, name string, not bool) bool {
	first, last := x.u16(at), x.u16(at+2)
	if first == 0 && last == 0xffff {
		return !not
	}
	d.matches = appendPorts(d.matches, not, name, first, last)
	return first <= last
}

// sctp adds the words of -m sctp from its data, struct xt_sctp_info; match calls it. False:
// the rule has no words, for example because it tests chunks.
func (d *decoder) sctp(x xtInfo) bool {
	const chunksAt, chunkFlagsAt, countAt, flagsAt, inverseAt, end = 8, 268, 280, 284, 288, 296
	if len(x) != end || !allZero(x[chunksAt:chunkFlagsAt]) || !allZero(x[countAt:flagsAt]) || !x.zeroFrom(inverseAt+4) {
		return false
	}
	for i := chunkFlagsAt; i < countAt; i += 3 { // no chunk's flags are tested
		if x[i] != 0xff || x[i+1] != 0 || x[i+2] != 0 {
			return false
		}
	}
	flags, inverse := x.u32(flagsAt), x.u32(inverseAt)
	if flags&^3 != 0 || inverse&^flags != 0 {
		return false
	}
	d.say(" -m sctp")
	for i, name := range [2]string{"--sport", "--dport"} {
		at := 4 - 4*i // destination ports are first
		first, last := x.u16(at), x.u16(at+2)
		if flags&(1<<i) == 0 {
			if first != 0 || last != 0 {
				return false
			}
			continue
		}
		if first > last {
			return false
		}
		d.matches = appendPorts(d.matches, inverse&(1<<i) != 0, name, first, last)
	}
	return true
}

// multiport adds the words of -m multiport from its data, struct xt_multiport_v1. match
// calls it. False: the rule has no words.
func (d *decoder) multiport(x xtInfo) bool {
	const portsAt, rangesAt, invertAt = 2, 32, 47
	names := [3]string{"--sports", "--dports", "--ports"}
	if len(x) != 48 || x[0] >= 3 || x[1] < 1 || x[1] > 15 || x[invertAt] > 1 {
		return false
	}
	count := int(x[1])
	if !allZero(x[portsAt+2*count:rangesAt]) || !allZero(x[rangesAt+count-1:invertAt]) {
		return false
	}
	d.say(" -m multiport")
	d.matches = option(d.matches, x[invertAt] == 1, names[x[0]], "")
	for i := range count {
		port, separator := x.u16(portsAt+2*i), byte(',')
		if i > 0 {
			if ranges := x[rangesAt+i-1]; ranges == 1 {
				separator = ':'
				if x.u16(portsAt+2*i-2) >= port || i > 1 && x[rangesAt+i-2] == 1 {
					return false
				}
			} else if ranges != 0 {
				return false
			}
			d.matches = append(d.matches, separator)
		}
		d.matches = strconv.AppendUint(d.matches, uint64(port), 10)
	}
	return true
}

// mark adds the words of match mark or connmark from its data, struct xt_mark_mtinfo1 or
// xt_connmark_mtinfo1. match calls it. False: the rule has no words.
func (d *decoder) mark(name string, x xtInfo) bool {
	if len(x) != 16 || x[8] > 1 || !x.zeroFrom(9) {
		return false
	}
	d.say(" -m ")
	d.say(name)
	d.matches = appendMark(d.matches, x[8] == 1, x.u32(0), x.u32(4))
	return true
}

// conntrack adds the words of -m conntrack --ctstate, or -m state, from struct
// xt_conntrack_mtinfo3. match calls it. False: it tests more than states, and the rule has
// no words.
func (d *decoder) conntrack(x xtInfo) bool {
	const flagsAt, inverseAt, stateAt, end = 146, 148, 150, 168
	const stateFlag, alias = 1, 1 << 13 // XT_CONNTRACK_STATE, XT_CONNTRACK_STATE_ALIAS
	if len(x) != end || !allZero(x[:flagsAt]) || !x.zeroFrom(stateAt+2) {
		return false
	}
	flags, inverse, states := x.u16(flagsAt), x.u16(inverseAt), x.u16(stateAt)
	names := conntrackStates
	switch flags {
	case stateFlag:
		d.say(" -m conntrack")
	case stateFlag | alias:
		d.say(" -m state")
		names = names[:5] // it prints neither SNAT nor DNAT
	default:
		return false
	}
	if inverse&^stateFlag != 0 || states == 0 {
		return false
	}
	name := "--ctstate"
	if flags != stateFlag {
		name = "--state"
	}
	d.matches = option(d.matches, inverse != 0, name, "")
	separator := ""
	for _, s := range names {
		if states&s.bit != 0 {
			d.say(separator)
			d.say(s.name)
			states, separator = states&^s.bit, ","
		}
	}
	return states == 0
}

// conntrackStates are the states in the order in which iptables prints them.
var conntrackStates = []struct {
	bit  uint16
	name string
}{{1, "INVALID"}, {8, "NEW"}, {4, "RELATED"}, {2, "ESTABLISHED"}, {0x100, "UNTRACKED"}, {0x40, "SNAT"}, {0x80, "DNAT"}}

// statistic adds the words of -m statistic from struct xt_statistic_info in mode "random";
// match calls it. False: the rule has no words. iptables also sets the counter of packets,
// as if the probability were a number of packets.
func (d *decoder) statistic(x xtInfo) bool {
	const most = 1 << 31
	if len(x) != 24 {
		return false
	}
	probability := x.u32(4)
	if x.u16(0) != 0 || x.u16(2) > 1 || probability > most || x.u32(8) != 0 || x.u32(12) != probability || !x.zeroFrom(16) {
		return false
	}
	d.say(" -m statistic --mode random")
	d.matches = option(d.matches, x.u16(2) == 1, "--probability", "")
	d.matches = strconv.AppendFloat(d.matches, float64(probability)/most, 'f', 11, 64)
	return true
}

// addrtype adds the words of -m addrtype from its data, struct xt_addrtype_info_v1; match
// calls it. False: the rule has no words.
func (d *decoder) addrtype(x xtInfo) bool {
	const invertSource, invertDestination, limitIn, limitOut, types = 1, 2, 4, 8, 1 << 12
	if len(x) != 8 {
		return false
	}
	source, destination, flags := uint32(x.u16(0)), uint32(x.u16(2)), x.u32(4)
	if source >= types || destination >= types || source|destination == 0 || flags&^15 != 0 || flags&limitIn != 0 && flags&limitOut != 0 ||
		source == 0 && flags&invertSource != 0 || destination == 0 && flags&invertDestination != 0 {
		return false
	}
	d.say(" -m addrtype")
	if source != 0 {
		d.matches = appendFlags(option(d.matches, flags&invertSource != 0, "--src-type", ""), source, addressTypes)
	}
	if destination != 0 {
		d.matches = appendFlags(option(d.matches, flags&invertDestination != 0, "--dst-type", ""), destination, addressTypes)
	}
	if flags&limitIn != 0 {
		d.say(" --limit-iface-in")
	}
	if flags&limitOut != 0 {
		d.say(" --limit-iface-out")
	}
	return true
}

var addressTypes = []string{
	"UNSPEC", "UNICAST", "LOCAL", "BROADCAST", "ANYCAST", "MULTICAST", "BLACKHOLE", "UNREACHABLE", "PROHIBIT", "THROW", "NAT", "XRESOLVE",
}

// recent adds the words of -m recent from its data, struct xt_recent_mtinfo_v1; match calls
// it. False: the rule has no words, for example because its mask is not that of whole
// addresses.
func (d *decoder) recent(x xtInfo) bool {
	const nameAt, sideAt, maskAt, maskEnd, end = 10, 210, 212, 228, 232
	const withTTL, withReap = 16, 32
	if len(x) != end || x[9] > 1 || x[sideAt] > 1 || x[sideAt+1] != 0 || !x.zeroFrom(maskEnd) {
		return false
	}
	used := maskEnd
	if d.family == tableid.IPv4 && allZero(x[maskAt+4:maskEnd]) { // after --mask; IPv4 ignores it
		used = maskAt + 4
	}
	if !allOnes(x[maskAt:used]) {
		return false
	}
	do, flags := recentDeeds[x[8]&15], x[8]&^15
	name, ended := untilZero(x[nameAt:sideAt])
	seconds, hits := x.u32(0), x.u32(4)
	const most = 1<<31 - 1 // iptables prints them as signed numbers
	if do == "" || flags&^(withTTL|withReap) != 0 || flags&withReap != 0 && seconds == 0 || seconds > most || hits > most ||
		!ended || !plainName(name) {
		return false
	}
	d.say(" -m recent")
	if x[9] == 1 {
		d.say(" !")
	}
	d.say(do)
	if seconds != 0 {
		d.matches = strconv.AppendUint(append(d.matches, " --seconds "...), uint64(seconds), 10)
	}
	if flags&withReap != 0 {
		d.say(" --reap")
	}
	if hits != 0 {
		d.matches = strconv.AppendUint(append(d.matches, " --hitcount "...), uint64(hits), 10)
	}
	if flags&withTTL != 0 {
		d.say(" --rttl")
	}
	d.matches = append(append(d.matches, " --name "...), name...)
	if d.family == tableid.IPv4 {
		d.say(" --mask 255.255.255.255")
	} else {
		d.say(" --mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")
	}
	d.say([]string{" --rsource", " --rdest"}[x[sideAt]])
	return true
}

var recentDeeds = [16]string{1: " --rcheck", 2: " --set", 4: " --update", 8: " --remove"}
