package daemon

import (
	"runtime/debug"
	"testing"

	"go.uber.org/goleak"
)

// TestMain lets the heap grow. Each story's heap is small, and collecting it took a fifth of
// the processor time.
func TestMain(m *testing.M) {
	debug.SetGCPercent(800)
	goleak.VerifyTestMain(m)
}
