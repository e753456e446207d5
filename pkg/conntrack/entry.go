package conntrack

import (
	"net/netip"
	"time"

	"github.com/vishvananda/netlink/nl"

	"github.com/canaryd/canaryd/pkg/rules"
)

// An entry is one flow as conntrack has it.
type entry struct {
	flow        rules.Flow
	backend     netip.AddrPort // where the answer comes from
	translated  bool           // it is sent to another address than it asked for
	masqueraded bool           // it is sent with another source than its own
	seenReply   bool
	synSent     bool      // of TCP: only the first SYN was seen
	start       time.Time // zero where the kernel does not record it
	id          uint32
	attributes  []byte // as the kernel wrote them, the ID included
}

// isUnanswered reports whether the flow has never seen an answer.
func (e *entry) isUnanswered() bool {
	return !e.seenReply && (e.flow.Protocol != rules.TCP || e.synSent)
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

// parseEntry reads one message of a dump. ok is false for a flow that is not of UDP, SCTP or TCP,
// and for one in a zone: the rules that it met are unknown.
func parseEntry(message []byte) (entry, bool) {
	if len(message) < nl.SizeofNfgenmsg {
		return entry{}, false
	}
	e := entry{attributes: message[nl.SizeofNfgenmsg:]}
	var reply rules.Flow
	var haveOrig, haveReply, haveStatus, zoned bool
	for kind, value := range attributes(e.attributes) {
		switch kind {
		case nl.CTA_TUPLE_ORIG:
			e.flow, haveOrig = parseTuple(value)
		case nl.CTA_TUPLE_REPLY:
			reply, haveReply = parseTuple(value)
		case nl.CTA_STATUS:
			if len(value) == 4 {
				e.readStatus(be32(value))
				haveStatus = true
			}
		case nl.CTA_PROTOINFO:
			e.synSent = tcpState(value) == tcpSynSent
		case nl.CTA_TIMESTAMP:
			e.start = startOf(value)
		case nl.CTA_ID:
			if len(value) == 4 {
				e.id = be32(value)
			}
		case nl.CTA_ZONE:
			zoned = true
		}
	}
	e.backend = reply.Source
	// The answer to a translated flow comes from another address than the flow asked. That to a
	// masqueraded one goes to another address than the flow came from.
	e.translated = e.translated || reply.Source != e.flow.Destination
	e.masqueraded = e.masqueraded || reply.Destination != e.flow.Source
	e.seenReply = e.seenReply || !haveStatus // unknown: it may have
	return e, haveOrig && haveReply && !zoned && isSwept(e.flow.Protocol)
}

func isSwept(protocol uint8) bool {
	return protocol == rules.UDP || protocol == rules.TCP || protocol == rules.SCTP
}

func (e *entry) readStatus(status uint32) {
	e.translated = status&statusDstNAT != 0
	e.masqueraded = status&statusSrcNAT != 0
	e.seenReply = status&(statusSeenReply|statusAssured) != 0
}

// tcpState returns the state of a TCP flow, 0 for another protocol's.
func tcpState(protoinfo []byte) uint8 {
	for kind, value := range attributes(protoinfo) {
		if kind != nl.CTA_PROTOINFO_TCP {
			continue
		}
		for inner, v := range attributes(value) {
			if inner == nl.CTA_PROTOINFO_TCP_STATE && len(v) == 1 {
				return v[0]
			}
		}
	}
	return 0
}

// startOf returns when a flow began.
func startOf(timestamp []byte) time.Time {
	for kind, value := range attributes(timestamp) {
		if kind == nl.CTA_TIMESTAMP_START && len(value) == 8 {
			if ns := be64(value); ns > 0 {
				return time.Unix(0, int64(ns))
			}
		}
	}
	return time.Time{}
}

func parseTuple(tuple []byte) (rules.Flow, bool) {
	var flow rules.Flow
	var from, to netip.Addr
	var ports [2]uint16
	have := 0
	for kind, value := range attributes(tuple) {
		for inner, v := range attributes(value) {
			switch {
			case kind == nl.CTA_TUPLE_IP && (inner == nl.CTA_IP_V4_SRC || inner == nl.CTA_IP_V6_SRC):
				from, _ = netip.AddrFromSlice(v)
			case kind == nl.CTA_TUPLE_IP && (inner == nl.CTA_IP_V4_DST || inner == nl.CTA_IP_V6_DST):
				to, _ = netip.AddrFromSlice(v)
			case kind == nl.CTA_TUPLE_PROTO && inner == nl.CTA_PROTO_NUM && len(v) == 1:
				flow.Protocol = v[0]
				have++
			case kind == nl.CTA_TUPLE_PROTO && inner == nl.CTA_PROTO_SRC_PORT && len(v) == 2:
				ports[0] = be16(v)
				have++
			case kind == nl.CTA_TUPLE_PROTO && inner == nl.CTA_PROTO_DST_PORT && len(v) == 2:
				ports[1] = be16(v)
				have++
			}
		}
	}
	flow.Source, flow.Destination = netip.AddrPortFrom(from, ports[0]), netip.AddrPortFrom(to, ports[1])
	return flow, have == 3 && from.IsValid() && to.IsValid()
}

// A filter is the set of flows that the kernel is asked for. The zero value asks for all.
type filter struct {
	protocol     uint8  // 0: any
	status, mask uint32 // the flow's bits in mask equal status
}

// byProtocol is the flag of CTA_FILTER for CTA_PROTO_NUM (CTA_FILTER_F_CTA_PROTO_NUM in
// net/netfilter/nf_internals.h).
const byProtocol = 1 << 3

// encode returns the filter as attributes. A kernel ignores those that it does not know.
func (f filter) encode() []byte {
	var b []byte
	if f.mask != 0 {
		b = appendAttribute(b, nl.CTA_STATUS, be32Bytes(f.status))
		b = appendAttribute(b, ctaStatusMask, be32Bytes(f.mask))
	}
	if f.protocol != 0 {
		const origFlags = 1 // CTA_FILTER_ORIG_FLAGS
		proto := appendAttribute(nil, nl.CTA_PROTO_NUM, []byte{f.protocol})
		b = nested(b, nl.CTA_TUPLE_ORIG, nested(nil, nl.CTA_TUPLE_PROTO, proto))
		b = nested(b, ctaFilter, appendAttribute(nil, origFlags, native32Bytes(byProtocol)))
	}
	return b
}
