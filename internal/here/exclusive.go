// Package here identifies the boot, the network namespace and the time in which canaryd runs, and
// makes it the only canaryd of that namespace.
//
// A daemon calls [Exclude] first: its error wraps api.ErrAlreadyRunning if another canaryd runs.
// [Identify] returns the identity that a stored generation is bound to. [Uptime] is a clock that
// cannot be set; [CPUTime] and [ThreadCPU] measure canaryd's own cost. Any goroutine may call the
// functions.
package here

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net"
	"os"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/serve"
)

// exclusiveName is an abstract Unix socket. Its names belong to the network namespace, as the
// tables do, and disappear with the process, however it ends.
const exclusiveName = "@canaryd.lock"

// Exclude makes this process the only canaryd of its network namespace, until release is called
// or the process ends. If another canaryd runs, the error wraps ErrAlreadyRunning and names the
// process.
//
// Any process may take the name. So a holder counts only if it runs as root or as our own user.
// If another user's process has the name, canaryd takes a name that cannot be guessed, and each
// canaryd checks all names at its start.
func Exclude() (release func(), err error) { return exclude(exclusiveName) }

// Lingers is how long canaryd tries while another process has a name. Two canaryds that start
// at the same time may both give way. A process that is killed while it executes a program
// leaves its name to a child that has not yet executed the program.
const Lingers = time.Second

// exclude is Exclude with that name. It takes the name first and looks for others then, so that
// of two that start at once at most one stays. For Lingers it tries again, because the other
// may be ending.
func exclude(name string) (release func(), err error) {
	for end := time.Now().Add(Lingers); ; {
		l, err := takeName(name)
		if err != nil {
			return nil, err
		}
		rival, err := findRival(name, l.Addr().String())
		if err == nil && rival == nil {
			return holdName(l), nil
		}
		l.Close()
		if err != nil {
			return nil, fmt.Errorf("looking for another canaryd: %w", err)
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("%w%s", api.ErrAlreadyRunning, describe(rival))
		}
		// If two give way to each other, one returns first.
		time.Sleep(10*time.Millisecond + mathrand.N(90*time.Millisecond))
	}
}

// takeName listens on the name or, if that is taken, on the name with a random end. Another
// user's process may hold the name, and must not keep canaryd from starting.
func takeName(name string) (*net.UnixListener, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
	if !errors.Is(err, unix.EADDRINUSE) {
		return l, err
	}
	end := make([]byte, 8)
	_, _ = rand.Read(end) // it never fails
	return net.ListenUnix("unix", &net.UnixAddr{Name: name + "-" + hex.EncodeToString(end), Net: "unix"})
}

// holdName answers on the name until release is called, so that a process that connects sees
// which process has it. A listener that accepts nothing could be filled up, and its holder
// would then be unknown.
func holdName(l *net.UnixListener) (release func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			switch {
			case err == nil:
				conn.Close()
			case errors.Is(err, net.ErrClosed):
				return
			default:
				time.Sleep(100 * time.Millisecond) // no file descriptor is free
			}
		}
	}()
	return func() { l.Close(); <-done }
}

// findRival returns a process that has one of the names and may be a canaryd; nil if there is
// none. own is the name that this process holds.
func findRival(name, own string) (*unix.Ucred, error) {
	names, err := namesTaken(name)
	if err != nil {
		return nil, err
	}
	// A canaryd accepts connections within moments. A process that does not is none.
	for end := time.Now().Add(Lingers); len(names) > 0 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		var full []string
		for _, taken := range names {
			if taken == own {
				continue
			}
			peer, err := holder(taken)
			switch {
			case errors.Is(err, unix.EAGAIN):
				full = append(full, taken)
			case err == nil && mayBeCanaryd(peer):
				return peer, nil
			}
		}
		if names = full; len(names) == 0 {
			break
		}
	}
	return nil, nil
}

// namesTaken returns the names in this network namespace on which a canaryd may listen, its own
// too: name, or name with a random end.
func namesTaken(name string) ([]string, error) {
	file, err := os.Open("/proc/thread-self/net/unix")
	if err != nil {
		return nil, err
	}
	defer file.Close()
	ours := regexp.MustCompile("^" + regexp.QuoteMeta(name) + "(-[0-9a-f]{16})?$")
	var names []string
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		// Num RefCount Protocol Flags Type St Inode Path
		if f := strings.Fields(lines.Text()); len(f) == 8 && f[3] == accepting && ours.MatchString(f[7]) {
			names = append(names, f[7])
		}
	}
	return names, lines.Err()
}

// accepting is the flag of a listening socket in /proc/net/unix (SO_ACCEPTCON).
const accepting = "00010000"

// mayBeCanaryd reports whether a holder of the name runs as root or as our own user, and has
// not ended. Another user's process must not keep canaryd from starting. A user of another user
// namespace is neither root nor our user.
func mayBeCanaryd(peer *unix.Ucred) bool {
	if peer.Uid != 0 && peer.Uid != uint32(os.Geteuid()) {
		return false
	}
	return peer.Pid == 0 || !errors.Is(unix.Kill(int(peer.Pid), 0), unix.ESRCH)
}

// describe names a process: " (process 17 of user 0)". A process of another pid namespace has
// no number in ours.
func describe(peer *unix.Ucred) string {
	if peer.Pid == 0 {
		return ""
	}
	return fmt.Sprintf(" (process %d of user %d)", peer.Pid, peer.Uid)
}

// holder returns the process that listens on an abstract socket. EAGAIN means that its queue is
// full.
func holder(name string) (*unix.Ucred, error) {
	conn, err := net.DialTimeout("unix", name, time.Second)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return serve.PeerOf(conn.(*net.UnixConn))
}
