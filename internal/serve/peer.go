package serve

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// PeerOf returns the process at the other end of a Unix socket, as of the time of the
// connection.
func PeerOf(conn *net.UnixConn) (*unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var peer *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return nil, err
	}
	if failed != nil {
		return nil, fmt.Errorf("asking which process is connected: %w", failed)
	}
	return peer, nil
}
