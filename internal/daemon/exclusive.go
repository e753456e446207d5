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

// lingers is how long the name may outlive its process. Who is killed while it
// executes a program leaves the name to a child that has not executed yet: 1 s
// after SIGKILL in the middle of a replay is far beyond what was ever seen.
const lingers = time.Second

func exclude(name string) (release func(), err error) {
	l, err := net.Listen("unix", name)
	for end := time.Now().Add(lingers); errors.Is(err, unix.EADDRINUSE) && orphaned(name) && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
		l, err = net.Listen("unix", name)
	}
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("%w%s", ErrAlreadyRunning, holderOf(name))
	}
	if err != nil {
		return nil, err
	}
	return func() { l.Close() }, nil
}

// orphaned reports whether the process that took the name has ended.
func orphaned(name string) bool {
	peer, err := holder(name)
	return err != nil || peer.Pid != 0 && errors.Is(unix.Kill(int(peer.Pid), 0), unix.ESRCH)
}

// holderOf names the process that listens on an abstract socket: " (process
// 17 of user 0)", or nothing if it cannot be told. Nobody accepts there; to
// connect is enough.
func holderOf(name string) string {
	peer, err := holder(name)
	if err != nil || peer.Pid == 0 {
		return ""
	}
	return fmt.Sprintf(" (process %d of user %d)", peer.Pid, peer.Uid)
}

func holder(name string) (*unix.Ucred, error) {
	conn, err := net.DialTimeout("unix", name, time.Second)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return peerOf(conn.(*net.UnixConn))
}
