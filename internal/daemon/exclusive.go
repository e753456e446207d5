package daemon

import (
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// ErrAlreadyRunning: another canaryd guards this network namespace.
var ErrAlreadyRunning = errors.New("another canaryd runs in this network namespace")

// exclusiveName is an abstract Unix socket: its names belong to the network
// namespace, as the tables do, and are gone with the process, however it ends.
const exclusiveName = "@canaryd.lock"

// Exclude makes this process the only canaryd of its network namespace until
// release is called or the process ends. It returns an error that wraps
// ErrAlreadyRunning and names the other process if there is one.
//
// The name is free for all: an unprivileged process could take it first. It
// would keep canaryd from starting, and be named for it.
func Exclude() (release func(), err error) { return exclude(exclusiveName) }

func exclude(name string) (release func(), err error) {
	l, err := net.Listen("unix", name)
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("%w%s", ErrAlreadyRunning, holderOf(name))
	}
	if err != nil {
		return nil, err
	}
	return func() { l.Close() }, nil
}

// holderOf names the process that listens on an abstract socket: " (process
// 17 of user 0)", or nothing if it cannot be told. Nobody accepts there; to
// connect is enough.
func holderOf(name string) string {
	conn, err := net.DialTimeout("unix", name, time.Second)
	if err != nil {
		return ""
	}
	defer conn.Close()
	peer, err := peerOf(conn.(*net.UnixConn))
	if err != nil || peer.Pid == 0 {
		return ""
	}
	return fmt.Sprintf(" (process %d of user %d)", peer.Pid, peer.Uid)
}
