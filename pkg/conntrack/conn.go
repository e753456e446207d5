package conntrack

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A conn is a socket to conntrack. vishvananda/netlink's ConntrackFlow is not used: it holds the
// whole table in memory, and reads no ports of SCTP (v1.3.1). Its socket is not used either: it
// takes 130 KB of memory for each answer.
type conn struct {
	fd       int
	sequence uint32
	buffer   []byte
}

const (
	// patience is how long the kernel may take for one message.
	patience = 2 * time.Second
	// datagram is the most that the kernel sends at once: an answer to a dump is as large as
	// the buffer, up to 32 KiB (netlink_dump in net/netlink/af_netlink.c).
	datagram = 32 << 10
)

// The requests of enum cntl_msg_types, with their subsystem.
const (
	msgGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_GET
	msgDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_DELETE
)

var errInterrupted = errors.New("conntrack's table was resized during the dump")

func dial(ctx context.Context) (*conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
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

// dump calls take with each flow that the filter lets through, and on some kernels with others.
func (c *conn) dump(ctx context.Context, f rules.Family, want filter, take func(message []byte)) error {
	return c.ask(ctx, f, msgGet, unix.NLM_F_DUMP, want.encode(), take)
}

// ask sends a request and calls take with each message of the answer. A message is valid until
// take returns.
func (c *conn) ask(ctx context.Context, f rules.Family, kind, flags int, attributes []byte, take func(message []byte)) error {
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

func (c *conn) send(f rules.Family, kind, flags int, attributes []byte) error {
	family := byte(unix.AF_INET)
	if f == rules.IPv6 {
		family = unix.AF_INET6
	}
	c.sequence++
	request := make([]byte, 0, unix.SizeofNlMsghdr+nl.SizeofNfgenmsg+len(attributes))
	request = native32(request, uint32(cap(request)))
	request = native16(request, uint16(kind))
	request = native16(request, uint16(flags|unix.NLM_F_REQUEST))
	request = native32(request, c.sequence)
	request = native32(request, 0)
	request = append(request, family, nl.NFNETLINK_V0, 0, 0)
	request = append(request, attributes...)
	return unix.Sendto(c.fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

// refusal returns the error that the kernel reports at the end of an answer.
func refusal(body []byte) error {
	if len(body) < 4 {
		return nil
	}
	if errno := int32(nl.NativeEndian().Uint32(body)); errno != 0 {
		return fmt.Errorf("conntrack says: %w", unix.Errno(-errno))
	}
	return nil
}
