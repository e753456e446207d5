package standby

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"sync/atomic"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Misses hears of misses: first packets of flows to a service that the real table did not
// translate. They reach the copy's base chains, whose rules log up to missRate a second at each
// hook. Packets lose the real rules when the flusher's commit begins to take effect. The kernel
// notifies of the commit only at its end: up to 60 and 200 ms later at 1,000 and 5,000 services
// (Linux 6.18). It spends most of that time on notifications. A miss arrives at once.
//
// A miss is a reason to look, and no evidence: a service that its owner has just removed is also
// missed. Receive is for one goroutine; Close ends a Receive that waits.
type Misses struct {
	conn   *netlink.Conn
	group  uint16
	closed atomic.Bool
}

// From linux/netfilter/nfnetlink_log.h, for which golang.org/x/sys has no names.
const (
	nflogConfig   = unix.NFNL_SUBSYS_ULOG<<8 | 1 // NFULNL_MSG_CONFIG
	nflogCommand  = 1                            // NFULA_CFG_CMD
	nflogMode     = 2                            // NFULA_CFG_MODE
	nflogBind     = 1                            // NFULNL_CFG_CMD_BIND
	nflogNoPacket = 0                            // NFULNL_COPY_NONE
)

// groupTries bounds the groups that are tried: each may be another program's. groupsFrom avoids
// small numbers, because people choose these.
const (
	groupTries = 8
	groupsFrom = 1 << 12
)

// ListenMisses opens the socket. It writes no rule: a Standby with Config.Misses does. It fails
// if the kernel has no nfnetlink_log. canaryd then opens the standby only after a flusher's
// commit.
func ListenMisses() (m *Misses, err error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, nft.Wrap("opening a netlink socket for missed packets", err)
	}
	for range groupTries {
		m = &Misses{conn: conn, group: uint16(groupsFrom + rand.N(1<<16-groupsFrom))}
		if err = m.bind(); err == nil {
			return m, nil
		}
	}
	return nil, errors.Join(nft.Wrap("listening to missed packets (nfnetlink_log)", err), conn.Close())
}

// bind makes the log group this socket's, and requests messages without a packet. An error may
// mean that another program has the group, so ListenMisses tries another.
func (m *Misses) bind() error {
	for _, attrs := range [][]byte{
		nft.AppendAttr(nil, nflogCommand, []byte{nflogBind}, 0),
		nft.AppendAttr(nil, nflogMode, []byte{0, 0, 0, 0, nflogNoPacket, 0}, 0), // struct nfulnl_msg_config_mode
	} {
		header := binary.BigEndian.AppendUint16([]byte{unix.AF_UNSPEC, unix.NFNETLINK_V0}, m.group)
		_, err := m.conn.Execute(netlink.Message{
			Header: netlink.Header{Type: nflogConfig, Flags: netlink.Request | netlink.Acknowledge},
			Data:   append(header, attrs...),
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Group returns the log group, for Config.Misses.
func (m *Misses) Group() uint16 { return m.group }

// Receive waits for the next miss; the caller then looks whether rules are lost. Misses that
// found no room in the socket also count as one. The error is net.ErrClosed after Close.
func (m *Misses) Receive() error {
	_, err := m.conn.Receive()
	switch {
	case errors.Is(err, unix.ENOBUFS):
		return nil
	case m.closed.Load():
		return net.ErrClosed
	}
	return nft.Wrap("waiting for missed packets", err)
}

// Close closes the socket. Rules continue to log to its group, but no process hears of it.
func (m *Misses) Close() error {
	m.closed.Store(true)
	return m.conn.Close()
}

// servicesName is the name of the set of services whose misses are logged. Each hook logs up to
// missRate misses a second, and missBurst at once. One message writes serviceElements elements.
const (
	servicesName    = "services"
	missRate        = 50
	missBurst       = 5
	serviceElements = 512
)

// These are nft's own numbers of types. In a key of several fields, each takes typeBits.
const (
	typeIPv4     = 7
	typeIPv6     = 8
	typeProtocol = 12
	typePort     = 13
	typeBits     = 6
)

// registerBytes is the size of the smallest register. A field of a key takes whole registers.
const registerBytes = 4

// bytes returns the key as missed loads it into registers: each field fills its registers.
func (k key) bytes() []byte {
	return append(append([]byte(k.address), k.protocol, 0, 0, 0, byte(k.port>>8), byte(k.port)), 0, 0)
}

// serviceSet returns the attributes of the set of services behind its names. gates makes the
// set. Its key is the destination's address, the protocol and the port, as missed loads them.
func serviceSet(family tableid.Family) []byte {
	address, size := uint32(typeIPv4), 4
	if family == tableid.IPv6 {
		address, size = typeIPv6, 16
	}
	return number(number(nil, unix.NFTA_SET_KEY_TYPE, address<<(2*typeBits)|typeProtocol<<typeBits|typePort),
		unix.NFTA_SET_KEY_LEN, uint32(size+2*registerBytes))
}

// missed returns the rule of a base chain that logs the first packet of a flow to a service
// while the hook is shut. gated puts it in front of the gate in PREROUTING and OUTPUT. group is
// the log group of a Misses.
func missed(h Hook, family tableid.Family, group uint16) rule {
	offset, size := uint32(16), uint32(4) // of the destination in IPv4's header
	if family == tableid.IPv6 {
		offset, size = 24, 16
	}
	next := unix.NFT_REG32_00 + size/registerBytes
	list := expression(nil, "payload", payload(unix.NFT_REG32_00, unix.NFT_PAYLOAD_NETWORK_HEADER, offset, size))
	list = expression(list, "meta", number(number(nil, unix.NFTA_META_KEY, unix.NFT_META_L4PROTO), unix.NFTA_META_DREG, next))
	list = expression(list, "payload", payload(next+1, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2))
	list = expression(list, "lookup", number(nft.AppendAttr(nil, unix.NFTA_LOOKUP_SET, servicesName, 1), unix.NFTA_LOOKUP_SREG, unix.NFT_REG32_00))
	list = ifShut(list, h)
	limit := nft.AppendAttr(nil, unix.NFTA_LIMIT_RATE, binary.BigEndian.AppendUint64(nil, missRate), 0)
	limit = nft.AppendAttr(limit, unix.NFTA_LIMIT_UNIT, binary.BigEndian.AppendUint64(nil, 1), 0)
	list = expression(list, "limit", number(limit, unix.NFTA_LIMIT_BURST, missBurst))
	log := nft.AppendAttr(nil, unix.NFTA_LOG_GROUP, binary.BigEndian.AppendUint16(nil, group), 0)
	log = nft.AppendAttr(log, unix.NFTA_LOG_QTHRESHOLD, binary.BigEndian.AppendUint16(nil, 1), 0)
	return rule{expressions: expression(list, "log", log)}
}
