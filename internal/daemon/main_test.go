package daemon

import (
	"runtime/debug"
	"testing"

	"go.uber.org/goleak"
)

// TestMain lets the heap grow: each story's is small, and collecting it took a fifth of the
// processor.
func TestMain(m *testing.M) {
	debug.SetGCPercent(800)
	goleak.VerifyTestMain(m)
}
