package conntrack

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Constants of the package, for tests.
const (
	MaxDeleted = maxDeleted
	SeenReply  = statusSeenReply
	Assured    = statusAssured
)

// Plain returns the table of a kernel that cannot filter.
func Plain() Kernel { return Kernel{plain: true} }

// A Parsed is parseEntry's result for a message.
type Parsed struct {
	Flow                                     nat.Flow
	Backend                                  netip.AddrPort
	Translated, Masqueraded, Silent, Started bool
}

// ParseEntry returns parseEntry's result for a message. ok reports whether it is
// a flow.
func ParseEntry(message []byte) (p Parsed, attributes []byte, ok bool) {
	e, ok := parseEntry(message)
	return Parsed{e.flow, e.backend, e.translated, e.masqueraded, e.isUnanswered(), !e.start.IsZero()}, e.attributes, ok
}

// A Made is a flow that a test puts into conntrack's table.
type Made struct {
	Protocol uint8
	From, To netip.AddrPort
	By, At   netip.AddrPort // the answer's source and destination; empty: To and From
	State    uint8          // of TCP
	Status   uint32
	Zone     uint16
}

// Create puts flows into the table.
func Create(f rules.Family, flows ...Made) error {
	return write(f, unix.NLM_F_CREATE|unix.NLM_F_EXCL, flows...)
}

// Change gives flows of the table another state or status.
func Change(f rules.Family, flows ...Made) error { return write(f, 0, flows...) }

func write(f rules.Family, flags int, flows ...Made) error {
	c, err := dial(context.Background(), unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer c.Close()
	const create = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_NEW
	for _, m := range flows {
		if err := c.ask(context.Background(), f, create, flags|unix.NLM_F_ACK, m.encode(), func([]byte) {}); err != nil {
			return fmt.Errorf("making %+v: %w", m, err)
		}
	}
	return nil
}

func (m Made) encode() []byte {
	if !m.By.IsValid() {
		m.By = m.To
	}
	if !m.At.IsValid() {
		m.At = m.From
	}
	const confirmed, timeout = 1 << 3, 600 // IPS_CONFIRMED: every flow has it
	b := m.tuple(nl.CTA_TUPLE_ORIG, m.From, m.To)
	b = append(b, m.tuple(nl.CTA_TUPLE_REPLY, m.By, m.At)...)
	b = nft.AppendAttr(b, nl.CTA_STATUS, binary.BigEndian.AppendUint32(nil, m.Status|confirmed), 0)
	b = nft.AppendAttr(b, nl.CTA_TIMEOUT, binary.BigEndian.AppendUint32(nil, timeout), 0)
	if m.Protocol == nat.TCP {
		state := nft.AppendAttr(nil, nl.CTA_PROTOINFO_TCP_STATE, []byte{m.State}, 0)
		b = nested(b, nl.CTA_PROTOINFO, nested(nil, nl.CTA_PROTOINFO_TCP, state))
	}
	if m.Zone != 0 {
		b = nft.AppendAttr(b, nl.CTA_ZONE, binary.BigEndian.AppendUint16(nil, m.Zone), 0)
	}
	return b
}

func (m Made) tuple(kind uint16, from, to netip.AddrPort) []byte {
	source, destination := uint16(nl.CTA_IP_V4_SRC), uint16(nl.CTA_IP_V4_DST)
	if from.Addr().Is6() {
		source, destination = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	addresses := nft.AppendAttr(nft.AppendAttr(nil, source, from.Addr().AsSlice(), 0), destination, to.Addr().AsSlice(), 0)
	proto := nft.AppendAttr(nil, nl.CTA_PROTO_NUM, []byte{m.Protocol}, 0)
	proto = nft.AppendAttr(proto, nl.CTA_PROTO_SRC_PORT, binary.BigEndian.AppendUint16(nil, from.Port()), 0)
	proto = nft.AppendAttr(proto, nl.CTA_PROTO_DST_PORT, binary.BigEndian.AppendUint16(nil, to.Port()), 0)
	return nested(nil, kind, nested(nested(nil, nl.CTA_TUPLE_IP, addresses), nl.CTA_TUPLE_PROTO, proto))
}

// MessageBytes returns how many bytes of data messages reads.
func MessageBytes(data []byte) (n int) {
	for _, body := range messages(data) {
		n += unix.SizeofNlMsghdr + len(body)
	}
	return n
}
