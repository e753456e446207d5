package conntrack

import (
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/nft"
)

// An entry is one flow as conntrack has it.
type entry struct {
	flow        nat.Flow
	backend     netip.AddrPort // source of the answer
	translated  bool           // its destination was replaced
	masqueraded bool           // its source was replaced
	seenReply   bool
	synSent     bool      // of TCP: only the first SYN was seen
	start       time.Time // zero where the kernel does not record it
	id          uint32
	attributes  []byte // as the kernel wrote them, the ID included
}

// isUnanswered reports whether the flow has never seen an answer.
func (e *entry) isUnanswered() bool {
	return !e.seenReply && (e.flow.Protocol != nat.TCP || e.synSent)
}

// Values of enum ctattr_type in linux/netfilter/nfnetlink_conntrack.h that nl lacks.
const (
	ctaFilter     = 25 // since Linux 5.8
	ctaStatusMask = 26 // since Linux 5.15
)

// Bits of enum ip_conntrack_status (linux/netfilter/nf_conntrack_common.h).
const (
	statusSeenReply = 1 << 1 // IPS_SEEN_REPLY: both sides sent packets
	statusAssured   = 1 << 2 // IPS_ASSURED: it is a connection
	statusSrcNAT    = 1 << 4 // IPS_SRC_NAT: nat gave the flow another source
	statusDstNAT    = 1 << 5 // IPS_DST_NAT: and another destination
)

// tcpSynSent is TCP_CONNTRACK_SYN_SENT (linux/netfilter/nf_conntrack_tcp.h). A SYN from the other
// side turns it into SYN_SENT2, a SYN with ACK into SYN_RECV.
const tcpSynSent = 1

// parseEntry reads one message of a dump. If it returns false, Sweep leaves the flow alone.
// That is so for other protocols than UDP, SCTP and TCP, and for a flow in a zone, because its
// rules are unknown.
func parseEntry(message []byte) (entry, bool) {
	if len(message) < nl.SizeofNfgenmsg {
		return entry{}, false
	}
	e := entry{attributes: message[nl.SizeofNfgenmsg:]}
	var reply nat.Flow
	var haveOrig, haveReply, haveStatus, zoned bool
	// A damaged attribute ends the loop; earlier attributes count.
	_ = nft.EachAttr(e.attributes, func(kind uint16, value []byte) error {
		switch kind {
		case nl.CTA_TUPLE_ORIG:
			e.flow, haveOrig = parseTuple(value)
		case nl.CTA_TUPLE_REPLY:
			reply, haveReply = parseTuple(value)
		case nl.CTA_STATUS:
			if status, err := nft.AttrUint32(value); err == nil {
				e.readStatus(status)
				haveStatus = true
			}
		case nl.CTA_PROTOINFO:
			state := nft.AttrPath(value, nl.CTA_PROTOINFO_TCP, nl.CTA_PROTOINFO_TCP_STATE)
			e.synSent = len(state) == 1 && state[0] == tcpSynSent
		case nl.CTA_TIMESTAMP:
			e.start = startOf(value)
		case nl.CTA_ID:
			if id, err := nft.AttrUint32(value); err == nil {
				e.id = id
			}
		case nl.CTA_ZONE:
			zoned = true
		}
		return nil
	})
	e.backend = reply.Source
	// Without translation the answer's source is the flow's destination. Without
	// masquerade the answer's destination is the flow's source.
	e.translated = e.translated || reply.Source != e.flow.Destination
	e.masqueraded = e.masqueraded || reply.Destination != e.flow.Source
	e.seenReply = e.seenReply || !haveStatus // unknown: it may have seen an answer
	swept := e.flow.Protocol == nat.UDP || e.flow.Protocol == nat.TCP || e.flow.Protocol == nat.SCTP
	return e, haveOrig && haveReply && !zoned && swept
}

// readStatus notes the flow's status bits (IPS_SEEN_REPLY and others) for parseEntry.
func (e *entry) readStatus(status uint32) {
	e.translated = status&statusDstNAT != 0
	e.masqueraded = status&statusSrcNAT != 0
	e.seenReply = status&(statusSeenReply|statusAssured) != 0
}

// startOf returns the time at which a flow began; zero if the kernel did not record it. isStuck
// compares it with since.
func startOf(timestamp []byte) time.Time {
	ns, err := nft.AttrUint64(nft.AttrPath(timestamp, nl.CTA_TIMESTAMP_START))
	if err != nil || ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, int64(ns))
}

// parseTuple returns the flow in a tuple of addresses and ports; false if a part is missing, as
// for a protocol without ports.
func parseTuple(tuple []byte) (nat.Flow, bool) {
	var from, to netip.Addr
	_ = nft.EachAttr(nft.AttrPath(tuple, nl.CTA_TUPLE_IP), func(kind uint16, value []byte) error {
		switch kind {
		case nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC:
			from, _ = netip.AddrFromSlice(value)
		case nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST:
			to, _ = netip.AddrFromSlice(value)
		}
		return nil
	})
	proto := nft.AttrPath(tuple, nl.CTA_TUPLE_PROTO)
	number := nft.AttrPath(proto, nl.CTA_PROTO_NUM)
	source, destination := nft.AttrPath(proto, nl.CTA_PROTO_SRC_PORT), nft.AttrPath(proto, nl.CTA_PROTO_DST_PORT)
	if !from.IsValid() || !to.IsValid() || len(number) != 1 || len(source) != 2 || len(destination) != 2 {
		return nat.Flow{}, false
	}
	return nat.Flow{
		Protocol:    number[0],
		Source:      netip.AddrPortFrom(from, binary.BigEndian.Uint16(source)),
		Destination: netip.AddrPortFrom(to, binary.BigEndian.Uint16(destination)),
	}, true
}

// A filter is a set of flows to request from the kernel. The zero value has all
// flows.
type filter struct {
	protocol     uint8  // 0: any
	status, mask uint32 // the flow's bits in mask equal status
}

// byProtocol is the flag of CTA_FILTER for CTA_PROTO_NUM (CTA_FILTER_F_CTA_PROTO_NUM in
// net/netfilter/nf_internals.h).
const byProtocol = 1 << 3

// encode returns the filter as attributes of a dump's request. A kernel ignores unknown ones,
// and then returns other flows, too.
func (f filter) encode() []byte {
	var b []byte
	if f.mask != 0 {
		b = nft.AppendAttr(b, nl.CTA_STATUS, binary.BigEndian.AppendUint32(nil, f.status), 0)
		b = nft.AppendAttr(b, ctaStatusMask, binary.BigEndian.AppendUint32(nil, f.mask), 0)
	}
	if f.protocol != 0 {
		const origFlags = 1 // CTA_FILTER_ORIG_FLAGS
		proto := nft.AppendAttr(nil, nl.CTA_PROTO_NUM, []byte{f.protocol}, 0)
		b = nested(b, nl.CTA_TUPLE_ORIG, nested(nil, nl.CTA_TUPLE_PROTO, proto))
		b = nested(b, ctaFilter, nft.AppendAttr(nil, origFlags, binary.NativeEndian.AppendUint32(nil, byProtocol), 0))
	}
	return b
}

// nested appends an attribute that contains others.
func nested(b []byte, kind uint16, inner []byte) []byte {
	return nft.AppendAttr(b, kind|unix.NLA_F_NESTED, inner, 0)
}
