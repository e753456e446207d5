// Package testkit knows the levels of tests: which tests the running level leaves to another one.
// hack/progress counts these by themselves, and a test that is left is no failure in CI, which runs
// all levels.
package testkit

import (
	"os"
	"testing"
)

const (
	large = "CANARYD_TEST_LARGE" // 1: sizes are large
	leave = "CANARYD_TEST_LEAVE" // 1: tests that need further programs are left to the level that installs them
)

// IsLarge reports whether this is make test-large, or another run with CANARYD_TEST_LARGE=1.
func IsLarge() bool { return os.Getenv(large) == "1" }

// Size returns the ordinary size of a test, or the large one in make test-large.
func Size[T any](ordinary, largeOne T) T {
	if IsLarge() {
		return largeOne
	}
	return ordinary
}

// Large leaves the test to make test-large. The reason says which size takes long.
func Large(t *testing.T, reason string) {
	t.Helper()
	if !IsLarge() {
		t.Skipf("left to make test-large: %s", reason)
	}
}

// LeaveTo leaves the test to the level that installs a thing, unless this is that level, or a go
// test outside of all levels.
func LeaveTo(t *testing.T, level, thing string) {
	t.Helper()
	if os.Getenv(leave) == "1" {
		t.Skipf("left to %s: it needs %s", level, thing)
	}
}
