package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A conn is a socket to conntrack, or to the routes. vishvananda/netlink's ConntrackFlow is not
// used: it holds the whole table in memory, and reads no ports of SCTP (v1.3.1). Its socket is not
// used either: it takes 130 KB of memory for each answer.
type conn struct {
	fd       int
	sequence uint32
	buffer   []byte
}

const (
	// patience is the kernel's time limit for one message.
	patience = 2 * time.Second
	// datagram is the size of the kernel's largest datagram. An answer to a dump
	// is as large as the buffer, up to 32 KiB (netlink_dump in
	// net/netlink/af_netlink.c).
	datagram = 32 << 10
)

// The requests, of enum cntl_msg_types, with their subsystem.
const (
	msgGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_GET
	msgDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_DELETE
)

var errInterrupted = errors.New("the table was changed or resized during the dump")

// dial opens a socket of a netlink protocol for one sweep. A message may take as long as patience,
// or less if ctx ends before.
func dial(ctx context.Context, protocol int) (*conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, err
	}
	wait := patience
	if deadline, ok := ctx.Deadline(); ok {
		wait = min(wait, max(time.Until(deadline), time.Millisecond))
	}
	limit := unix.NsecToTimeval(wait.Nanoseconds())
	err = errors.Join(
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit))
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return &conn{fd: fd, buffer: make([]byte, datagram)}, nil
}

func (c *conn) Close() { _ = unix.Close(c.fd) }

// ask sends a request and calls take with each message of the answer. A message is valid until
// take returns. kind is a request, such as msgGet, and flags are netlink's. The error is the
// kernel's, or errInterrupted if a dump may lack entries.
func (c *conn) ask(ctx context.Context, f tableid.Family, kind, flags int, attributes []byte, take func(message []byte)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := c.send(f, kind, flags, attributes); err != nil {
		return err
	}
	interrupted := false
	for {
		n, _, err := unix.Recvfrom(c.fd, c.buffer, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		}
		for header, body := range messages(c.buffer[:n]) {
			if header.Seq != c.sequence {
				continue // the rest of an earlier answer
			}
			interrupted = interrupted || header.Flags&unix.NLM_F_DUMP_INTR != 0
			switch {
			case header.Type == unix.NLMSG_DONE || header.Type == unix.NLMSG_ERROR:
				if err := refusal(body); err != nil {
					return err
				}
				if interrupted {
					return errInterrupted
				}
				return ctx.Err()
			default:
				take(body)
				// The kernel marks each flow as part of a list (ctnetlink_fill_info), even a
				// single one.
				if flags&(unix.NLM_F_DUMP|unix.NLM_F_ACK) == 0 {
					return ctx.Err()
				}
			}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// messages yields the netlink messages in a datagram, header and body, for ask. It stops at a
// message that is longer than the rest.
func messages(data []byte) iter.Seq2[unix.NlMsghdr, []byte] {
	return func(yield func(unix.NlMsghdr, []byte) bool) {
		for len(data) >= unix.SizeofNlMsghdr {
			order := binary.NativeEndian
			h := unix.NlMsghdr{Len: order.Uint32(data), Type: order.Uint16(data[4:]), Flags: order.Uint16(data[6:]), Seq: order.Uint32(data[8:]), Pid: order.Uint32(data[12:])}
			if h.Len < unix.SizeofNlMsghdr || uint64(h.Len) > uint64(len(data)) || !yield(h, data[unix.SizeofNlMsghdr:h.Len]) {
				return
			}
			data = data[min((int(h.Len)+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), len(data)):]
		}
	}
}

// send sends one request, with flags and attributes of netlink. ask receives the answer with
// the same sequence number.
func (c *conn) send(f tableid.Family, kind, flags int, attributes []byte) error {
	family := byte(unix.AF_INET)
	if f == tableid.IPv6 {
		family = unix.AF_INET6
	}
	c.sequence++
	order := binary.NativeEndian
	request := make([]byte, 0, unix.SizeofNlMsghdr+nl.SizeofNfgenmsg+len(attributes))
	request = order.AppendUint32(request, uint32(cap(request)))
	request = order.AppendUint16(request, uint16(kind))
	request = order.AppendUint16(request, uint16(flags|unix.NLM_F_REQUEST))
	request = order.AppendUint32(request, c.sequence)
	request = order.AppendUint32(request, 0)
	request = append(request, family, nl.NFNETLINK_V0, 0, 0)
	request = append(request, attributes...)
	return unix.Sendto(c.fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

// refusal returns the error that the kernel reports at the end of an answer; nil if it reports
// success.
func refusal(body []byte) error {
	if len(body) < 4 {
		return nil
	}
	if errno := int32(binary.NativeEndian.Uint32(body)); errno != 0 {
		return fmt.Errorf("the kernel says: %w", unix.Errno(-errno))
	}
	return nil
}
