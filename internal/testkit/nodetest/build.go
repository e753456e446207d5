package nodetest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	// program is the environment variable that names the canaryd to test. It is
	// built once, by the process outside; those in the namespaces inherit it.
	program = "CANARYD_TEST_PROGRAM"
	// builds is the environment variable that names a folder in which
	// hack/test.sh built canaryd for all packages: "canaryd", and behind that the
	// flags of go build, such as "canaryd-race".
	builds = "CANARYD_TEST_BUILDS"
)

// Main is what TestMain of a package that tries the built canaryd hands to
// os.Exit: it builds canaryd, with these flags of go build, and runs the tests.
// With -race, a race found ends canaryd with 66, and the test says so.
func Main(m *testing.M, flags ...string) int {
	if os.Getenv(program) != "" {
		return m.Run()
	}
	if dir := os.Getenv(builds); dir != "" {
		path := filepath.Join(dir, "canaryd"+strings.Join(flags, ""))
		if _, err := os.Stat(path); err != nil {
			return trouble(fmt.Errorf("%s is set: %w", builds, err))
		}
		if err := os.Setenv(program, path); err != nil {
			return trouble(err)
		}
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

// With returns the setting of the environment by which Main takes a built canaryd instead of
// building one.
func With(canaryd string) string { return program + "=" + canaryd }

// Canaryd returns the path of the program that Main built.
func Canaryd() string { return os.Getenv(program) }
