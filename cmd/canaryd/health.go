package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/canaryd/canaryd/internal/control"
)

// healthTimeout bounds a probe, which only waits for a socket.
const healthTimeout = 5 * time.Second

// runHealth queries the running daemon through its control socket. Other users cannot reach
// that, so their connections cannot delay a probe, as they can over TCP.
func runHealth(ctx context.Context, o *options, to streams) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	client := o.client()
	probe := client.Alive
	if o.word == "ready" {
		probe = client.Ready
	}
	text, err := probe(ctx)
	code := exitOK
	if refused := (*control.RefusedError)(nil); errors.As(err, &refused) {
		text, code, err = refused.Message, exitNo, nil
	}
	if err == nil {
		answer := struct {
			OK   bool   `json:"ok"`
			Text string `json:"text"`
		}{code == exitOK, text}
		err = show(to.out, o.output, answer, func(w io.Writer) { fmt.Fprintln(w, plain(oneLine(text))) })
	}
	return code, err
}
