package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
)

// evilName is the name of the flusher's program file, and so the kernel's name of
// the process.
const evilName = "ev\n<0>{\"event\"\x1b"

// flushAs flushes nat of IPv4 by a program with the name evilName.
func flushAs(n *nodetest.Node) {
	n.Helper()
	program, err := exec.LookPath("iptables-" + string(n.Programs.With))
	n.Must(err)
	program, err = filepath.EvalSymlinks(program)
	n.Must(err)
	evil := filepath.Join(n.TempDir(), evilName)
	n.Must(os.Symlink(program, evil))
	cmd := exec.CommandContext(n.Context(), evil, "-w", "-t", "nat", "-F")
	cmd.Args[0] = "iptables-" + string(n.Programs.With)
	if code, _, stderr := n.Exec(cmd); code != 0 {
		n.Fatalf("%s: %s", cmd, stderr)
	}
}

// asJournal redirects the nth daemon's output to a file, and names that file in
// JOURNAL_STREAM.
func asJournal(n *nodetest.Node, nth int) (log string) {
	n.Helper()
	log = fmt.Sprintf("/run/canaryd-%d.log", nth)
	n.Must(os.WriteFile(log, nil, 0o600))
	var is syscall.Stat_t
	n.Must(syscall.Stat(log, &is))
	n.Env = append(n.Env, fmt.Sprintf("JOURNAL_STREAM=%d:%d", is.Dev, is.Ino))
	return log
}

// TestJournalLevels: the journal gets each line with its level, for any name of
// the flusher, and one line of JSON for the flush.
func TestJournalLevels(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		for i, format := range []string{"text", "json"} {
			log := asJournal(n, i+1)
			process := n.Start("--log-format=" + format)
			flushAs(n)
			record := n.Healed(1)
			process.Stop()
			text, err := os.ReadFile(log)
			n.Must(err)
			levels := map[string]string{}
			var flushes []string
			for line := range strings.Lines(string(text)) {
				line = strings.TrimSuffix(line, "\n")
				m := regexp.MustCompile(`^<([3-7])>(.*)$`).FindStringSubmatch(line)
				if m == nil || strings.ContainsAny(line, "\x1b\r") {
					n.Fatalf("%s: a line without a level: %q", format, line)
				}
				if format == "json" && !json.Valid([]byte(m[2])) {
					n.Errorf("no JSON: %q", line)
				}
				switch {
				case strings.HasPrefix(m[2], `{"event":"flush",`):
					flushes = append(flushes, m[2])
				default:
					message := regexp.MustCompile(`(?:\] |"msg":)"([^"]+)"`).FindStringSubmatch(m[2])
					if message == nil {
						n.Fatalf("%s: a line without a message: %q", format, line)
					}
					levels[message[1]] = m[1]
				}
			}
			for message, want := range map[string]string{
				"Starting": "6", "Canaries are planted and the generation is captured": "6",
				"Rules are being flushed": "4", "Rules were lost": "4", "The rules are back and proved": "5",
				"Stopped; canaries and rules stay in place": "5",
			} {
				if levels[message] != want {
					n.Errorf("%s: %q has level %q, want %s", format, message, levels[message], want)
				}
			}
			if len(flushes) != 1 {
				n.Fatalf("%s: %d lines of a flush: %q", format, len(flushes), flushes)
			}
			var line api.FlushLine
			n.Must(json.Unmarshal([]byte(flushes[0]), &line.Flush))
			if line.ID != record.ID || line.Outcome != reload.Proved || line.Lost.Rules == 0 || !strings.Contains(line.Culprit.Comm, "ev") {
				n.Errorf("%s: the line is %s", format, flushes[0])
			}
			n.Must(os.RemoveAll("/run/state"))
			n.Env = nil
		}
	})
}

// TestOutputWithoutAReader: the reader of canaryd's standard output may end.
// canaryd must continue, and so must the programs that it executes.
func TestOutputWithoutAReader(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		n.Under = []string{"bash", "-c", `exec "$0" "$@" > >(exit 0)`}
		process := n.Start("--replay=text")
		for i := range 3 {
			n.Flush()
			n.Healed(i + 1)
		}
		n.Until("canaryd to live", func() error {
			if !process.Running() {
				return errors.New("it has ended")
			}
			return nodetest.Ready()
		})
		process.Stop()
	})
}
