package iptables

import (
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A heldScript returns the input of an iptables-restore, and is called when that has started and
// waits for it. Starting takes 5 to 50 ms, in which a busy owner commits; what is asked for then is
// answered within 1 or 2.
type heldScript func() (string, error)

// WriteTo feeds a child through its pipe. It implements io.WriterTo.
func (h heldScript) WriteTo(w io.Writer) (int64, error) {
	n, err := io.WriteString(w, "\n") // an empty line: it does nothing
	if err != nil {
		return int64(n), err
	}
	if pipe, ok := w.(*os.File); ok {
		if err := drained(pipe); err != nil {
			return int64(n), err
		}
	}
	text, err := h()
	if err != nil {
		return int64(n), err
	}
	m, err := io.WriteString(w, text)
	return int64(n + m), err
}

// drained waits until a child has read all that was written into its pipe. It is os.ErrClosed if
// the child ends before it has.
func drained(pipe *os.File) error {
	raw, err := pipe.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var left int
		var failed error
		err := raw.Control(func(fd uintptr) { left, failed = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) // FIONREAD
		switch {
		case err != nil:
			return os.ErrClosed // by the Wait for the child
		case failed != nil:
			return os.NewSyscallError("ioctl", failed)
		case left == 0:
			return nil
		}
		time.Sleep(time.Millisecond)
	}
}
