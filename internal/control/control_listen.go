package control

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/private"
)

// maxSocketPath is the longest path that fits into a struct sockaddr_un, without its closing zero.
const maxSocketPath = 107

// Listen listens on a Unix socket of mode 0600 at path, and creates its folder with mode 0700
// if it is missing. A folder that other users may change is an error. Listen replaces a dead
// daemon's socket. If a process answers there, the error wraps ErrAlreadyRunning. A file that
// is no socket stays, and is an error.
func Listen(ctx context.Context, path string) (*net.UnixListener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("the path of the control socket %s is longer than %d bytes", path, maxSocketPath)
	}
	if err := private.Folder(filepath.Dir(path)); err != nil {
		return nil, err
	}
	if err := removeStale(ctx, path); err != nil {
		return nil, err
	}
	config := net.ListenConfig{Control: ownerOnly}
	l, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return l.(*net.UnixListener), nil
}

// ownerOnly sets the mode of a socket before it is bound. bind creates the file with that mode,
// less the umask, so the file never has a wider one. Changing the umask instead would affect the
// files of all other goroutines.
func ownerOnly(_, _ string, socket syscall.RawConn) error {
	var failed error
	if err := socket.Control(func(fd uintptr) { failed = unix.Fchmod(int(fd), 0o600) }); err != nil {
		return err
	}
	return failed
}

// removeStale removes the socket at path if no process listens there any more: a killed daemon
// leaves it. Another file, or a socket that answers, is an error.
func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s is in the way: it is no socket", path)
	}
	dialer := net.Dialer{Timeout: time.Second}
	conn, err := dialer.DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		conn.Close()
		return fmt.Errorf("%w: it answers at %s", api.ErrAlreadyRunning, path)
	case errors.Is(err, unix.ECONNREFUSED):
		return os.Remove(path)
	default:
		return fmt.Errorf("cannot find out whether a process listens at %s: %w", path, err)
	}
}
