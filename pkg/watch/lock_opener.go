package watch

import (
	"encoding/binary"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// openerMask selects the relevant events of an opener. Of several openers, the
// last that closes the lock held it last.
const openerMask = unix.FAN_OPEN | unix.FAN_CLOSE_WRITE | unix.FAN_CLOSE_NOWRITE

// openersKept bounds the number of openers in memory that have not closed yet.
const openersKept = 64

// An openerWatch is a fanotify group that names the processes that open and close
// the xtables lock. Unlike inotify, fanotify names the process, even if it
// releases the lock before /proc/locks could be read. Of 200 flushes by
// iptables-legacy openerWatch found 200 pids and some 130 command lines.
// lockHolder found 30 and 15 (2 cores, Linux 6.18).
//
// An openerWatch needs CAP_SYS_ADMIN in the initial user namespace; without it
// lockHolder has to suffice. Pids are of canaryd's own pid namespace; a process
// of another namespace has none.
type openerWatch struct {
	fd      int      // file's; file.Fd would make it blocking
	file    *os.File // non-blocking, so that close ends a waiting read
	writers *Writers
	open    map[uint32]Writer // openers that have not closed yet
	last    committer         // the last opener
}

// newOpenerWatch returns an openerWatch that watches no file yet; see arm. On most nodes it
// fails, because canaryd lacks CAP_SYS_ADMIN.
func newOpenerWatch(writers *Writers) (*openerWatch, error) {
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY|unix.O_LARGEFILE|unix.O_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fanotify: %w", err)
	}
	return &openerWatch{
		fd: fd, file: os.NewFile(uintptr(fd), "fanotify"),
		writers: writers, open: map[uint32]Writer{},
	}, nil
}

// arm watches the present inode of path, and no other. After an error noteHolders looks up the
// users of the lock. arm must not follow close.
func (o *openerWatch) arm(path string) error {
	if err := unix.FanotifyMark(o.fd, unix.FAN_MARK_FLUSH, 0, unix.AT_FDCWD, ""); err != nil {
		return &os.PathError{Op: "fanotify_mark", Path: path, Err: err}
	}
	if err := unix.FanotifyMark(o.fd, unix.FAN_MARK_ADD, openerMask, unix.AT_FDCWD, path); err != nil {
		return &os.PathError{Op: "fanotify_mark", Path: path, Err: err}
	}
	return nil
}

func (o *openerWatch) close() { o.file.Close() }

// read notes every opener until close ends it, and returns the reason. LockWatcher.watch then
// ends, and is set up again.
func (o *openerWatch) read() error {
	defer o.last.forget()
	buf := make([]byte, 4096)
	for {
		n, err := o.file.Read(buf)
		if err != nil {
			return err
		}
		for rest := buf[:n]; len(rest) >= unix.FAN_EVENT_METADATA_LEN; {
			// struct fanotify_event_metadata: event_len, vers, reserved,
			// metadata_len, mask, fd, pid.
			size := int(binary.NativeEndian.Uint32(rest))
			if vers := rest[4]; vers != unix.FANOTIFY_METADATA_VERSION || size < unix.FAN_EVENT_METADATA_LEN {
				return fmt.Errorf("fanotify sent an event of version %d with %d bytes", vers, size)
			}
			mask := binary.NativeEndian.Uint64(rest[8:])
			fd := int32(binary.NativeEndian.Uint32(rest[16:]))
			pid := binary.NativeEndian.Uint32(rest[20:])
			rest = rest[min(len(rest), size):]
			if fd != unix.FAN_NOFD {
				// The fd is of the lock's file. The kernel opened it without an
				// event (FMODE_NONOTIFY), so closing it is no event either.
				unix.Close(int(fd))
			}
			o.note(mask, pid)
		}
	}
}

// note remembers the process of one event: mask is fanotify's, and pid the opener's or the
// closer's. An overflow has no pid. It loses nothing else, because hints have another source.
func (o *openerWatch) note(mask uint64, pid uint32) {
	if pid == 0 || int(pid) == os.Getpid() {
		return
	}
	w, known := o.open[pid]
	if mask&unix.FAN_OPEN != 0 || !known {
		// Read at once: the process may be gone in a millisecond.
		var ours bool
		if w, ours = writerOf(o.last.process(procFolder, pid, time.Now()), pid); ours {
			return
		}
		w.Opened = mask&(unix.FAN_CLOSE_WRITE|unix.FAN_CLOSE_NOWRITE) == 0
		o.writers.Note(w)
		if len(o.open) < openersKept {
			o.open[pid] = w
		}
	} else {
		w.Time, w.Opened = time.Now(), false
		o.writers.Note(w)
	}
	if mask&(unix.FAN_CLOSE_WRITE|unix.FAN_CLOSE_NOWRITE) != 0 {
		delete(o.open, pid)
	}
}

// processWriter returns /proc's description of a process that uses the lock now,
// and whether it is a child of canaryd.
func processWriter(proc string, pid uint32) (w Writer, ours bool) {
	return writerOf(readProcess(proc, pid), pid)
}

func writerOf(p process, pid uint32) (w Writer, ours bool) {
	w = Writer{Time: time.Now(), PID: pid, Comm: printable([]byte(p.comm), maxCommand), Command: p.command, Origin: p.origin, By: p.by}
	return w, int(p.parent) == os.Getpid()
}
