package faults

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A wrapper runs in front of the real iptables-restore, and does as /run/mode, or the file for
// its family, says.
const wrapper = `#!/bin/sh
case $(cat /run/mode "/run/mode.${0##*/}" 2>/dev/null) in
lie) cat >/dev/null; exit 0 ;;
killed) head -n 40 | "%[1]s" "$@"; kill -9 $$ ;;
nat) sed '/^\*nat/,/^COMMIT/d' | "%[1]s" "$@"; echo 'line 7 failed' >&2; exit 1 ;;
refuse) cat >/dev/null; echo 'line 1 failed' >&2; exit 1 ;;
hang) cat >/dev/null; echo $$ >/run/hangs; exec sleep 1000 ;;
half) sed '/^COMMIT/q' | "%[1]s" "$@"; echo $$ >/run/hangs; exec sleep 1000 ;;
esac
exec "%[1]s" "$@"
`

// wrap puts wrappers in front of the restoring programs.
func wrap(n *nodetest.Node) {
	n.Helper()
	n.Must(os.Mkdir("/run/own", 0o755))
	for _, f := range rules.Families() {
		path, err := exec.LookPath(restorer(n, f))
		n.Must(err)
		n.Must(os.WriteFile(filepath.Join("/run/own", restorer(n, f)), fmt.Appendf(nil, wrapper, path), 0o755))
	}
	n.Env = append(n.Env, "PATH=/run/own:"+os.Getenv("PATH"))
}

// restorer returns the name of a family's iptables-restore.
func restorer(n *nodetest.Node, f rules.Family) string {
	if f == rules.IPv6 {
		return "ip6tables-" + string(n.Programs.With) + "-restore"
	}
	return "iptables-" + string(n.Programs.With) + "-restore"
}

// does makes the wrappers fail in that way.
func does(n *nodetest.Node, file, mode string) func() func() {
	return func() func() {
		n.Helper()
		n.Must(os.WriteFile(file, []byte(mode), 0o600))
		return func() { n.Must(os.Remove(file)) }
	}
}

// TestRestoreFails: the restoring program lies, is killed half-way, hangs, or fails. Nothing of
// that counts as proved, the loss is visible all the time, and all rules are back when the
// program works again.
func TestRestoreFails(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		wrap(n)
		d := start(n, "--replay=text")
		lost := func() {
			n.Until("the loss to show", some(func() float64 { return n.Metrics()["loss_since_timestamp_seconds{}"] }))
		}
		for _, mode := range []string{"lie", "killed", "refuse", "nat"} {
			d.during(fault{name: mode, begin: does(n, "/run/mode", mode), while: lost})
		}
		for _, mode := range []string{"hang", "half"} {
			begin := does(n, "/run/mode", mode)
			d.during(fault{
				name: mode,
				begin: func() func() {
					end := begin()
					return func() { end(); killHanging(n) }
				},
				hangs: true,
				while: lost,
			})
		}
		d.daemon.Stop()
	})
}

// hanging returns an error while no wrapper hangs.
func hanging() error {
	_, err := os.Stat("/run/hangs")
	return err
}

// killHanging kills the hanging wrapper.
func killHanging(n *nodetest.Node) {
	n.Helper()
	var pid int
	n.Until("a program to hang", func() error {
		text, err := os.ReadFile("/run/hangs")
		if err == nil {
			pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
		}
		return err
	})
	n.Must(os.Remove("/run/hangs"))
	n.Must(unix.Kill(pid, unix.SIGKILL))
}

// TestOneFamilyFails: restores of one family fail. The other family is restored and proved
// meanwhile. internal/daemon tests that later tries leave it alone.
func TestOneFamilyFails(t *testing.T) {
	nodetest.On(t, iptables.Legacy, func(n *nodetest.Node) {
		n.Load()
		wrap(n)
		d := start(n, "--replay=text")
		for f, other := range map[rules.Family]rules.Family{rules.IPv4: rules.IPv6, rules.IPv6: rules.IPv4} {
			d.during(fault{name: f.String() + " refused", begin: does(n, "/run/mode."+restorer(n, f), "refuse"), while: func() {
				n.Until(other.String()+" to be intact", func() error {
					for table, verdict := range n.Status().Families[other] {
						if verdict != "intact" {
							return fmt.Errorf("%s %s is %s", other, table, verdict)
						}
					}
					return nil
				})
				n.Until(other.String()+" to be proved", some(func() float64 { return nodetest.Sum(n.Metrics(), "replays_total", other.String(), "proved") }))
			}})
		}
		d.daemon.Stop()
	})
}
