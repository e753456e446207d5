package watch

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// An inodeWatch is an inotify instance for events of single inodes. fsnotify does
// not suffice: it passes on neither opens nor closes.
type inodeWatch struct {
	fd   int      // file's; file.Fd would make it blocking
	file *os.File // non-blocking, so that close ends a waiting read
}

// An inodeEvent is one event of one watch; IN_Q_OVERFLOW has watch -1.
type inodeEvent struct {
	watch int32
	mask  uint32
}

// newInodeWatch returns an inodeWatch that watches nothing yet.
func newInodeWatch() (*inodeWatch, error) {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("inotify: %w", err)
	}
	return &inodeWatch{fd: fd, file: os.NewFile(uintptr(fd), "inotify")}, nil
}

// add watches the inode of path and returns its watch. The same inode always has the same
// number, so armedLock sees a new lock by it. The number is never 0; add returns 0 with every
// error. It must not follow close.
func (i *inodeWatch) add(path string) (int32, error) {
	watch, err := unix.InotifyAddWatch(i.fd, path, lockMask)
	if err != nil {
		return 0, &os.PathError{Op: "inotify_add_watch", Path: path, Err: err}
	}
	return int32(watch), nil
}

// forget ends a watch, which the kernel may have ended already. It must not
// follow close.
func (i *inodeWatch) forget(watch int32) {
	_, _ = unix.InotifyRmWatch(i.fd, uint32(watch))
}

func (i *inodeWatch) close() { i.file.Close() }

// readSize holds 256 events: events of a file contain no name.
const readSize = 256 * unix.SizeofInotifyEvent

// read sends every event to events until close or ctx ends it, and returns the reason.
// LockWatcher.watch runs it in a goroutine of its own.
func (i *inodeWatch) read(ctx context.Context, events chan<- inodeEvent) error {
	buf := make([]byte, readSize)
	for {
		n, err := i.file.Read(buf)
		if err != nil {
			return err
		}
		for rest := buf[:n]; len(rest) >= unix.SizeofInotifyEvent; {
			// struct inotify_event: wd, mask, cookie, len, then len bytes.
			event := inodeEvent{
				watch: int32(binary.NativeEndian.Uint32(rest)),
				mask:  binary.NativeEndian.Uint32(rest[4:]),
			}
			name := int(binary.NativeEndian.Uint32(rest[12:]))
			rest = rest[min(len(rest), unix.SizeofInotifyEvent+name):]
			select {
			case events <- event:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
}
