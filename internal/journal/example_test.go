package journal_test

import (
	"context"
	"fmt"
	"os"

	"github.com/canaryd/canaryd/internal/journal"
)

// Run writes entries on a goroutine of its own, and Find returns one with its detail.
func Example() {
	dir, err := os.MkdirTemp("", "journal")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	j := journal.New(dir)
	earlier, err := j.Load(10)
	fmt.Println(len(earlier), "earlier entries", err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		j.Run(func(err error) { fmt.Println("written:", err) })
	}()

	entry := journal.Entry{ID: "6a5f", Record: []byte(`{"rules":3}`), Detail: []byte(`["-A A -j B"]`)}
	if err := j.Keep(entry); err != nil {
		panic(err)
	}
	found, err := j.Find(context.Background(), "6a5f")
	fmt.Println(string(found.Record), string(found.Detail), err)

	j.Close()
	<-ended
	// Unordered output:
	// 0 earlier entries <nil>
	// {"rules":3} ["-A A -j B"] <nil>
	// written: <nil>
}
