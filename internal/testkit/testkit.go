// Package testkit knows the levels of tests, and waits for states. A level runs some tests and
// leaves the others to another level. CI runs all levels, so a left test is no failure there;
// hack/progress counts left tests separately.
//
// [Until] waits for a state without a limit of its own. [Pass] and [During] let time pass if no
// state shows that something does not happen. [Large], [Size] and [LeaveTo] choose the tests of
// the running level and their size.
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

// Large leaves the test to make test-large. The reason names the size that takes long.
func Large(t *testing.T, reason string) {
	t.Helper()
	if !IsLarge() {
		t.Skipf("left to make test-large: %s", reason)
	}
}

// LeaveTo leaves the test to the level that installs a thing, unless this is that level, or a
// go test outside of all levels.
func LeaveTo(t *testing.T, level, thing string) {
	t.Helper()
	if os.Getenv(leave) == "1" {
		t.Skipf("left to %s: it needs %s", level, thing)
	}
}
