package nodetest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// program is the environment variable that names the canaryd to test. It is
// built once, by the process outside; those in the namespaces inherit it.
const program = "CANARYD_TEST_PROGRAM"

// Main is what TestMain of a package that tries the built canaryd hands to
// os.Exit: it builds canaryd, with these flags of go build, and runs the tests.
// With -race, a race found ends canaryd with 66, and the test says so.
func Main(m *testing.M, flags ...string) int {
	if os.Getenv(program) != "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "canaryd-test")
	if err != nil {
		return trouble(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "canaryd")
	words := slices.Concat([]string{"build", "-o", path}, flags, []string{"github.com/canaryd/canaryd/cmd/canaryd"})
	build := exec.Command("go", words...)
	build.Stdout, build.Stderr = os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		return trouble(fmt.Errorf("building canaryd: %w", err))
	}
	if err := os.Setenv(program, path); err != nil {
		return trouble(err)
	}
	return m.Run()
}

func trouble(err error) int {
	fmt.Fprintln(os.Stderr, "nodetest:", err)
	return 1
}

// Canaryd returns the path of the program that Main built.
func Canaryd() string { return os.Getenv(program) }
