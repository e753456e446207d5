package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/nstest"
	"github.com/canaryd/canaryd/internal/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	httpAt = "http://127.0.0.1:9475"
	// These bound what takes milliseconds on an idle machine.
	startsIn = 20 * time.Second
	healsIn  = 20 * time.Second
	stopsIn  = 5 * time.Second
)

// A node is a network namespace of its own in which canaryd is tried.
type node struct {
	*testing.T
	programs scenario.Programs
	families []rules.Family // that can be saved
	protects func(string) bool
	env      []string // of the daemon, besides our own
	under    []string // the command that the daemon is started with; empty: none
	logs     int
}

// onBoth runs body for each backend in a node of its own.
func onBoth(t *testing.T, body func(n *node)) {
	t.Parallel()
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) { on(t, backend, body) })
	}
}

// on runs body in a node of its own, beside other tests.
func on(t *testing.T, backend iptables.Backend, body func(n *node)) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-"+string(backend), "ip6tables-"+string(backend), "nft")
		selector, err := rules.NewSelector(scenario.Protect)
		if err != nil {
			t.Fatal(err)
		}
		body(&node{T: t, programs: scenario.Programs{With: backend}, families: rules.Families(), protects: selector.Protects})
	})
}

func (n *node) must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

// load writes the rules of a node that runs Kubernetes.
func (n *node) load() {
	n.Helper()
	n.must(scenario.Load(n.Context(), n.programs, rules.Families()...))
}

// flush is iptables -F in every table of both families.
func (n *node) flush() {
	n.Helper()
	for _, f := range rules.Families() {
		for _, t := range rules.Guarded() {
			n.must(n.programs.Flush(n.Context(), f, t, ""))
		}
	}
}

// flushUnlocked is flush by programs that take another lock than everybody.
func (n *node) flushUnlocked() {
	n.Helper()
	for _, program := range []string{"iptables-", "ip6tables-"} {
		for _, t := range rules.Guarded() {
			cmd := exec.CommandContext(n.Context(), program+string(n.programs.With), "-w", "5", "-t", string(t), "-F")
			cmd.Env = append(os.Environ(), "XTABLES_LOCKFILE=/run/another.lock")
			if out, err := cmd.CombinedOutput(); err != nil {
				n.Fatalf("%s: %v: %s", cmd, err, out)
			}
		}
	}
}

// save returns what all tables hold, without counters.
func (n *node) save() map[rules.Family]rules.Ruleset {
	n.Helper()
	all := map[rules.Family]rules.Ruleset{}
	for _, f := range n.families {
		set, err := scenario.Tables(n.Context(), n.programs, f)
		n.must(err)
		all[f] = set
	}
	return all
}

// lines returns one line for each chain and rule that is wanted: chains by
// name, rules in their order.
func (n *node) lines(wantChain func(t rules.TableName, name string) bool, wantRule func(rules.Rule) bool) []string {
	n.Helper()
	var lines []string
	for f, set := range n.save() {
		for t, table := range set {
			for _, c := range table.Chains {
				builtin := rules.Builtin(t, c.Name)
				if !builtin && !wantChain(t, c.Name) {
					continue
				}
				where := fmt.Sprintf("%s %s %s", f, t, c.Name)
				if !builtin {
					lines = append(lines, where)
				}
				i := 0
				for _, r := range c.Rules {
					if !builtin || wantRule(r) {
						lines = append(lines, fmt.Sprintf("%s %04d %s", where, i, r.Spec))
						i++
					}
				}
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// protected returns the protected chains, their rules and their hooks.
func (n *node) protected() []string {
	n.Helper()
	return n.lines(
		func(_ rules.TableName, name string) bool { return n.protects(name) },
		func(r rules.Rule) bool { return n.protects(r.Target) })
}

// foreign returns what is neither protected nor anybody's canary.
func (n *node) foreign() []string {
	n.Helper()
	return n.lines(
		func(_ rules.TableName, name string) bool {
			return !n.protects(name) && !strings.HasSuffix(name, "-CANARY")
		},
		func(r rules.Rule) bool { return !n.protects(r.Target) && !canary.IsMark(r) })
}

// marks returns canaryd's own chains and rules.
func (n *node) marks() []string {
	n.Helper()
	return n.lines(
		func(_ rules.TableName, name string) bool { return name == canary.DefaultChain },
		canary.IsMark)
}

func (n *node) same(what string, want, got []string) {
	n.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		n.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// A process is a running canaryd.
type process struct {
	n     *node
	cmd   *exec.Cmd
	path  string // of the log
	ended chan struct{}
	err   error
}

// launch starts the daemon.
func (n *node) launch(flags ...string) *process {
	n.Helper()
	n.logs++
	p := &process{n: n, path: fmt.Sprintf("/run/canaryd-%d.log", n.logs), ended: make(chan struct{})}
	file, err := os.Create(p.path)
	n.must(err)
	defer file.Close()
	line := slices.Concat(n.under, []string{os.Getenv(program)}, n.flags("run"), flags)
	p.cmd = exec.CommandContext(n.Context(), line[0], line[1:]...)
	p.cmd.Stdout, p.cmd.Stderr = file, file
	p.cmd.Env = append(os.Environ(), n.env...)
	n.must(p.cmd.Start())
	go func() { p.err = p.cmd.Wait(); close(p.ended) }()
	n.Cleanup(func() {
		_ = p.cmd.Process.Kill() // an error says that it has ended
		<-p.ended
		if n.Failed() {
			n.Logf("%s:\n%s", strings.Join(p.cmd.Args, " "), p.log())
		}
	})
	return p
}

// start starts the daemon and returns when it is ready and has learned.
func (n *node) start(flags ...string) *process {
	n.Helper()
	p := n.launch(flags...)
	n.within(startsIn, "canaryd to be ready", func() error {
		if !p.running() {
			n.Fatalf("canaryd ended at once: %v\n%s", p.err, p.log())
		}
		if err := ready(); err != nil {
			return err
		}
		if s := n.status(); s.Generation.Rules == 0 && !slices.Contains(flags, "--max-stored-age=1ms") {
			return errors.New("no generation")
		}
		return nil
	})
	return p
}

func (p *process) running() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// stop ends the daemon as a service manager does.
func (p *process) stop() {
	p.n.Helper()
	p.n.must(p.cmd.Process.Signal(syscall.SIGTERM))
	select {
	case <-p.ended:
		if p.err != nil {
			p.n.Fatalf("after SIGTERM canaryd ended with %v, want exit code 0\n%s", p.err, p.log())
		}
	case <-time.After(stopsIn):
		p.n.Fatalf("canaryd did not end within %s of SIGTERM\n%s", stopsIn, p.log())
	}
}

func (p *process) log() string {
	text, err := os.ReadFile(p.path)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func (p *process) wantLog(words ...string) {
	p.n.Helper()
	log := p.log()
	for _, line := range strings.Split(log, "\n") {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			return
		}
	}
	p.n.Errorf("no line of the log has %q:\n%s", words, log)
}

// flags returns a command line of that command with the flags that bind it to
// this node; the rest are the defaults.
func (n *node) flags(command string) []string {
	if command == "status" || command == "version" {
		return []string{command}
	}
	return []string{command, "--backend=" + string(n.programs.With), "--state-dir=/run/state"}
}

// canaryd runs a command that ends by itself.
func (n *node) canaryd(command string, flags ...string) (code int, stdout, stderr string) {
	n.Helper()
	return n.exec(exec.CommandContext(n.Context(), os.Getenv(program), append(n.flags(command), flags...)...))
}

func (n *node) exec(cmd *exec.Cmd) (code int, stdout, stderr string) {
	n.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		n.Fatalf("%s: %v", cmd, err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// want runs a command and fails unless it ends with that exit code.
func (n *node) want(code int, command string, flags ...string) (stdout, stderr string) {
	n.Helper()
	got, stdout, stderr := n.canaryd(command, flags...)
	if got != code {
		n.Errorf("canaryd %s %s: exit code %d, want %d\n%s%s", command, strings.Join(flags, " "), got, code, stdout, stderr)
	}
	if code == 2 {
		n.oneLine(stderr)
	}
	return stdout, stderr
}

// oneLine checks that trouble is told in one line, whatever the log says.
func (n *node) oneLine(stderr string) {
	n.Helper()
	var told []string
	for line := range strings.Lines(stderr) {
		if !strings.HasPrefix(line, "I") && !strings.HasPrefix(line, "E") {
			told = append(told, line)
		}
	}
	if len(told) != 1 || !strings.HasPrefix(told[0], "canaryd: ") {
		n.Errorf("want one line that begins with canaryd:, got %q", stderr)
	}
}

func (n *node) status() scenario.Status {
	n.Helper()
	code, stdout, stderr := n.canaryd("status", "-o", "json")
	var s scenario.Status
	if err := json.Unmarshal([]byte(stdout), &s); err != nil || code > 1 {
		n.Fatalf("canaryd status: exit code %d, %v\n%s", code, err, stderr)
	}
	return s
}

// healed waits for as many flush records and for health, and returns the
// newest record.
func (n *node) healed(records int) scenario.Record {
	n.Helper()
	var newest scenario.Record
	n.within(healsIn, fmt.Sprintf("%d repaired flushes", records), func() error {
		s := n.status()
		if len(s.Flushes) < records || !s.Healthy {
			return fmt.Errorf("%d flush records, healthy %t", len(s.Flushes), s.Healthy)
		}
		newest = s.Flushes[0]
		return ready()
	})
	return newest
}

func (n *node) within(limit time.Duration, what string, done func() error) time.Duration {
	n.Helper()
	for start := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		err := done()
		if err == nil {
			return time.Since(start)
		}
		if time.Since(start) > limit {
			n.Fatalf("waited %s for %s: %v", limit, what, err)
		}
	}
}

func (n *node) get(path string) string {
	n.Helper()
	text, err := fetch(path)
	n.must(err)
	return text
}

func fetch(path string) (string, error) {
	client := http.Client{Timeout: 5 * time.Second}
	response, err := client.Get(httpAt + path)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, response.Status, strings.TrimSpace(string(text)))
	}
	return string(text), err
}

func ready() error {
	_, err := fetch("/readyz")
	return err
}

// stored returns the IDs of the generations on disk.
func (n *node) stored() []string {
	n.Helper()
	files, err := filepath.Glob("/run/state/generations/*.json")
	n.must(err)
	for i, f := range files {
		files[i] = strings.TrimSuffix(filepath.Base(f), ".json")
	}
	return files
}
