// Package nstest runs tests in network namespaces of their own, so that they may write and
// flush any table.
//
// [Run] executes the body of a test in its namespaces. [NeedProgram], [NeedFile], [NeedRoot] and
// [NeedSetting] skip a test that this machine cannot run. [Command] runs a program, and [Without]
// simulates a kernel that lacks a feature.
package nstest

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/netns"
)

// marker is the environment variable with the name of the test whose body this process runs.
const marker = "CANARYD_NSTEST"

// report is the file descriptor on which the child reports the body's end. An exit code alone
// cannot distinguish "ran nothing" or "skipped".
const report = 3

// The reports of the child.
const (
	ended   = "ended"   // the body ran to its end, passed or failed
	skipped = "skipped" // the body skipped the test
)

// us names the test whose body this process runs; inside is false in the first process.
var us = func() (c struct {
	test   string
	inside bool
}) {
	c.test, c.inside = netns.Inside(marker)
	if c.inside {
		unix.CloseOnExec(report)
	}
	return c
}()

var setup = sync.OnceValue(netns.Setup)

// Run runs body in a network and mount namespace of its own. It executes the test binary again
// for this one test, so the code of the test before Run is executed in both processes. Inside,
// /run is empty and the loopback interface is up. A Run inside a Run stays in its namespace.
//
// If the machine allows no namespaces, the test is skipped; with CI=true in the environment, it
// fails.
func Run(t *testing.T, body func(t *testing.T)) {
	t.Helper()
	if !us.inside {
		runChild(t)
		return
	}
	if err := setup(); errors.Is(err, netns.ErrImpossible) {
		defer finish(t)
		skipLoudly(t, "needs root or user namespaces: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	if t.Name() == us.test {
		defer finish(t)
	}
	body(t)
}

// NeedRoot skips the test unless it runs as root of the machine. Large sets need that, because
// root of a user namespace may not raise socket buffers.
func NeedRoot(t *testing.T) {
	t.Helper()
	if !netns.Root() {
		skipLoudly(t, "needs real root: a user namespace may not raise socket buffers")
	}
}

// Elsewhere has the programs, and the folders of files, that make test does not install, with
// the level that installs them. A program in a folder has its path.
var Elsewhere = map[string]string{
	"promtool": programs, "amtool": programs, "mandoc": programs, "fish": programs, "zsh": programs,
	"/usr/lib/cni": programs, "/var/cache/canaryd-test/netavark": programs, "/var/cache/canaryd-test/flushers": programs, "/var/cache/canaryd-test/owners": programs,
	"/var/cache/canaryd-test/userlands": "make versions",
}

const programs = "make test-programs"

// leave leaves the test to the level that installs the program or the file.
func leave(t *testing.T, name string) {
	t.Helper()
	for there, level := range Elsewhere {
		if name == there || strings.HasPrefix(name, there+"/") {
			testkit.LeaveTo(t, level, there)
		}
	}
}

// NeedProgram skips the test unless all of these programs are installed.
func NeedProgram(t *testing.T, names ...string) {
	t.Helper()
	if err := netns.ExtendPath(); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		leave(t, name)
		if _, err := exec.LookPath(name); err != nil {
			skipLoudly(t, "needs %s: run make deps-test (%v)", name, err)
		}
	}
}

// NeedFile skips the test unless all of these files exist.
func NeedFile(t *testing.T, paths ...string) {
	t.Helper()
	for _, path := range paths {
		leave(t, path)
		if _, err := os.Stat(path); err != nil {
			skipLoudly(t, "needs %s: run make deps-test (%v)", path, err)
		}
	}
}

// NeedSetting sets a value below /proc/sys. It skips the test if the kernel has no such setting,
// or does not allow this process to set it.
func NeedSetting(t *testing.T, path, value string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(value), 0); err != nil {
		skipLoudly(t, "needs %s=%s: %v", path, value, err)
	}
}

// Need skips the test if err is not nil. err is why the thing is missing.
func Need(t *testing.T, thing string, err error) {
	t.Helper()
	if err != nil {
		skipLoudly(t, "needs %s: %v", thing, err)
	}
}

// Command runs a program and returns its standard output. If the program fails, so does the test.
func Command(t *testing.T, name string, args ...string) string {
	t.Helper()
	return CommandInput(t, "", name, args...)
}

// CommandInput is Command with a standard input.
func CommandInput(t *testing.T, input, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, &stdout, &stderr)
	}
	return stdout.String()
}

// skipLoudly skips the test. With CI=true it fails the test, because a skip in CI would hide
// that the test never ran.
func skipLoudly(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("CI=true forbids to skip: "+format, args...)
	}
	t.Skipf("SKIPPED: "+format, args...)
}

// finish reports to the parent that the body has ended.
func finish(t *testing.T) {
	what := ended
	if t.Skipped() {
		what = skipped
	}
	if _, err := unix.Write(report, []byte(what+"\n")); err != nil {
		t.Errorf("cannot report %q to the parent process: %v", what, err)
	}
}

func runChild(t *testing.T) {
	t.Helper()
	cmd, err := netns.Command(t.Context(), marker, t.Name(), childArgs(t)...)
	if err != nil {
		skipLoudly(t, "needs root or user namespaces: %v", err)
	}
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	// At exit the race detector sleeps for a second, so that other threads can report. Each
	// test would wait twice.
	cmd.Env = append(cmd.Env, "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	cmd.ExtraFiles = []*os.File{write}
	// A grandchild that outlives the child must not delay this process.
	cmd.WaitDelay = 10 * time.Second
	err = netns.Run(cmd)
	write.Close()
	said := lines(read)
	// A reader of the output would take the child's framing characters for this process's own.
	log := strings.TrimRight(strings.ReplaceAll(output.String(), "\x16", ""), "\n")
	switch {
	case err != nil:
		t.Fatalf("in the namespace: %v\n%s", err, log)
	case slices.Contains(said, skipped):
		t.Skipf("skipped in the namespace:\n%s", log)
	case !slices.Contains(said, ended):
		t.Fatalf("the process in the namespace ran no test to its end\n%s", log)
	case testing.Verbose():
		t.Logf("in the namespace:\n%s", log)
	}
}

func lines(file *os.File) []string {
	var all []string
	for scan := bufio.NewScanner(file); scan.Scan(); {
		all = append(all, scan.Text())
	}
	return all
}

// passedOn are the flags of the test binary that the child also gets; -update is the flag of
// golden files. Other flags name files that both processes would write, or choose tests.
var passedOn = []string{"update", "test.short", "test.parallel", "test.cpu", "test.fullpath", "test.failfast"}

func childArgs(t *testing.T) []string {
	args := []string{"-test.run=" + pattern(t.Name()), "-test.count=1", "-test.v=true", "-test.paniconexit0", "-test.timeout=" + timeout(t)}
	flag.Visit(func(f *flag.Flag) {
		if slices.Contains(passedOn, f.Name) {
			args = append(args, fmt.Sprintf("-%s=%s", f.Name, f.Value))
		}
	})
	return args
}

// timeout makes the child run out of time before the parent, because the child can then show
// where it hangs.
func timeout(t *testing.T) string {
	deadline, ok := t.Deadline()
	if !ok {
		return "0"
	}
	left := time.Until(deadline)
	return max(left-min(5*time.Second, left/10), time.Millisecond).String()
}

// pattern returns a pattern for exactly the test of that name and its subtests.
func pattern(name string) string {
	parts := strings.Split(name, "/")
	for i, part := range parts {
		parts[i] = "^" + regexp.QuoteMeta(part) + "$"
	}
	return strings.Join(parts, "/")
}
