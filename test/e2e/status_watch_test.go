package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestStatusWatch: a script reads a line for the loss and a line for its end, and
// later lines from the daemon that replaces the first. A terminal is left in its
// old state.
func TestStatusWatch(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start("--settle=200ms")
		cmd := exec.CommandContext(n.Context(), nodetest.Canaryd(), "status", "--watch", "-o", "json")
		var errs bytes.Buffer
		cmd.Stderr = &errs
		out, err := cmd.StdoutPipe()
		n.Must(err)
		n.Must(cmd.Start())
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 1<<20)
		// next reads lines until a line is as wanted.
		next := func(what string, wanted func(scenario.Status) bool) {
			n.Helper()
			for lines.Scan() {
				var s scenario.Status
				n.Must(json.Unmarshal(lines.Bytes(), &s))
				if wanted(s) {
					return
				}
			}
			n.Fatalf("no line shows %s: %v, %s", what, lines.Err(), errs.String())
		}
		next("the node as it is", func(s scenario.Status) bool { return s.Healthy })
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Nat, ""))
		next("the loss", func(s scenario.Status) bool { return !s.Healthy && len(s.Flushes) == 0 })
		next("its end", func(s scenario.Status) bool {
			return s.Healthy && len(s.Flushes) == 1 && s.Flushes[0].AbsentSeconds > 0
		})
		d.Stop()
		n.Start()
		next("the next daemon", func(s scenario.Status) bool { return s.Healthy })
		n.Must(cmd.Process.Signal(os.Interrupt))
		for lines.Scan() {
			continue
		}
		if err := cmd.Wait(); err != nil || !strings.Contains(errs.String(), "; waiting for it\n") {
			n.Errorf("after SIGINT: %v, %q", err, errs.String())
		}
		watchOnTerminal(n)
	})
}

// watchOnTerminal ends a watch on a terminal like Ctrl-C.
func watchOnTerminal(n *nodetest.Node) {
	n.Helper()
	seen, shown := openTerminal(n)
	n.Must(unix.IoctlSetWinsize(int(shown.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 10, Col: 60}))
	cmd := exec.CommandContext(n.Context(), nodetest.Canaryd(), "status", "--watch")
	cmd.Env = append(os.Environ(), "TERM=xterm", "NO_COLOR=1")
	cmd.Stdout, cmd.Stderr = shown, shown
	n.Must(cmd.Start())
	n.Must(shown.Close())
	var text []byte
	for more, interrupted := make([]byte, 4096), false; ; {
		read, err := seen.Read(more)
		text = append(text, more[:read]...)
		if !interrupted && strings.Contains(string(text), "more lines: canaryd status)") {
			interrupted = true
			n.Must(cmd.Process.Signal(os.Interrupt))
		}
		if err != nil {
			break
		}
	}
	if err := cmd.Wait(); err != nil {
		n.Errorf("%v\n%q", err, text)
	}
	first, rest, _ := strings.Cut(string(text), "\x1b[J")
	if !strings.HasPrefix(first, "\x1b[?1049h\x1b[?25l\x1b[Hcanaryd status --watch") || strings.Count(first, "\r\n") > 9 || !strings.HasSuffix(rest, "\x1b[?25h\x1b[?1049l") {
		n.Errorf("the terminal got %q", text)
	}
}
