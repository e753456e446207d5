package native

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A wording puts one kind of expression into words. say knows all attributes up to last. register
// is the attribute that names the register that the expression fills.
type wording struct {
	say      func(*sentence, expression) bool
	last     uint16
	register uint16
}

// wordings has the known kinds of expressions, by name. A kind without say has no words.
var wordings map[string]wording

// init fills wordings here, because its functions refer to wordings themselves.
func init() {
	wordings = map[string]wording{
		"meta":      {(*sentence).meta, unix.NFTA_META_SREG, unix.NFTA_META_DREG},
		"ct":        {(*sentence).ct, unix.NFTA_CT_SREG, unix.NFTA_CT_DREG},
		"payload":   {(*sentence).payload, unix.NFTA_PAYLOAD_CSUM_FLAGS, unix.NFTA_PAYLOAD_DREG},
		"fib":       {(*sentence).fib, unix.NFTA_FIB_FLAGS, unix.NFTA_FIB_DREG},
		"numgen":    {(*sentence).numgen, unix.NFTA_NG_OFFSET, unix.NFTA_NG_DREG},
		"hash":      {(*sentence).hash, unix.NFTA_HASH_TYPE, unix.NFTA_HASH_DREG},
		"socket":    {(*sentence).socket, 3, 2},
		"exthdr":    {(*sentence).header, unix.NFTA_EXTHDR_SREG, unix.NFTA_EXTHDR_DREG},
		"rt":        {(*sentence).route, unix.NFTA_RT_KEY, unix.NFTA_RT_DREG},
		"osf":       {(*sentence).system, osfFlags, 1},
		"xfrm":      {nil, 0, 1},
		"tunnel":    {nil, 0, 2},
		"cmp":       {(*sentence).compare, unix.NFTA_CMP_DATA, 0},
		"range":     {(*sentence).between, unix.NFTA_RANGE_TO_DATA, 0},
		"lookup":    {(*sentence).lookUp, unix.NFTA_LOOKUP_FLAGS, unix.NFTA_LOOKUP_DREG},
		"bitwise":   {(*sentence).bitwise, bitwiseData, unix.NFTA_BITWISE_DREG},
		"byteorder": {(*sentence).swap, unix.NFTA_BYTEORDER_SIZE, unix.NFTA_BYTEORDER_DREG},
		"immediate": {(*sentence).immediate, immediateData, unix.NFTA_IMMEDIATE_DREG},
		"nat":       {(*sentence).nat, unix.NFTA_NAT_FLAGS, 0},
		"masq":      {(*sentence).masquerade, unix.NFTA_MASQ_REG_PROTO_MAX, 0},
		"redir":     {(*sentence).redirect, unix.NFTA_REDIR_FLAGS, 0},
		"counter":   {func(s *sentence, _ expression) bool { s.say("counter"); return true }, unix.NFTA_COUNTER_PAD, 0},
		"limit":     {func(s *sentence, e expression) bool { return s.sayIf(limitWords(e.data)) }, unix.NFTA_LIMIT_PAD, 0},
		"quota":     {func(s *sentence, e expression) bool { return s.sayIf(quotaWords(e.data)) }, unix.NFTA_QUOTA_CONSUMED, 0},
		"connlimit": {(*sentence).connections, 2, 0},
		"log":       {(*sentence).log, unix.NFTA_LOG_FLAGS, 0},
		"reject":    {(*sentence).reject, unix.NFTA_REJECT_ICMP_CODE, 0},
		"notrack":   {func(s *sentence, _ expression) bool { s.say("notrack"); return true }, 0, 0},
		"dynset":    {(*sentence).update, dynsetExpressions, 0},
		"objref":    {(*sentence).object, 5, 0},
		"synproxy":  {(*sentence).synproxy, 3, 0},
		"tproxy":    {(*sentence).tproxy, 3, 0},
		"dup":       {(*sentence).duplicate, 2, 0},
	}
}

// A loaded is a value that an expression reads from outside of the rule.
type loaded struct {
	text string
	kind *dataType
}

// metas are the keys of meta, by number.
var metas = []loaded{
	{"meta length", typeNumber}, {"meta protocol", typeEthertype}, {"meta priority", typePriority}, {"meta mark", typeMark}, {"iif", typeNumber}, {"oif", typeNumber},
	{"iifname", typeIfname}, {"oifname", typeIfname}, {"meta iiftype", typeHardware}, {"meta oiftype", typeHardware}, {"meta skuid", typeNumber}, {"meta skgid", typeNumber},
	{"meta nftrace", typeInteger}, {"meta rtclassid", typeNumber}, {}, {"meta nfproto", typeNFProto}, {"meta l4proto", typeProto}, {"meta ibrname", typeIfname}, {"meta obrname", typeIfname},
	{"meta pkttype", typePkttype}, {"meta cpu", typeNumber}, {"iifgroup", typeNumber}, {"oifgroup", typeNumber}, {"meta cgroup", typeNumber}, {"meta random", typeNumber}, {"meta ipsec", typeExists},
}

// meta says a write of meta data, or keeps its load as a term for a later comparison.
// sentence.expression calls it through wordings, as all such functions. false: it has no words,
// and the rule shows a placeholder.
func (s *sentence) meta(e expression) bool {
	key := e.number(unix.NFTA_META_KEY)
	if key >= uint32(len(metas)) || metas[key].text == "" {
		return false
	}
	m := metas[key]
	if e.has(unix.NFTA_META_SREG) {
		s.say(m.text + " set " + s.at(e.number(unix.NFTA_META_SREG)).said(m.kind))
		return true
	}
	sizes := map[uint32]int{unix.NFT_META_PROTOCOL: 2, unix.NFT_META_NFPROTO: 1, unix.NFT_META_L4PROTO: 1, unix.NFT_META_NFTRACE: 1, unix.NFT_META_PKTTYPE: 1, unix.NFT_META_IIFTYPE: 2, unix.NFT_META_OIFTYPE: 2,
		unix.NFT_META_IIFNAME: 16, unix.NFT_META_OIFNAME: 16, unix.NFT_META_BRI_IIFNAME: 16, unix.NFT_META_BRI_OIFNAME: 16, unix.NFT_META_OIFGROUP + 3: 1}
	t := term{text: m.text, kind: m.kind, size: 4}
	if size := sizes[key]; size != 0 {
		t.size = size
	}
	switch key {
	case unix.NFT_META_L4PROTO:
		t.implies = transportLayer
	case unix.NFT_META_NFPROTO, unix.NFT_META_PROTOCOL:
		if inet := s.w.family == tableid.Inet; inet == (key == unix.NFT_META_NFPROTO) {
			t.implies = networkLayer
		}
	case unix.NFT_META_IIFTYPE:
		t.implies = linkLayer
	}
	s.store(e.number(unix.NFTA_META_DREG), t)
	return true
}

// cts are the keys of ct, by number.
var cts = []loaded{
	{"state", typeCTState}, {"direction", typeDirection}, {"status", typeCTStatus}, {"mark", typeMark}, {}, {}, {"helper", typeIfname}, {"l3proto", typeNFProto}, {}, {},
	{"protocol", typeProto}, {"proto-src", typePort}, {"proto-dst", typePort}, {}, {"packets", typeNumber}, {"bytes", typeNumber}, {"avgpkt", typeNumber}, {"zone", typeNumber}, {}, {"ip saddr", typeIPv4},
	{"ip daddr", typeIPv4}, {"ip6 saddr", typeIPv6}, {"ip6 daddr", typeIPv6}, {"id", typeNumber},
}

// ct says a write of conntrack data, or keeps its load as a term, for wordings. false: its key
// has no words; see meta.
func (s *sentence) ct(e expression) bool {
	key := e.number(unix.NFTA_CT_KEY)
	if key >= uint32(len(cts)) || cts[key].text == "" {
		return false
	}
	text, kind := "ct "+cts[key].text, cts[key].kind
	if e.has(unix.NFTA_CT_DIRECTION) {
		direction := typeDirection.say(attrOf(e.data, unix.NFTA_CT_DIRECTION))
		text = "ct " + direction + " " + cts[key].text
	}
	if e.has(unix.NFTA_CT_SREG) {
		s.say(text + " set " + s.at(e.number(unix.NFTA_CT_SREG)).said(kind))
		return true
	}
	t := term{text: text, kind: kind, size: 4}
	switch {
	case kind != nil && kind.size != 0:
		t.size = kind.size
	case key == unix.NFT_CT_PKTS, key == unix.NFT_CT_BYTES, key == unix.NFT_CT_AVGPKT:
		t.size = 8
	case key == unix.NFT_CT_ZONE:
		t.size = 2
	}
	s.store(e.number(unix.NFTA_CT_DREG), t)
	return true
}

// A field is a part of a header.
type field struct {
	offset, size uint32
	name         string
	kind         *dataType
}

var headers = map[string][]field{
	"ip": {{12, 4, "saddr", typeIPv4}, {16, 4, "daddr", typeIPv4}, {9, 1, "protocol", typeProto}, {8, 1, "ttl", typeInteger}, {2, 2, "length", typeInteger}, {4, 2, "id", typeInteger},
		{6, 2, "frag-off", typeInteger}, {10, 2, "checksum", typeInteger}},
	"ip6": {{8, 16, "saddr", typeIPv6}, {24, 16, "daddr", typeIPv6}, {6, 1, "nexthdr", typeProto}, {7, 1, "hoplimit", typeInteger}, {4, 2, "length", typeInteger}},
	"arp": {{6, 2, "operation", typeArpOp}, {8, 6, "saddr ether", typeEther}, {14, 4, "saddr ip", typeIPv4}, {18, 6, "daddr ether", typeEther}, {24, 4, "daddr ip", typeIPv4},
		{0, 2, "htype", typeInteger}, {2, 2, "ptype", typeEthertype}},
	"ether":   {{0, 6, "daddr", typeEther}, {6, 6, "saddr", typeEther}, {12, 2, "type", typeEthertype}},
	"tcp":     append([]field{{4, 4, "sequence", typeInteger}, {8, 4, "ackseq", typeInteger}, {13, 1, "flags", typeTCPFlags}, {14, 2, "window", typeInteger}, {18, 2, "urgptr", typeInteger}}, ports...),
	"udp":     append([]field{{4, 2, "length", typeInteger}, {6, 2, "checksum", typeInteger}}, ports...),
	"udplite": ports,
	"sctp":    append([]field{{4, 4, "vtag", typeInteger}}, ports...),
	"dccp":    ports,
	"th":      ports,
	"icmp":    {{0, 1, "type", typeICMP}, {1, 1, "code", typeICMPCode}},
	"icmpv6":  {{0, 1, "type", typeICMP6}, {1, 1, "code", typeICMP6Code}},
}

var ports = []field{{0, 2, "sport", typePort}, {2, 2, "dport", typePort}}

// payload says a write to a packet, or keeps the load of a part of it as a term. A part that is
// no known field is said by its offset and length in bits. false: the header has no words.
func (s *sentence) payload(e expression) bool {
	offset, size := e.number(unix.NFTA_PAYLOAD_OFFSET), e.number(unix.NFTA_PAYLOAD_LEN)
	var protocol, raw string
	of := noLayer
	switch e.number(unix.NFTA_PAYLOAD_BASE) {
	case unix.NFT_PAYLOAD_LL_HEADER:
		protocol, raw, of = "ether", "ll", linkLayer
	case unix.NFT_PAYLOAD_NETWORK_HEADER:
		protocol, raw, of = s.network, "nh", networkLayer
	case unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		protocol, raw, of = s.transport, "th", transportLayer
		switch {
		case protocol == "ipv6-icmp":
			protocol = "icmpv6"
		case headers[protocol] == nil:
			protocol = "th"
		}
	default:
		return false
	}
	t := term{text: fmt.Sprintf("@%s,%d,%d", raw, 8*offset, 8*size), size: int(size), kind: &dataType{style: hexadecimalShort}, fields: several(protocol, offset, size)}
	if len(t.fields) > 0 {
		t.implies = of
	}
	for _, f := range headers[protocol] {
		prefix := f.kind.style == address && size < f.size
		if f.offset == offset && (f.size == size || prefix) {
			t.text, t.kind = protocol+" "+f.name, f.kind
			if f.kind == typeEthertype && of == linkLayer {
				t.implies = networkLayer
			}
			if protocol != "th" {
				s.imply(of)
			}
			if strings.HasPrefix(protocol, "icmp") {
				s.imply(networkLayer)
			}
			break
		}
	}
	if e.has(unix.NFTA_PAYLOAD_SREG) {
		s.say(t.text + " set " + s.at(e.number(unix.NFTA_PAYLOAD_SREG)).said(t.kind))
		return true
	}
	s.store(e.number(unix.NFTA_PAYLOAD_DREG), t)
	return true
}

// several returns the fields of a header that together fill a part of it, if there are at least
// two; else nil. nft loads adjacent fields at once, and compare says each of them.
func several(protocol string, offset, size uint32) (all []field) {
	end := offset + size
	for offset < end {
		i := slices.IndexFunc(headers[protocol], func(f field) bool { return f.offset == offset && f.offset+f.size <= end })
		if i < 0 {
			return nil
		}
		f := headers[protocol][i]
		f.name, offset = protocol+" "+f.name, offset+f.size
		all = append(all, f)
	}
	if len(all) < 2 {
		return nil
	}
	return all
}

// fib keeps a lookup in the routing tables as a term, for wordings: a later comparison says it.
// false: its result has no words; see meta.
func (s *sentence) fib(e expression) bool {
	const outInterface, outName, addressType, present = 1, 2, 3, 0x20
	var by []string
	flags := e.number(unix.NFTA_FIB_FLAGS)
	for i, word := range []string{"saddr", "daddr", "mark", "iif", "oif"} {
		if flags&(1<<i) != 0 {
			by = append(by, word)
		}
	}
	t := term{text: "fib " + strings.Join(by, " . "), size: 4}
	switch result := e.number(unix.NFTA_FIB_RESULT); {
	case result == outInterface && flags&present != 0:
		t.text, t.kind = t.text+" oif", typeExists
	case result == outInterface:
		t.text, t.kind = t.text+" oif", typeNumber
	case result == outName:
		t.text, t.kind, t.size = t.text+" oifname", typeIfname, 16
	case result == addressType:
		t.text, t.kind = t.text+" type", typeFib
	default:
		return false
	}
	s.store(e.number(unix.NFTA_FIB_DREG), t)
	return true
}

// numgen keeps a generated number as a term, for wordings: a map or a comparison then says it.
// It has words for all forms (true).
func (s *sentence) numgen(e expression) bool {
	text := fmt.Sprintf("numgen %s mod %d", map[uint32]string{0: "inc", 1: "random"}[e.number(unix.NFTA_NG_TYPE)], e.number(unix.NFTA_NG_MODULUS))
	s.store(e.number(unix.NFTA_NG_DREG), term{text: text + offsetWords(e.number(unix.NFTA_NG_OFFSET)), kind: typeNumber, size: 4})
	return true
}

// offsetWords says the number that numgen or hash adds to its result, behind the other words;
// "" for 0.
func offsetWords(offset uint32) string {
	if offset == 0 {
		return ""
	}
	return fmt.Sprintf(" offset %d", offset)
}

// hash keeps a hash of a packet, or of the registers that it names, as a term, for wordings. It
// has words for all forms (true).
func (s *sentence) hash(e expression) bool {
	const symmetric = 1
	text := "symhash"
	if e.number(unix.NFTA_HASH_TYPE) != symmetric {
		key, _ := s.key(e.number(unix.NFTA_HASH_SREG), int(e.number(unix.NFTA_HASH_LEN)))
		text = "jhash " + key
	}
	text += fmt.Sprintf(" mod %d", e.number(unix.NFTA_HASH_MODULUS))
	if seed := e.number(unix.NFTA_HASH_SEED); seed != 0 {
		text += fmt.Sprintf(" seed 0x%x", seed)
	}
	s.store(e.number(unix.NFTA_HASH_DREG), term{text: text + offsetWords(e.number(unix.NFTA_HASH_OFFSET)), kind: typeNumber, size: 4})
	return true
}

// socket keeps a property of the packet's socket as a term, for wordings. false: the property
// is not known; see meta.
func (s *sentence) socket(e expression) bool {
	sockets := []loaded{{"socket transparent", typeInteger}, {"socket mark", typeMark}, {"socket wildcard", typeInteger}}
	key := e.number(1)
	if key >= uint32(len(sockets)) {
		return false
	}
	size := 1
	if sockets[key].kind == typeMark {
		size = 4
	}
	s.store(e.number(2), term{text: sockets[key].text, kind: sockets[key].kind, size: size})
	return true
}

// header says a write to an extension of a header, or keeps its load as a term, for wordings.
// It knows the maximum segment size of TCP. Others have no words (false).
func (s *sentence) header(e expression) bool {
	const tcpOption, segmentSize = 1, 2
	if e.number(unix.NFTA_EXTHDR_OP) != tcpOption || e.number(unix.NFTA_EXTHDR_FLAGS) != 0 || !bytes.Equal(attrOf(e.data, unix.NFTA_EXTHDR_TYPE), []byte{segmentSize}) ||
		e.number(unix.NFTA_EXTHDR_OFFSET) != 2 || e.number(unix.NFTA_EXTHDR_LEN) != 2 {
		return false
	}
	const text = "tcp option maxseg size"
	switch {
	case e.has(unix.NFTA_EXTHDR_SREG):
		s.say(text + " set " + s.at(e.number(unix.NFTA_EXTHDR_SREG)).said(typeInteger))
	case e.has(unix.NFTA_EXTHDR_DREG):
		s.imply(transportLayer)
		s.store(e.number(unix.NFTA_EXTHDR_DREG), term{text: text, kind: typeInteger, size: 2})
	default:
		return false
	}
	return true
}

// system keeps the operating system that a packet's fingerprint shows as a term, for wordings.
// false: its flags have no words; see meta.
func (s *sentence) system(e expression) bool {
	const ttl, version = 2, 1
	text := "osf"
	if value := attrOf(e.data, ttl); len(value) == 1 && value[0] < 3 {
		text += []string{"", " ttl loose", " ttl skip"}[value[0]]
	}
	word := map[uint32]string{0: " name", version: " version"}[e.number(osfFlags)]
	s.store(e.number(1), term{text: text + word, kind: typeIfname, size: 16})
	return word != ""
}

// route keeps the segment size of the packet's route as a term, for wordings. Other keys of rt
// have no words (false).
func (s *sentence) route(e expression) bool {
	const segmentSize = 3
	if e.number(unix.NFTA_RT_KEY) != segmentSize {
		return false
	}
	s.store(e.number(unix.NFTA_RT_DREG), term{text: "rt mtu", kind: typeNumber, size: 2})
	return true
}
