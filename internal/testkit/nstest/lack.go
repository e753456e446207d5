package nstest

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// A Lack simulates a missing feature of a kernel by its effect on programs: a system call that
// fails.
type Lack struct {
	call  uint32
	args  []Arg // only calls with these arguments fail
	errno unix.Errno
}

// An Arg is the value of one argument of a system call. The lower 32 bits of a little-endian
// machine are compared.
type Arg struct{ Index, Value uint32 }

// LackIPv6 simulates a kernel that was started with ipv6.disable=1.
func LackIPv6() Lack {
	return Lack{unix.SYS_SOCKET, []Arg{{0, unix.AF_INET6}}, unix.EAFNOSUPPORT}
}

// LackNFT simulates a kernel without nfnetlink, hence without nf_tables.
func LackNFT() Lack {
	return Lack{unix.SYS_SOCKET, []Arg{{0, unix.AF_NETLINK}, {2, unix.NETLINK_NETFILTER}}, unix.EPROTONOSUPPORT}
}

// LackLegacy simulates a kernel without the socket options of x_tables, in both families. They
// are a level and IPT_SO_GET_INFO.
func LackLegacy() []Lack {
	const getInfo = 64
	return []Lack{
		{unix.SYS_GETSOCKOPT, []Arg{{1, unix.IPPROTO_IP}, {2, getInfo}}, unix.ENOPROTOOPT},
		{unix.SYS_GETSOCKOPT, []Arg{{1, unix.IPPROTO_IPV6}, {2, getInfo}}, unix.ENOPROTOOPT},
	}
}

// LackExec makes execve fail. It tests code that must execute no program.
func LackExec() Lack { return Lack{unix.SYS_EXECVE, nil, unix.EPERM} }

// Without simulates a kernel that lacks features, for the calling goroutine and all programs
// that it executes. It is permanent: the goroutine keeps its thread, and the thread ends with
// it.
func Without(lacks ...Lack) error {
	runtime.LockOSThread()
	for _, lack := range lacks {
		if err := lack.install(); err != nil {
			return fmt.Errorf("simulating another kernel: %w", err)
		}
	}
	return nil
}

// install adds a seccomp filter (struct seccomp_data in linux/seccomp.h).
func (l Lack) install() error {
	const firstArg, argSize = 16, 8
	type test struct{ offset, value uint32 }
	tests := []test{{0, l.call}}
	for _, a := range l.args {
		tests = append(tests, test{firstArg + argSize*a.Index, a.Value})
	}
	var program []bpf.Instruction
	for i, t := range tests {
		// Each test is two instructions. The answer "fail" follows the last test, and "allow"
		// follows that.
		toAllow := uint8(2*(len(tests)-i-1) + 1)
		program = append(program, bpf.LoadAbsolute{Off: t.offset, Size: 4},
			bpf.JumpIf{Cond: bpf.JumpEqual, Val: t.value, SkipFalse: toAllow})
	}
	program = append(program,
		bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(l.errno)},
		bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW})
	raw, err := bpf.Assemble(program)
	if err != nil {
		return err
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, in := range raw {
		filter[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: unsafe.SliceData(filter)}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return errno
	}
	return nil
}
