package copies_test

import (
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/copies"
)

// A gate is tried once for each flush, and open for at most copies.Most.
func ExampleGate() {
	now := time.Unix(1e9, 0)
	var gate copies.Gate
	fmt.Println("may open:", gate.MayOpen("6a5f"))
	gate.Try("6a5f")
	gate.Open(now)
	fmt.Println("open:", gate.IsOpen(), "at most until", gate.Until.Sub(now))
	fmt.Println("it was open for", gate.Shut(now.Add(80*time.Millisecond)))
	// Output:
	// may open: true
	// open: true at most until 30s
	// it was open for 80ms
}
