package sdnotify_test

import (
	"context"
	"fmt"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/sdnotify"
)

// A Notifier sends messages until its context ends.
func ExampleNotifier() {
	ctx, stop := context.WithCancel(context.Background())
	stop() // the service is stopped at once
	n := sdnotify.Notifier{
		Send:   func(message string) error { fmt.Printf("%q\n", message); return nil },
		Status: func() api.Status { return api.Status{} },
		Alive:  func() error { return nil },
	}
	fmt.Println(n.Run(ctx))
	// Output:
	// "STATUS=Waiting for every table to be readable and planted: no family has been looked at yet"
	// "STOPPING=1\nSTATUS=Stopping; canaries and rules stay in place"
	// <nil>
}
