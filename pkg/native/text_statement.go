package native

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// sayIf says a text, and returns false if it is empty. As for all functions of wordings, the
// caller then says a placeholder.
func (s *sentence) sayIf(text string) bool {
	if text != "" {
		s.say(text)
	}
	return text != ""
}

// nat says a translation, to addresses and ports or to a map's value. false: it translates to
// nothing that has words.
func (s *sentence) nat(e expression) bool {
	const (
		source = 0
		prefix = 0x40 // NF_NAT_RANGE_NETMAP
	)
	text := "dnat"
	if e.number(unix.NFTA_NAT_TYPE) == source {
		text = "snat"
	}
	family, kind := "ip", typeIPv4
	if e.number(unix.NFTA_NAT_FAMILY) == unix.NFPROTO_IPV6 {
		family, kind = "ip6", typeIPv6
	}
	flags := e.number(unix.NFTA_NAT_FLAGS)
	to := s.addresses(e, kind, unix.NFTA_NAT_REG_ADDR_MIN, unix.NFTA_NAT_REG_ADDR_MAX)
	first := s.at(e.number(unix.NFTA_NAT_REG_ADDR_MIN))
	mapped := len(first.parts) > 1
	if s.w.family == tableid.Inet || mapped || flags&prefix != 0 {
		text += " " + family
	}
	if flags&prefix != 0 {
		text += " prefix"
	}
	if to == "" && !e.has(unix.NFTA_NAT_REG_PROTO_MIN) {
		return false
	}
	if !mapped {
		to = withPort(to, kind, s.portsOf(e, unix.NFTA_NAT_REG_PROTO_MIN, unix.NFTA_NAT_REG_PROTO_MAX))
	}
	s.say(text + " to " + to + natFlags(flags))
	return true
}

// addresses says the range between two registers, as values of kind; "" if there is none. least
// and most are the attributes that name the registers.
func (s *sentence) addresses(e expression, kind *dataType, least, most uint16) string {
	if !e.has(least) {
		return ""
	}
	low := s.at(e.number(least))
	if high := s.at(e.number(most)); e.has(most) && e.number(most) != e.number(least) && low.value != nil && high.value != nil {
		return kind.say(low.value) + "-" + kind.say(high.value)
	}
	return low.said(kind)
}

func (s *sentence) portsOf(e expression, least, most uint16) string {
	return s.addresses(e, typePort, least, most)
}

// withPort says the target of a translation: to, an address or a range, and a port. Either may
// be "". kind is the address's type: nft puts an IPv6 address between brackets.
func withPort(to string, kind *dataType, port string) string {
	switch {
	case port == "":
		return to
	case kind == typeIPv6 && to != "" && !strings.Contains(to, " "):
		return "[" + strings.ReplaceAll(to, "-", "]-[") + "]:" + port
	}
	return to + ":" + port
}

// natFlags says how a translation chooses among addresses and ports, behind its target; "" if
// it says nothing of that. Flags without words are a number.
func natFlags(flags uint32) string {
	var all []string
	for _, f := range []struct {
		bit  uint32
		word string
	}{{4, "random"}, {0x10, "fully-random"}, {8, "persistent"}} {
		if flags&f.bit != 0 {
			all = append(all, f.word)
		}
	}
	if unknown := flags &^ (1 | 2 | 4 | 8 | 0x10 | 0x40); unknown != 0 {
		all = append(all, fmt.Sprintf("0x%x", unknown))
	}
	if len(all) == 0 {
		return ""
	}
	return " " + strings.Join(all, ",")
}

// masquerade says the expression masq, with the ports that it may take. sentence.expression
// calls it through wordings. It has words for all forms (true).
func (s *sentence) masquerade(e expression) bool {
	text := "masquerade"
	if port := s.portsOf(e, unix.NFTA_MASQ_REG_PROTO_MIN, unix.NFTA_MASQ_REG_PROTO_MAX); port != "" {
		text += " to :" + port
	}
	s.say(text + natFlags(e.number(unix.NFTA_MASQ_FLAGS)))
	return true
}

// redirect says the expression redir, with the ports to which it leads. sentence.expression
// calls it through wordings. It has words for all forms (true).
func (s *sentence) redirect(e expression) bool {
	text := "redirect"
	if port := s.portsOf(e, unix.NFTA_REDIR_REG_PROTO_MIN, unix.NFTA_REDIR_REG_PROTO_MAX); port != "" {
		text += " to :" + port
	}
	s.say(text + natFlags(e.number(unix.NFTA_REDIR_FLAGS)))
	return true
}

// tproxy says a transparent proxy, with its address and port, for wordings. Only a rule of
// family inet names the family. It has words for all forms (true).
func (s *sentence) tproxy(e expression) bool {
	text, kind := "tproxy", typeIPv4
	switch e.number(1) { // NFTA_TPROXY_FAMILY
	case unix.NFPROTO_IPV4:
		text += " ip"
	case unix.NFPROTO_IPV6:
		text, kind = text+" ip6", typeIPv6
	}
	if s.w.family != tableid.Inet {
		text = "tproxy"
	}
	s.say(text + " to " + withPort(s.addresses(e, kind, 2, 0), kind, s.addresses(e, typePort, 3, 0)))
	return true
}

// units has the units of rates, by their seconds.
var units = map[uint64]string{1: "second", 60: "minute", 3600: "hour", 86400: "day", 604800: "week"}

// limitWords says a rate, from the data of an expression or an object; "" if it has no words. A
// usual burst is left out, as nft does.
func limitWords(data []byte) string {
	const bytes, over, usual = 1, 1, 5
	rate, err := nft.AttrUint64(attrOf(data, unix.NFTA_LIMIT_RATE))
	unit, wrong := nft.AttrUint64(attrOf(data, unix.NFTA_LIMIT_UNIT))
	if err != nil || wrong != nil || units[unit] == "" || number(data, unix.NFTA_LIMIT_FLAGS)&^over != 0 {
		return ""
	}
	text := "limit rate "
	if number(data, unix.NFTA_LIMIT_FLAGS) == over {
		text += "over "
	}
	burst := number(data, unix.NFTA_LIMIT_BURST)
	if number(data, unix.NFTA_LIMIT_TYPE) == bytes {
		text += sizeWords(rate) + "/" + units[unit]
		if burst != 0 && burst != usual {
			text += " burst " + sizeWords(uint64(burst))
		}
		return text
	}
	text += fmt.Sprintf("%d/%s", rate, units[unit])
	if burst != usual {
		text += fmt.Sprintf(" burst %d packets", burst)
	}
	return text
}

// quotaWords says a quota without the used bytes, from the data of an expression or an object;
// "" if it has no words.
func quotaWords(data []byte) string {
	const over, depleted = 1, 2
	size, err := nft.AttrUint64(attrOf(data, unix.NFTA_QUOTA_BYTES))
	flags := number(data, unix.NFTA_QUOTA_FLAGS) &^ depleted
	switch {
	case err != nil || flags&^over != 0:
		return ""
	case flags == over:
		return "quota over " + sizeWords(size)
	}
	return "quota " + sizeWords(size)
}

// sizeWords says a number of bytes in the largest unit that divides it, for limits and quotas.
func sizeWords(size uint64) string {
	for _, unit := range []struct {
		size uint64
		name string
	}{{1 << 20, "mbytes"}, {1 << 10, "kbytes"}} {
		if size >= unit.size && size%unit.size == 0 {
			return fmt.Sprintf("%d %s", size/unit.size, unit.name)
		}
	}
	return fmt.Sprintf("%d bytes", size)
}

// durationWords says milliseconds, the timeout of a set or an element, as nft does:
// 1d2h3m4s5ms.
func durationWords(milliseconds uint64) string {
	text := ""
	for _, unit := range []struct {
		length uint64
		name   string
	}{{86400000, "d"}, {3600000, "h"}, {60000, "m"}, {1000, "s"}, {1, "ms"}} {
		if n := milliseconds / unit.length; n > 0 {
			text += strconv.FormatUint(n, 10) + unit.name
			milliseconds %= unit.length
		}
	}
	if text == "" {
		return "0s"
	}
	return text
}

// connections says a limit of the number of connections (connlimit), for wordings. It has words
// for all forms (true).
func (s *sentence) connections(e expression) bool {
	const over = 1
	text := "ct count "
	if e.number(2) == over {
		text += "over "
	}
	s.say(text + strconv.Itoa(int(e.number(1))))
	return true
}

// log says the expression log, for wordings. false: its level or its flags have no words, and
// the rule shows a placeholder.
func (s *sentence) log(e expression) bool {
	const all, warn = 0x2f, 4
	levels := []string{"emerg", "alert", "crit", "err", "warn", "notice", "info", "debug", "audit"}
	text := "log"
	if e.has(unix.NFTA_LOG_PREFIX) {
		text += " prefix " + strconv.Quote(nft.String(attrOf(e.data, unix.NFTA_LOG_PREFIX)))
	}
	short := func(kind uint16, word string) {
		if value := attrOf(e.data, kind); len(value) == 2 {
			text += fmt.Sprintf(" %s %d", word, binary.BigEndian.Uint16(value))
		}
	}
	short(unix.NFTA_LOG_GROUP, "group")
	if n := e.number(unix.NFTA_LOG_SNAPLEN); n != 0 {
		text += fmt.Sprintf(" snaplen %d", n)
	}
	short(unix.NFTA_LOG_QTHRESHOLD, "queue-threshold")
	level := e.number(unix.NFTA_LOG_LEVEL)
	if level >= uint32(len(levels)) {
		return false
	}
	if e.has(unix.NFTA_LOG_LEVEL) && level != warn {
		text += " level " + levels[level]
	}
	switch flags := e.number(unix.NFTA_LOG_FLAGS); {
	case flags == all:
		text += " flags all"
	case flags != 0:
		return false
	}
	s.say(text)
	return true
}

// These are the reasons of a reject, by protocol and code.
var (
	icmpCodes  = map[uint64]string{0: "net-unreachable", 1: "host-unreachable", 2: "prot-unreachable", 3: "port-unreachable", 9: "net-prohibited", 10: "host-prohibited", 13: "admin-prohibited"}
	icmp6Codes = map[uint64]string{0: "no-route", 1: "admin-prohibited", 3: "addr-unreachable", 4: "port-unreachable", 5: "policy-fail", 6: "reject-route"}
	icmpxCodes = map[uint64]string{0: "no-route", 1: "port-unreachable", 2: "host-unreachable", 3: "admin-prohibited"}
)

// reject says the expression reject, with its reason unless nft leaves it out. It drops a
// comparison of the protocol that the reason implies. false: the reason has no words.
func (s *sentence) reject(e expression) bool {
	var code uint64
	if value := attrOf(e.data, unix.NFTA_REJECT_ICMP_CODE); len(value) == 1 {
		code = uint64(value[0])
	}
	protocol, codes, usual := "icmp", icmpCodes, uint64(3)
	switch kind := e.number(unix.NFTA_REJECT_TYPE); {
	case kind == unix.NFT_REJECT_TCP_RST:
		s.imply(transportLayer)
		s.say("reject with tcp reset")
		return true
	case kind == unix.NFT_REJECT_ICMPX_UNREACH:
		protocol, codes, usual = "icmpx", icmpxCodes, 1
	case kind == unix.NFT_REJECT_ICMP_UNREACH && s.network == "ip6":
		protocol, codes, usual = "icmpv6", icmp6Codes, 4
	}
	if protocol != "icmpx" && codes[code] != "" {
		s.imply(networkLayer)
	}
	switch {
	case code == usual && (protocol == "icmpx" || s.w.family != tableid.Inet):
		s.say("reject")
	case codes[code] != "":
		s.say("reject with " + protocol + " " + codes[code])
	default:
		return false
	}
	return true
}

// update says a rule's change of an element of a set. false: the set or the operation is not
// known.
func (s *sentence) update(e expression) bool {
	called := nft.String(attrOf(e.data, unix.NFTA_DYNSET_SET_NAME))
	set := s.w.sets[called]
	verb := map[uint32]string{0: "add", 1: "update", 2: "delete"}[e.number(unix.NFTA_DYNSET_OP)]
	if set == nil || verb == "" {
		return false
	}
	text, _ := s.key(e.number(unix.NFTA_DYNSET_SREG_KEY), int(number(set.Attrs, unix.NFTA_SET_KEY_LEN)))
	if timeout, err := nft.AttrUint64(attrOf(e.data, unix.NFTA_DYNSET_TIMEOUT)); err == nil && timeout != 0 {
		text += " timeout " + durationWords(timeout)
	}
	switch {
	case e.has(dynsetExpressions):
		text += " " + s.w.expressions(attrOf(e.data, dynsetExpressions), s.depth+1)
	case e.has(unix.NFTA_DYNSET_EXPR):
		text += " " + s.w.expressions(nft.AppendAttr(nil, unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, attrOf(e.data, unix.NFTA_DYNSET_EXPR), 0), s.depth+1)
	}
	if e.has(unix.NFTA_DYNSET_SREG_DATA) {
		data, _ := s.key(e.number(unix.NFTA_DYNSET_SREG_DATA), int(number(set.Attrs, unix.NFTA_SET_DATA_LEN)))
		text += " : " + data
	}
	s.say(verb + " @" + name(called) + " { " + text + " }")
	return true
}

// objectTypes has the types of stateful objects, by number: the words of a declaration, and the
// words of a rule.
var objectTypes = map[uint32][2]string{1: {"counter", "counter name"}, 2: {"quota", "quota name"}, 3: {"ct helper", "ct helper set"}, 4: {"limit", "limit name"}, 7: {"ct timeout", "ct timeout set"},
	8: {"secmark", "meta secmark set"}, 9: {"ct expectation", "ct expectation set"}, 10: {"synproxy", "synproxy name"}}

// object says the use of a stateful object, by its name or by a map from a key to names. false:
// its type has no words, or the map is not known.
func (s *sentence) object(e expression) bool {
	if e.has(unix.NFTA_OBJREF_SET_NAME) {
		called := nft.String(attrOf(e.data, unix.NFTA_OBJREF_SET_NAME))
		set := s.w.sets[called]
		if set == nil {
			return false
		}
		key, kinds := s.key(e.number(unix.NFTA_OBJREF_SET_SREG), int(number(set.Attrs, unix.NFTA_SET_KEY_LEN)))
		verb := objectTypes[number(set.Attrs, unix.NFTA_SET_OBJ_TYPE)][1]
		s.say(verb + " " + key + " map " + s.w.setOfRule(called, kinds, s.depth))
		return verb != ""
	}
	verb := objectTypes[e.number(unix.NFTA_OBJREF_IMM_TYPE)][1]
	if verb == "" {
		return false
	}
	s.say(verb + " " + strconv.Quote(nft.String(attrOf(e.data, unix.NFTA_OBJREF_IMM_NAME))))
	return true
}

// synproxy says the expression of that name, with its settings, for wordings. It has words for
// all forms (true).
func (s *sentence) synproxy(e expression) bool {
	const segment, scale, permitted, timestamp = 1, 2, 4, 8
	text, flags := "synproxy", e.number(3)
	if value := attrOf(e.data, 1); flags&segment != 0 && len(value) == 2 {
		text += fmt.Sprintf(" mss %d", binary.BigEndian.Uint16(value))
	}
	if value := attrOf(e.data, 2); flags&scale != 0 && len(value) == 1 {
		text += fmt.Sprintf(" wscale %d", value[0])
	}
	if flags&timestamp != 0 {
		text += " timestamp"
	}
	if flags&permitted != 0 {
		text += " sack-perm"
	}
	s.say(text)
	return true
}

// duplicate says a copy of the packet to an address, for wordings. Other forms, such as to a
// device, have no words (false).
func (s *sentence) duplicate(e expression) bool {
	const byAddress, byDevice = 1, 2
	if !e.has(byAddress) || e.has(byDevice) {
		return false
	}
	to := s.at(e.number(byAddress))
	ip, is := netip.AddrFromSlice(to.value)
	if s.w.family == tableid.Netdev || !is {
		return false
	}
	s.say("dup to " + ip.String())
	return true
}
