// Package limits tests each row of the table of limits in docs/measured.md with the built
// canaryd. Other processes write rules, files or requests up to the limit and beyond. canaryd
// must live, stay within the manifest's memory, and heal another table.
package limits

import (
	"bytes"
	"encoding/base32"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// mostMemory is the memory limit of the manifest in deploy/kubernetes.
const mostMemory = 448 << 20

// No race detector, because the tests measure memory and processor time.
func TestMain(m *testing.M) { os.Exit(nodetest.MainWithTurns(m)) }

// memory returns the daemon's present memory, and the most since its start.
func memory(n *nodetest.Node, d *nodetest.Process) (now, most int) {
	n.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.PID()))
	n.Must(err)
	sizes := map[string]int{}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		if kib, ok := strings.CutSuffix(strings.TrimSpace(value), " kB"); ok {
			if sizes[name], err = strconv.Atoi(kib); err != nil {
				n.Fatal(err)
			}
		}
	}
	if sizes["VmHWM"] == 0 {
		n.Fatalf("no VmHWM in:\n%s", text)
	}
	return sizes["VmRSS"] << 10, sizes["VmHWM"] << 10
}

// within fails the test if the daemon used more memory than the manifest allows, and logs the
// values.
func within(n *nodetest.Node, d *nodetest.Process, when string) {
	n.Helper()
	now, most := memory(n, d)
	n.Logf("%s: %d MiB of memory, %d at most", when, now>>20, most>>20)
	if most > mostMemory {
		n.Errorf("%s canaryd held %d MiB of memory, and the manifest allows %d", when, most>>20, mostMemory>>20)
	}
}

// lines returns the number of lines in the daemon's log.
func lines(d *nodetest.Process) int { return strings.Count(d.Log(), "\n") }

// program returns a name such as iptables-nft-restore.
func program(n *nodetest.Node, f rules.Family, suffix string) string {
	return map[rules.Family]string{rules.IPv4: "iptables-", rules.IPv6: "ip6tables-"}[f] + string(n.Programs.With) + suffix
}

// write writes rules of IPv4 as their owner does, and returns the program's error.
func write(n *nodetest.Node, text string) error {
	n.Helper()
	cmd := exec.CommandContext(n.Context(), program(n, rules.IPv4, "-restore"), "-w", "5", "--noflush")
	cmd.Stdin = strings.NewReader(text)
	if said, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %.300s", cmd, err, said)
	}
	return nil
}

// othersAreRepaired flushes a table of the other family, and waits until it is back. No write
// to IPv4's tables concerns it.
func othersAreRepaired(n *nodetest.Node) time.Duration {
	n.Helper()
	return repaired(n, rules.IPv6, rules.Nat)
}

// repaired flushes a table, waits until its protected rules are back, and returns the time for
// that.
func repaired(n *nodetest.Node, f rules.Family, table rules.TableName) time.Duration {
	n.Helper()
	want := protected(n, f, table)
	if len(want) < 10 {
		n.Fatalf("%s %s has %d protected rules, too few for a flush to show anything", f, table, len(want))
	}
	if out, err := exec.CommandContext(n.Context(), program(n, f, ""), "-w", "5", "-t", string(table), "-F").CombinedOutput(); err != nil {
		n.Fatalf("flushing %s %s: %v: %s", f, table, err, out)
	}
	return n.Until(fmt.Sprintf("the rules of %s %s", f, table), func() error {
		if got := protected(n, f, table); strings.Join(got, "\n") != strings.Join(want, "\n") {
			return fmt.Errorf("%d lines of protected rules, want %d", len(got), len(want))
		}
		return nil
	})
}

// protected returns the protected rules of one table and the jumps to them, in their order,
// without the attackers' rules.
func protected(n *nodetest.Node, f rules.Family, table rules.TableName) []string {
	n.Helper()
	text, err := n.Programs.SaveTable(n.Context(), f, table)
	n.Must(err)
	var list []string
	for line := range strings.Lines(text) {
		chain, spec, ok := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "-A "), " ")
		if !ok || !strings.HasPrefix(line, "-A ") || strings.Contains(line, attack) {
			continue
		}
		_, target, _ := strings.Cut(spec, "-j ")
		if target, _, _ = strings.Cut(target, " "); n.Protects(chain) || n.Protects(target) {
			list = append(list, chain+" "+spec)
		}
	}
	return list
}

// attack is the prefix of the names of all attackers' chains.
const attack = "KUBE-SVC-ATTACK"

// attacker returns the name of the attacker's i-th chain. kube-proxy's preset protects it,
// because 16 digits of base 32 follow its prefix.
func attacker(i int) string {
	return attack + base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(binary.BigEndian.AppendUint32([]byte{0, 0}, uint32(i)))
}

// A writer is a running restore that commits each table that it receives.
type writer struct {
	n     *nodetest.Node
	cmd   *exec.Cmd
	input io.WriteCloser
	said  *bytes.Buffer
}

func newWriter(n *nodetest.Node) *writer {
	n.Helper()
	w := &writer{n: n, cmd: exec.CommandContext(n.Context(), program(n, rules.IPv4, "-restore"), "-w", "5", "--noflush"), said: &bytes.Buffer{}}
	var err error
	w.input, err = w.cmd.StdinPipe()
	n.Must(err)
	w.cmd.Stdout, w.cmd.Stderr = w.said, w.said
	n.Must(w.cmd.Start())
	return w
}

// commit sends a table to the program. It waits while a pipe is full.
func (w *writer) commit(text string) {
	w.n.Helper()
	if _, err := io.WriteString(w.input, text); err != nil {
		_ = w.cmd.Wait()
		w.n.Fatalf("the attacker's restore ended: %v: %s", err, w.said)
	}
}

// end waits until all is committed.
func (w *writer) end() {
	w.n.Helper()
	w.n.Must(w.input.Close())
	if err := w.cmd.Wait(); err != nil {
		w.n.Fatalf("the attacker's restore: %v: %s", err, w.said)
	}
}

// onNFT reports whether the node's backend is nf_tables.
func onNFT(n *nodetest.Node) bool { return n.Programs.With == iptables.NFT }

// saved returns a table of IPv4 as iptables-save prints it.
func saved(n *nodetest.Node, table rules.TableName) string {
	n.Helper()
	text, err := n.Programs.SaveTable(n.Context(), rules.IPv4, table)
	n.Must(err)
	return text
}

// needRoot skips the test unless it runs as the machine's root: a user namespace has one user.
func needRoot(n *nodetest.Node) {
	n.Helper()
	nstest.NeedRoot(n.T)
}

// stranger is a user other than root and canaryd.
const stranger = 65534

// connect opens a connection to a Unix socket on this thread, and waits until it is closed.
func connect(path string) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return fmt.Errorf("connecting: %w", err)
	}
	_, _ = unix.Read(fd, make([]byte, 1)) // nothing is sent, and the server closes it
	return nil
}
