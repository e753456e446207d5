// Package faults tries the built canaryd where what it leans on fails in the
// middle of a loss: the program that restores, and the disk.
package faults

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/nodetest"
)

func TestMain(m *testing.M) { os.Exit(nodetest.Main(m)) }

// A wrapper stands before the real iptables-restore and does what /run/mode
// says.
const wrapper = `#!/bin/sh
case $(cat /run/mode 2>/dev/null) in
lie) cat >/dev/null; exit 0 ;;
killed) head -n 40 | "%[1]s" "$@"; kill -9 $$ ;;
second) sed '/^COMMIT/q' | "%[1]s" "$@"; echo 'line 77 failed' >&2; exit 1 ;;
refuse) cat >/dev/null; echo 'line 1 failed' >&2; exit 1 ;;
esac
exec "%[1]s" "$@"
`

// wrap puts wrappers before the programs that restore.
func wrap(n *nodetest.Node) {
	n.Helper()
	n.Must(os.Mkdir("/run/own", 0o755))
	for _, family := range []string{"iptables-", "ip6tables-"} {
		name := family + string(n.Programs.With) + "-restore"
		path, err := exec.LookPath(name)
		n.Must(err)
		n.Must(os.WriteFile(filepath.Join("/run/own", name), fmt.Appendf(nil, wrapper, path), 0o755))
	}
	n.Env = append(n.Env, "PATH=/run/own:"+os.Getenv("PATH"))
}

// TestRestoreFails: the program that restores lies, is killed half-way, or
// fails. Nothing of that counts as proved, the loss shows all the while, and all
// is back when it works again.
func TestRestoreFails(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		wrap(n)
		protected := n.Protected()
		d := n.Start("--replay=text")
		for i, mode := range []string{"lie", "killed", "refuse"} {
			before := n.Metrics()
			n.Must(os.WriteFile("/run/mode", []byte(mode), 0o600))
			n.Flush()
			left := n.Foreign()
			time.Sleep(1500 * time.Millisecond)
			now := n.Metrics()
			if now["loss_since_timestamp_seconds{}"] == 0 || nodetest.Ready() == nil {
				n.Errorf("%s: the loss does not show", mode)
			}
			if got := now["rules_absent_seconds{}"] - before["rules_absent_seconds{}"]; got != 0 {
				n.Errorf("%s: something counts as back", mode)
			}
			if slices.Equal(protected, n.Protected()) {
				n.Errorf("%s: nothing is missing", mode)
			}
			n.Must(os.Remove("/run/mode"))
			n.Within(nodetest.HealsIn, "the rules to be back", nodetest.Ready)
			n.Same(mode+": protected rules", protected, n.Protected())
			n.Same(mode+": foreign rules", left, n.Foreign())
			if s := n.Status(); len(s.Flushes) != i+1 || s.Flushes[0].Outcome == "failed" {
				n.Errorf("%s: flush records %+v", mode, s.Flushes)
			}
		}
		d.Stop()
	})
}

// TestLaterTablesFail: of each restore only the first table goes in. Every try
// is for what is missing still, so that all is back although the fault lasts.
func TestLaterTablesFail(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		wrap(n)
		protected := n.Protected()
		d := n.Start("--replay=text")
		n.Must(os.WriteFile("/run/mode", []byte("second"), 0o600))
		n.Flush()
		n.Healed(1)
		n.Same("protected rules", protected, n.Protected())
		// What failed last is in force all the same; the next try finds that out.
		n.Within(nodetest.HealsIn, "the end of the loss", func() error {
			if s := n.Status(); len(s.Flushes) != 1 || s.Flushes[0].Outcome == "failed" {
				return fmt.Errorf("the records are %+v", s.Flushes)
			}
			return nil
		})
		if got := nodetest.Sum(n.Metrics(), "restore_failures_total"); got == 0 {
			n.Error("no failure is counted")
		}
		d.Stop()
	})
}

// TestDiskFails: the state folder is full, then read-only. Replays go on, the log
// says what it means, and the generation is on disk when there is room again.
func TestDiskFails(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		n.Must(os.MkdirAll("/run/state", 0o700))
		n.Must(unix.Mount("tmpfs", "/run/state", "tmpfs", 0, "size=1m"))
		d := n.Start()
		protected := n.Protected()
		const litter = "/run/state/litter"
		fill := func() {
			file, err := os.Create(litter)
			n.Must(err)
			defer file.Close()
			for err == nil {
				_, err = file.Write(make([]byte, 4096))
			}
		}
		healed := func(why string, records int) {
			n.Helper()
			n.Flush()
			n.Healed(records)
			n.Same("protected rules with a disk that is "+why, protected, n.Protected())
		}
		fill()
		healed("full", 1)
		n.Within(nodetest.HealsIn, "the log", func() error {
			if !strings.Contains(d.Log(), "The generation is not on disk") || !strings.Contains(d.Log(), "A flush record is not on disk") {
				return fmt.Errorf("it does not say that nothing is kept")
			}
			return nil
		})
		n.Must(os.Remove(litter))
		n.Must(unix.Mount("", "/run/state", "", unix.MS_REMOUNT|unix.MS_RDONLY, "size=1m"))
		healed("read-only", 2)
		n.Must(unix.Mount("", "/run/state", "", unix.MS_REMOUNT, "size=1m"))
		healed("there again", 3)
		d.Stop()
		next := n.Start()
		next.WantLog("Took up the stored generation")
		if got := n.Status().Flushes; len(got) != 0 {
			n.Errorf("after the disk came back and a restart: %+v", got)
		}
		// The journal tries again by itself, and with the next flush.
		kept := n.WholeStatus().Flushes
		if len(kept) < 3 {
			n.Errorf("%d flush records are on disk, want those of 3 flushes: %+v", len(kept), kept)
		}
		for _, record := range kept {
			if told, _ := n.Want(0, "status", "--flush", record.ID); !strings.Contains(told, "\n--A ") {
				n.Errorf("the journal does not say what flush %s took:\n%s", record.ID, told)
			}
		}
		n.Same("protected rules in the end", protected, n.Protected())
		next.Stop()
	})
}
