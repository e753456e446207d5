package pace_test

import (
	"errors"
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/pace"
)

// The waits between failed tries grow, up to pace.LastTry.
func ExampleRetry() {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var retry pace.Retry
	for range 3 {
		retry.Failed(errors.New("the kernel refuses a rule"), now)
		fmt.Println("next try in", retry.At.Sub(now))
		now = retry.At
	}
	// Output:
	// next try in 100ms
	// next try in 200ms
	// next try in 400ms
}
