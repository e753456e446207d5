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
)

// Bounds on the names of processes, which others control.
const (
	maxCommand = 512 // bytes of a command line, escapes included; a log line stays a line
	maxComm    = 15  // bytes of the kernel's name for a process: TASK_COMM_LEN less its NUL
)

// A process is the description of a process in /proc. All of it is empty if the
// process is gone.
type process struct {
	comm    string // the kernel's name, unescaped
	command string // its command line, printable and at most maxCommand bytes long
	origin  Origin
	parent  uint32
	by      Doer // the process that decided on its action
}

// unread reports whether the process, or its parent, was gone before it could be
// read. PID 1 as the only parent does not count as gone.
func (p process) unread() bool { return len(p.origin.Ancestors) == 0 && p.parent != 1 }

// readProcess returns the present description of process pid in /proc. It opens
// the directory once, which pins the process, so that a reused pid causes no
// mixture.
func readProcess(proc string, pid uint32) (p process) {
	dir, err := openProcess(proc, pid)
	if err != nil {
		return process{}
	}
	defer dir.close()
	return dir.process(proc, pid)
}

// process returns the description of the folder's process. proc is the folder of all processes;
// its ancestors are read there.
func (p processFolder) process(proc string, pid uint32) process {
	// The command line is read first: the process may end any moment, and its
	// name and its parent outlive its memory. Slower reads follow.
	found := process{command: p.command()}
	stat, ok := readStat(p)
	found.comm = p.comm()
	found.origin = placeOf(string(p.read("cgroup", maxCgroup)))
	if found.parent = stat.parent; ok {
		found.origin.Ancestors, found.by = ancestorsOf(proc, stat.doer(pid, found.command), stat)
	}
	return found
}

// A processFolder is an open /proc/PID. Its files stay those of one process, even
// if another process gets the number. Reading the data of a Writer takes 0.1 ms
// of processor time, ancestors included (Linux 6.18). That matters if an owner
// never rests.
type processFolder int

func openProcess(proc string, pid uint32) (processFolder, error) {
	fd, err := unix.Open(filepath.Join(proc, strconv.FormatUint(uint64(pid), 10)), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	return processFolder(fd), err
}

func (p processFolder) close() { _ = unix.Close(int(p)) }

// command returns the process's command line, printable and at most maxCommand bytes long.
func (p processFolder) command() string {
	return printable(p.read("cmdline", maxCommand), maxCommand)
}

// comm returns the kernel's name of the process.
func (p processFolder) comm() string {
	line := p.read("comm", 4*maxComm)
	return bounded(string(bytes.TrimSuffix(line, []byte{'\n'})), maxComm)
}

// read returns at most n bytes of a file of the process, and nothing for any error: the process
// may be gone.
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

// printable makes one line of text of a command line from /proc. It replaces NULs
// by spaces, and escapes unprintable bytes as \xNN. The result ends before a
// character that would make it longer than n bytes.
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
