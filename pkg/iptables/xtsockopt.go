package iptables

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/rules"
)

// askXT is getsockopt(2) with a buffer that is read and written. It returns the kernel's number
// of written bytes.
type askXT func(fd int, level, option uintptr, buf []byte) (int, error)

// faultTries bounds the attempts of a question that the kernel answers with EFAULT.
const faultTries = 5

// errStrange: the kernel's answer does not fit legacy iptables.
var errStrange = errors.New("the kernel gave an answer that no legacy iptables gives")

// retried makes a system call about x_tables, which gets its level. Kernels with bpfilter (since
// 4.18, such as Ubuntu's 5.4 and 5.15) pass questions of IPv4 to a process of their own. A signal
// to the calling thread ends that process, and the answer is EFAULT. With the signals by which Go
// preempts goroutines, 261 of 14,250 questions on 5.4 failed; with all signals blocked, none of
// 25,000 did. retried repeats a call after EFAULT, because another program may have ended that
// process. canaryd's own buffer is never the cause, and after EFAULT nothing was written.
func (s *xtSocket) retried(call func(level uintptr) error) (err error) {
	level := uintptr(unix.IPPROTO_IP)
	if s.family == rules.IPv6 {
		level = unix.IPPROTO_IPV6
	}
	for range faultTries {
		if failed := withoutSignals(func() { err = call(level) }); failed != nil {
			return failed
		}
		if !errors.Is(err, unix.EFAULT) {
			break
		}
	}
	return err
}

// getsockopt queries x_tables.
func (s *xtSocket) getsockopt(option uintptr, buf []byte) (n int, err error) {
	err = s.retried(func(level uintptr) error {
		n, err = s.ask(s.fd, level, option, buf)
		return err
	})
	return n, err
}

// withoutSignals calls f on a thread whose signals are blocked, and delivered afterwards. Its
// error is that of blocking them; f's result stays with the caller.
func withoutSignals(f func()) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, before unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, &before); err != nil {
		return fmt.Errorf("blocking signals: %w", err)
	}
	f()
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil); err != nil {
		return fmt.Errorf("no longer blocking signals: %w", err)
	}
	return nil
}

// getsockopt is the plain system call: package unix has none that fills a byte slice. It
// returns the number of written bytes. Linux 4.18 with bpfilter, but without its module,
// returns the result of its call of modprobe (256) and writes nothing. That is no answer, and
// no empty table.
func getsockopt(fd int, level, option uintptr, buf []byte) (int, error) {
	size := uint32(len(buf))
	result, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), level, option,
		uintptr(unsafe.Pointer(unsafe.SliceData(buf))), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0, errno
	}
	if result != 0 {
		return 0, fmt.Errorf("%w: %d", errStrange, result)
	}
	return int(size), nil
}
