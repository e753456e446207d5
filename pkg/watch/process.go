package watch

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// Bounds on what is kept of a process that others control.
const (
	maxCommand = 512 // bytes of a command line, escapes included; a log line stays a line
	maxComm    = 15  // bytes of the kernel's name for a process: TASK_COMM_LEN less its NUL
)

// processNames returns what the kernel calls process pid now, its command line, both
// printable, and its origin; all are empty if it is gone. The directory is opened once,
// as in processOf.
func processNames(proc string, pid uint32) (comm, command string, o Origin) {
	dir, err := openProcess(proc, pid)
	if err != nil {
		return "", "", Origin{}
	}
	defer dir.close()
	// What names it comes before what it takes longer to read: the process may end any moment.
	line, name := dir.read("cmdline", maxCommand), dir.comm()
	return printable([]byte(name), maxCommand), printable(line, maxCommand), originOf(proc, dir)
}

// processOf returns the command line of process pid, printable and at most maxCommand
// bytes long, and its origin.
//
// Both are empty if the process is gone, which is usual for a short-lived
// iptables, or if its name is not comm. So they are where proc is known to be of
// another pid namespace than the initial one, in which the kernel counts: there the
// same number is another process, and it may have the same name. The directory is
// opened once, which pins the process: a pid that is used again in between is not
// mixed up.
func processOf(proc string, pid uint32, comm string) (command string, o Origin) {
	if pid == 0 || comm == "" {
		return "", Origin{}
	}
	if initial, err := nft.InitialPIDs(proc); err == nil && !initial {
		return "", Origin{}
	}
	dir, err := openProcess(proc, pid)
	if err != nil {
		return "", Origin{}
	}
	defer dir.close()
	// The command line first: the process may end any moment, and its name
	// outlives its memory.
	line := dir.read("cmdline", maxCommand)
	if dir.comm() != bounded(comm, maxComm) {
		return "", Origin{}
	}
	return printable(line, maxCommand), originOf(proc, dir)
}

// A processFolder is an open /proc/PID: whatever happens to the number, its files are
// those of one process. To read all that a Writer has of it takes 0.1 ms of processor
// time, ancestors included (Linux 6.18), which matters where an owner never rests.
type processFolder int

func openProcess(proc string, pid uint32) (processFolder, error) {
	fd, err := unix.Open(filepath.Join(proc, strconv.FormatUint(uint64(pid), 10)), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	return processFolder(fd), err
}

func (p processFolder) close() { _ = unix.Close(int(p)) }

// comm returns what the kernel calls the process.
func (p processFolder) comm() string {
	line := p.read("comm", 4*maxComm)
	return bounded(string(bytes.TrimSuffix(line, []byte{'\n'})), maxComm)
}

// read returns at most n bytes of a file, and nothing for any error.
func (p processFolder) read(name string, n int) []byte {
	fd, err := unix.Openat(int(p), name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	text := make([]byte, n)
	for have := 0; ; {
		got, err := unix.Read(fd, text[have:])
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return nil
		case got == 0: // the end, or n bytes
			return text[:have]
		default:
			have += got
		}
	}
}

func bounded(s string, n int) string { return s[:min(len(s), n)] }

// printable turns a command line as /proc has it into one line of text: NULs
// separate words, and what does not print is escaped as \xNN, byte by byte.
// The result ends before a character that would make it longer than n bytes.
func printable(line []byte, n int) string {
	line = bytes.TrimRight(line, "\x00")
	var b strings.Builder
	for len(line) > 0 {
		r, size := utf8.DecodeRune(line)
		var piece string
		switch {
		case line[0] == 0:
			piece = " "
		case r != utf8.RuneError && strconv.IsPrint(r):
			piece = string(r)
		default:
			piece, size = fmt.Sprintf(`\x%02x`, line[0]), 1
		}
		if b.Len()+len(piece) > n {
			break
		}
		b.WriteString(piece)
		line = line[size:]
	}
	return b.String()
}
