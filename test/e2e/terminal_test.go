package e2e

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
)

// openTerminal returns both ends of a pseudo terminal: seen reads the text that
// is written to shown.
func openTerminal(n *nodetest.Node) (seen, shown *os.File) {
	n.Helper()
	seen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	n.Must(err)
	n.Cleanup(func() { _ = seen.Close() })
	n.Must(unix.IoctlSetPointerInt(int(seen.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(seen.Fd()), unix.TIOCGPTN)
	n.Must(err)
	shown, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	n.Must(err)
	return seen, shown
}

// onTerminal runs canaryd on a terminal and returns the terminal's text. If shows
// is not nil it gets, whenever there is more, all of the text so far.
func onTerminal(n *nodetest.Node, env, args []string, shows func(string)) string {
	n.Helper()
	seen, shown := openTerminal(n)
	cmd := exec.CommandContext(n.Context(), nodetest.Canaryd(), args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = shown, shown
	n.Must(cmd.Start())
	n.Must(shown.Close())
	var text []byte
	for more, err := make([]byte, 4096), error(nil); err == nil; {
		var read int
		read, err = seen.Read(more)
		if text = append(text, more[:read]...); shows != nil {
			shows(string(text))
		}
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, syscall.EIO) { // the other end was closed
			n.Fatal(err)
		}
	}
	if err := cmd.Wait(); err != nil {
		n.Errorf("%s: %v\n%s", cmd, err, text)
	}
	return string(text)
}

// TestTerminal: tables have colours on a terminal, unless the user wants none,
// and a waiting command says that it waits.
func TestTerminal(t *testing.T) {
	nodetest.On(t, "legacy", func(n *nodetest.Node) {
		n.Load()
		for _, test := range []struct {
			name, output string
			env          []string
			colours      bool
		}{
			{"a terminal", "table", []string{"TERM=xterm", "NO_COLOR="}, true},
			{"JSON", "json", []string{"TERM=xterm", "NO_COLOR="}, false},
			{"no colours", "table", []string{"TERM=xterm", "NO_COLOR=1"}, false},
			{"a dumb terminal", "table", []string{"TERM=dumb", "NO_COLOR="}, false},
		} {
			if got := onTerminal(n, test.env, []string{"detect", "-o", test.output}, nil); strings.Contains(got, "\x1b[1m") != test.colours || !strings.Contains(got, "legacy") {
				n.Errorf("%s: %q", test.name, got)
			}
		}

		fd, err := unix.Open("/run/xtables.lock", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		n.Must(err)
		n.Must(unix.Flock(fd, unix.LOCK_EX))
		const told = "\r\x1b[Kcanaryd cleanup: "
		got := onTerminal(n, []string{"TERM=xterm", "NO_COLOR=1"}, append(n.Flags("cleanup"), "--lock-wait=60s"), func(text string) {
			if fd >= 0 && strings.Count(text, told) > 1 {
				n.Must(unix.Close(fd)) // releases the lock
				fd = -1
			}
		})
		if !strings.Contains(got, told+"1s\r") || strings.LastIndex(got, "\r\x1b[K") == strings.LastIndex(got, told) {
			n.Errorf("a cleanup that waits for the lock shows %q", got)
		}
	})
}
