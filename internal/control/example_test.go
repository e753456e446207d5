package control_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/control"
)

// daemon answers one request; *daemon.Daemon answers all of them.
type daemon struct{ control.Controller }

func (daemon) Status() api.Status { return api.Status{Mode: api.Observe} }

// A daemon serves its socket, and a command is a client of it.
func Example() {
	dir, err := os.MkdirTemp("", "control")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	ctx, stop := context.WithCancel(context.Background())
	socket := filepath.Join(dir, "canaryd.sock")
	listener, err := control.Listen(ctx, socket)
	if err != nil {
		panic(err)
	}
	ended := make(chan error)
	go func() { ended <- control.Serve(ctx, listener, control.NewHandler(daemon{})) }()

	status, err := control.Client{Socket: socket}.Status(ctx)
	fmt.Println(status.Mode, err)

	stop()
	fmt.Println(<-ended)
	_, err = control.Client{Socket: socket}.Status(context.Background())
	fmt.Println(err != nil)
	// Output:
	// observe <nil>
	// <nil>
	// true
}
