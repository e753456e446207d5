package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// idle is how long a pod keeps a silent connection.
const idle = 10 * time.Minute

// Serve lets each pod answer with its own address until ctx ends. Over TCP it sends the address
// and a newline, at once and after each received byte; over UDP it answers each datagram. One
// socket for each protocol has the addresses of all pods. wait waits until they are closed.
func (c *Cluster) Serve(ctx context.Context) (wait func(), err error) {
	var listener net.Listener
	var socket *net.UDPConn
	err = c.In(Pods, func() error {
		var err error
		if listener, err = net.Listen("tcp4", fmt.Sprintf(":%d", streams)); err != nil {
			return err
		}
		if socket, err = net.ListenUDP("udp4", &net.UDPAddr{Port: datagrams}); err == nil {
			err = reportDestination(socket)
		}
		return err
	})
	stop := func() {
		if listener != nil {
			_ = listener.Close()
		}
		if socket != nil {
			_ = socket.Close()
		}
	}
	if err != nil {
		stop()
		return nil, fmt.Errorf("listening in the pods: %w", err)
	}
	var all sync.WaitGroup
	all.Go(func() { <-ctx.Done(); stop() })
	all.Go(func() {
		for {
			conn, err := listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				all.Go(func() { answer(ctx, conn) })
			}
		}
	})
	all.Go(func() { answerDatagrams(socket) })
	return all.Wait, nil
}

// reportDestination makes the kernel report the address to which a datagram was sent.
func reportDestination(socket *net.UDPConn) error {
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1) })
	return errors.Join(err, failed)
}

// answerDatagrams answers each datagram from its destination address, until the socket is
// closed.
func answerDatagrams(socket *net.UDPConn) {
	question, control := make([]byte, 64), make([]byte, 64)
	for {
		_, length, _, from, err := socket.ReadMsgUDPAddrPort(question, control)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		if me, err := destination(control[:length]); err == nil {
			// The same control message sets the answer's source. If the answer is lost, the
			// client repeats its request.
			_, _, _ = socket.WriteMsgUDPAddrPort([]byte(me.String()), control[:length], from)
		}
	}
}

// destination returns the address in the control message of a datagram: the last four bytes of
// struct in_pktinfo.
func destination(control []byte) (netip.Addr, error) {
	all, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.Addr{}, err
	}
	for _, m := range all {
		if m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo {
			return netip.AddrFrom4([4]byte(m.Data[8:12])), nil
		}
	}
	return netip.Addr{}, errors.New("the datagram has no destination address")
}

func answer(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	me := []byte(host(conn.LocalAddr()) + "\n")
	for question := make([]byte, 1); ; {
		_ = conn.SetDeadline(time.Now().Add(idle))
		if _, err := conn.Write(me); err != nil {
			return
		}
		if _, err := io.ReadFull(conn, question); err != nil {
			return
		}
	}
}

func host(a net.Addr) string { return netip.MustParseAddrPort(a.String()).Addr().Unmap().String() }
