package iptables

import (
	"bytes"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A headerPart is what a payload expression reads of a packet.
type headerPart int

const (
	noPart     headerPart = iota // nothing, or what iptables compares by a match
	address                      // -s, -d
	protocol                     // -p
	fragmented                   // -f
)

// packet notes what a payload expression reads. Of what iptables compares by a match the text must
// have that match: versions that do not know the expression print the rule without it. 1.8.7 says
// "-p tcp -j ACCEPT" of "tcp dport 80 accept", and "-j ACCEPT" of "ip ttl 64 accept".
func (s *ruleShape) packet(family rules.Family, data []byte) headerPart {
	if s.attr(data, unix.NFTA_PAYLOAD_SREG) != nil {
		s.odd = "it writes to packets, which iptables has no word for"
		return noPart
	}
	offset, length := s.number(data, unix.NFTA_PAYLOAD_OFFSET), s.number(data, unix.NFTA_PAYLOAD_LEN)
	switch s.number(data, unix.NFTA_PAYLOAD_BASE) {
	case unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		s.needs = append(s.needs, []string{"tcp", "udp", "sctp", "dccp", "udplite", "icmp", "icmp6"})
	case unix.NFT_PAYLOAD_NETWORK_HEADER:
		return s.network(family, offset, length)
	default:
		s.odd = "it reads a part of packets that iptables has no word for"
	}
	return noPart
}

// network notes what is read of an IP header. iptables reads no more bytes of an address than its
// prefix has.
func (s *ruleShape) network(family rules.Family, offset, length uint32) headerPart {
	source, destination, size, next, hops, match := uint32(12), uint32(16), uint32(4), uint32(9), uint32(8), "ttl"
	if family == rules.IPv6 {
		source, destination, size, next, hops, match = 8, 24, 16, 6, 7, "hl"
	}
	switch {
	case (offset == source || offset == destination) && length <= size:
		return address
	case offset == next && length == 1:
		return protocol
	case offset == hops && length == 1:
		s.needs = append(s.needs, []string{match})
	case offset == 6 && length == 2 && family == rules.IPv4:
		return fragmented
	default:
		s.odd = "it reads a part of IP's header that iptables has no word for"
	}
	return noPart
}

// bits notes a mask. -f is one for the offset of a fragment; iptables prints it of each mask.
func (s *ruleShape) bits(header headerPart, data []byte) {
	mask := s.attr(data, unix.NFTA_BITWISE_MASK, unix.NFTA_DATA_VALUE)
	if header == fragmented && !bytes.Equal(mask, []byte{0x1f, 0xff}) {
		s.odd = "it reads flags of fragments, which iptables has no word for"
	}
}

// comparesEqual reports whether a comparison asks whether something is equal to one value, or is
// not.
func (s *ruleShape) comparesEqual(e nft.Expression) bool {
	kind := s.number(e.Data, unix.NFTA_CMP_OP)
	return e.Name == "cmp" && (kind == unix.NFT_CMP_EQ || kind == unix.NFT_CMP_NEQ)
}

// ordered notes a comparison by order. iptables has it of ports and the like, which have a match,
// and of addresses: 1.8.9 prints one address for a range of them.
func (s *ruleShape) ordered(header headerPart, loaded uint32) {
	switch {
	case header == address:
		s.needs = append(s.needs, []string{"iprange"})
	case header != noPart, loaded != noKey:
		s.odd = "it compares by order what iptables compares by value only"
	}
}
