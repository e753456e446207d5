package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/control"
)

// healthTimeout bounds a probe, which waits for a socket only.
const healthTimeout = 5 * time.Second

// runHealth asks the running daemon through its control socket. Other users cannot reach that, so
// their connections cannot keep a probe waiting, as they can over TCP.
func runHealth(ctx context.Context, o *options, to streams) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	client := control.Client{Socket: o.socket}
	probe := client.Alive
	if o.word == "ready" {
		probe = client.Ready
	}
	text, err := probe(ctx)
	var refused *control.RefusedError
	switch {
	case err == nil:
		_, err := fmt.Fprintln(to.out, plain(oneLine(text)))
		return exitOK, err
	case errors.As(err, &refused):
		_, err := fmt.Fprintln(to.out, plain(oneLine(refused.Message)))
		return exitNo, err
	default:
		return exitError, err
	}
}
