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
)

// idle is how long a pod keeps a connection on which nothing comes.
const idle = 10 * time.Minute

// Serve lets every pod answer until ctx ends: over TCP at once, and to every
// byte, with its own address and a newline; over UDP to every datagram with
// its own address. The returned function waits for the end of that.
func (c *Cluster) Serve(ctx context.Context) (wait func(), err error) {
	var listener net.Listener
	var sockets []net.PacketConn
	err = c.In(Pods, func() error {
		var err error
		if listener, err = net.Listen("tcp4", fmt.Sprintf(":%d", streams)); err != nil {
			return err
		}
		at := []netip.Addr{pod(0, 0), pod(0, 1)}
		for i := range HostPorts {
			at = append(at, HostPod(i))
		}
		for _, a := range at {
			socket, err := net.ListenPacket("udp4", netip.AddrPortFrom(a, datagrams).String())
			if err != nil {
				return err
			}
			sockets = append(sockets, socket)
		}
		return nil
	})
	var all sync.WaitGroup
	stop := func() {
		if listener != nil {
			_ = listener.Close()
		}
		for _, s := range sockets {
			_ = s.Close()
		}
	}
	if err != nil {
		stop()
		return nil, fmt.Errorf("listening in the pods: %w", err)
	}
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
	for _, s := range sockets {
		all.Go(func() {
			me := []byte(host(s.LocalAddr()))
			for question := make([]byte, 64); ; {
				_, from, err := s.ReadFrom(question)
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err == nil {
					_, _ = s.WriteTo(me, from) // who does not hear it asks again
				}
			}
		})
	}
	return all.Wait, nil
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
