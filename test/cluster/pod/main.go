// Pod is the program of all pods of test/cluster but canaryd's. "pod pause" keeps a pod's
// namespaces, and "pod serve" answers at port 8080.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "pod:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	switch {
	case len(args) == 1 && args[0] == "pause":
		<-ctx.Done()
		return nil
	case len(args) == 1 && args[0] == "serve":
		return serve(ctx, ":8080")
	}
	return errors.New("usage: pod pause | pod serve")
}

// serve sends the pod's name to each client, and then the client's own bytes.
func serve(ctx context.Context, address string) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { listener.Close() })
	for {
		conn, err := listener.Accept()
		if ctx.Err() != nil {
			return nil
		} else if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			if _, err := fmt.Fprintln(conn, name); err == nil {
				_, _ = io.Copy(conn, conn) // the client may close at any time
			}
		}()
	}
}
