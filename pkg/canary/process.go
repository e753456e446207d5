package canary

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Bounds on what is kept of a process that somebody else controls.
const (
	maxCommand = 512 // bytes of a command line, escapes included; a log line stays a line
	maxComm    = 15  // bytes of the kernel's name for a process: TASK_COMM_LEN less its NUL
)

// processNames returns what the kernel calls process pid now, and its command
// line, both printable; both are "" if it is gone. The directory is opened once,
// as in processCommand.
func processNames(proc string, pid uint32) (comm, command string) {
	dir, err := os.OpenRoot(filepath.Join(proc, strconv.FormatUint(uint64(pid), 10)))
	if err != nil {
		return "", ""
	}
	defer dir.Close()
	line := readBounded(dir, "cmdline", maxCommand)
	return printable([]byte(readComm(dir)), maxCommand), printable(line, maxCommand)
}

// processCommand returns the command line of process pid, printable and at
// most maxCommand bytes long.
//
// It returns "" if the process is gone, which is usual for a short-lived
// iptables, or if its name is not comm: the kernel counts pids in the initial
// pid namespace, so in another one the same number is somebody else. The
// directory is opened once, which pins the process: a pid that is used again
// in between is not mixed up.
func processCommand(proc string, pid uint32, comm string) string {
	if pid == 0 || comm == "" {
		return ""
	}
	dir, err := os.OpenRoot(filepath.Join(proc, strconv.FormatUint(uint64(pid), 10)))
	if err != nil {
		return ""
	}
	defer dir.Close()
	// The command line first: the process may end any moment, and its name
	// outlives its memory.
	line := readBounded(dir, "cmdline", maxCommand)
	if readComm(dir) != bounded(comm, maxComm) {
		return ""
	}
	return printable(line, maxCommand)
}

// readComm returns the comm file of the process whose folder dir is.
func readComm(dir *os.Root) string {
	line := readBounded(dir, "comm", 4*maxComm)
	return bounded(string(bytes.TrimSuffix(line, []byte{'\n'})), maxComm)
}

// readBounded returns at most n bytes of a file, and nothing for any error.
func readBounded(dir *os.Root, name string, n int64) []byte {
	f, err := dir.Open(name)
	if err != nil {
		return nil
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, n))
	if err != nil {
		return nil
	}
	return text
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
