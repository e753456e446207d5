package nodetest

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
)

const (
	// program is the environment variable with the path of the canaryd to test. The process
	// outside the namespaces builds it once, and processes inside inherit it.
	program = "CANARYD_TEST_PROGRAM"
	// builds is the environment variable with a folder in which hack/test.sh built canaryd for
	// all packages. A file's name is "canaryd" and the flags of go build: "canaryd-race".
	builds = "CANARYD_TEST_BUILDS"
)

// settle is the environment variable with the --settle of daemons that a Node starts; empty
// means the default. With the race detector, tests of several packages run concurrently, and
// the commands of a flusher are further apart than the default of 20 ms. They must still be one
// flush.
const settle = "CANARYD_TEST_SETTLE"

// Race returns the flags of go build for a canaryd with the race detector if the tests have it,
// too, as in make race.
func Race() []string {
	if testkit.Raced {
		return []string{"-race"}
	}
	return nil
}

// SideBySide runs twice as many parallel tests as there are processors, unless -parallel sets
// the number, because a node mostly waits.
func SideBySide() {
	flag.Parse()
	asked := false
	flag.Visit(func(f *flag.Flag) { asked = asked || f.Name == "test.parallel" })
	if !asked {
		_ = flag.Set("test.parallel", strconv.Itoa(2*runtime.GOMAXPROCS(0))) // a number is one
	}
}

// Main is the body of TestMain for a package that tests the built canaryd. It builds canaryd
// with these flags of go build, and runs the tests. Its result is for os.Exit. With -race, a
// race ends canaryd with 66, and its test fails.
func Main(m *testing.M, flags ...string) int {
	if slices.Contains(flags, "-race") {
		if err := os.Setenv(settle, "60ms"); err != nil {
			return failed(err)
		}
	}
	if os.Getenv(program) != "" {
		return m.Run()
	}
	if dir := os.Getenv(builds); dir != "" {
		path := filepath.Join(dir, "canaryd"+strings.Join(flags, ""))
		if _, err := os.Stat(path); err != nil {
			return failed(fmt.Errorf("%s is set: %w", builds, err))
		}
		if err := os.Setenv(program, path); err != nil {
			return failed(err)
		}
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "canaryd-test")
	if err != nil {
		return failed(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "canaryd")
	words := slices.Concat([]string{"build", "-o", path}, flags, []string{"github.com/canaryd/canaryd/cmd/canaryd"})
	build := exec.Command("go", words...)
	build.Stdout, build.Stderr = os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		return failed(fmt.Errorf("building canaryd: %w", err))
	}
	if err := os.Setenv(program, path); err != nil {
		return failed(err)
	}
	return m.Run()
}

// failed prints an error and returns the exit code.
func failed(err error) int {
	fmt.Fprintln(os.Stderr, "nodetest:", err)
	return 1
}

// With returns the environment setting that makes Main use this canaryd instead of building
// one.
func With(canaryd string) string { return program + "=" + canaryd }

// Canaryd returns the path of the program that Main built.
func Canaryd() string { return os.Getenv(program) }
