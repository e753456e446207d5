// Package versions tests canaryd with the iptables, nft and ipset of other releases of Debian,
// on this machine's kernel. Tests of other packages run in each userland: all ways to flush,
// and comparisons of bytes, text and the mirror with the programs. internal/testkit/versions
// has the differences by version.
package versions

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/outcome"
	"github.com/canaryd/canaryd/internal/testkit/versions"
)

// A part is a package with the tests that run in each userland.
type part struct {
	pkg   string
	tests string // for -test.run
	skip  string // for -test.skip
	rows  bool   // each subtest is a row of its own
}

// parts returns the tests that depend on the programs' output and input.
func parts() []part {
	return []part{
		{pkg: "test/e2e", tests: "^TestScenarios$", rows: true}, // the rows of make demo
		// make test-large runs the readers next to a busy writer, which test the kernel.
		{pkg: "pkg/iptables", tests: ".", skip: "BesideA?BusyWriter"},
		{pkg: "pkg/rules", tests: "^TestTheKernelAgreesOnMeaning$"},
		{pkg: "pkg/rules/kube", tests: "^TestSpelling$"},
		{pkg: "test/interleavings", tests: "OnTheKernel$"},
	}
}

// binary returns the name of the part's test binary.
func (p part) binary() string { return strings.ReplaceAll(p.pkg, "/", "-") + ".test" }

// builds is the environment variable with the folder of the built canaryd and the test
// binaries. The process outside the namespaces builds them, and those inside inherit the
// variable.
const builds = "CANARYD_TEST_VERSIONS"

func TestMain(m *testing.M) { os.Exit(prepared(m)) }

// prepared builds, runs the tests, and prints the matrix; go test shows it with -v.
func prepared(m *testing.M) int {
	if os.Getenv(builds) != "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "canaryd-versions")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Setenv(builds, dir); err != nil {
		panic(err)
	}
	if entries, err := filepath.Glob(filepath.Join(userlands, "*")); err == nil && len(entries) > 0 {
		if err := build(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	code := m.Run()
	text, err := matrix(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Print(text)
	return code
}

// build links canaryd and the tests without libraries, because no userland has those of
// another.
func build(dir string) error {
	commands := [][]string{{"build", "-o", filepath.Join(dir, "canaryd"), "github.com/canaryd/canaryd/cmd/canaryd"}}
	for _, p := range parts() {
		commands = append(commands, []string{"test", "-c", "-o", filepath.Join(dir, p.binary()), "github.com/canaryd/canaryd/" + p.pkg})
	}
	for _, words := range commands {
		cmd := exec.Command("go", words...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", cmd, err, out)
		}
	}
	return nil
}

// TestVersions runs the parts in each userland, and compares each test's result with the
// expectation. An unexpected failure fails the test, and so does a test that passes against the
// expectation.
func TestVersions(t *testing.T) {
	for _, of := range versions.Suites {
		suite := of.Name
		t.Run(suite, func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedRoot(t)
				nstest.NeedFile(t, filepath.Join(userlands, suite, ".unpacked"))
				u := enter(t, suite)
				c := column{Suite: suite, Programs: u.programs(), Cells: map[string]string{}}
				if !strings.HasPrefix(c.Programs, of.Programs()) {
					t.Errorf("the suite has %s, and docs/measured.md says %s", c.Programs, of.Programs())
				}
				for _, p := range parts() {
					for _, o := range u.run(p) {
						c.Cells[o.Name] = judge(t, suite, o)
					}
				}
				expectedRan(t, c)
				c.handOver(t)
			})
		})
	}
}

// judge compares an outcome with the expectation, and returns its cell of the matrix.
func judge(t *testing.T, suite string, o outcome.Outcome) string {
	t.Helper()
	e, known := versions.FailureOf(suite, o.Name)
	switch {
	case o.Result == "PASS" && !known:
		return "ok"
	case o.Result == "PASS":
		t.Errorf("%s passes, and it is expected to fail: %s", o.Name, e.Reason)
		return "PASSES"
	case o.Result == "FAIL" && known && strings.Contains(o.Output, e.Says):
		return "known"
	case known:
		t.Errorf("%s is expected to fail with %q: %s\n%s", o.Name, e.Says, e.Reason, o.Output)
	default:
		t.Errorf("%s: %s\n%s", o.Name, o.Result, o.Output)
	}
	return "FAILED"
}

// expectedRan fails the test for each expected failure whose test did not run.
func expectedRan(t *testing.T, c column) {
	t.Helper()
	for _, f := range versions.Failures {
		if _, ran := c.Cells[f.Test]; !ran && f.On(c.Suite) {
			t.Errorf("%s is expected to fail, and no such test ran", f.Test)
		}
	}
}
