// Package serve serves HTTP in bounds: as many connections as fit, each with a deadline, and says who is
// at the other end of a Unix socket.
package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

// Limits of both servers, the TCP one and the control socket.
const (
	headerTimeout = 2 * time.Second
	bodyTimeout   = 4 * time.Second // header and body; a handler may take longer
	idleTimeout   = 10 * time.Second
	// shutdownTimeout is what requests under way get when the daemon ends;
	// they are cut off after it.
	shutdownTimeout = 5 * time.Second
	maxHeader       = 16 << 10
	// maxConnections is how many there are at once, of each server (see crowd). More would
	// take the file descriptors with which iptables is executed and the kernel is asked.
	maxConnections = 64
)

// writeCheck answers with a line that begins with "ok", or 503 with one line that says
// what is wrong.
func WriteCheck(w http.ResponseWriter, problem error, ok string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if problem != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintln(w, problem)
		return
	}
	fmt.Fprintln(w, ok)
}

// writeJSON answers with one JSON object. An error of the connection is the
// reader's to notice.
func WriteJSON(w http.ResponseWriter, code int, value any) {
	text, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		http.Error(w, "the answer cannot be encoded", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(append(text, '\n'))
}

// serve runs server on l until ctx ends, then lets requests under way finish
// for shutdownTimeout. Every request's context ends with ctx, so that a long
// one learns of it.
func Serve(ctx context.Context, l net.Listener, server *http.Server) error {
	server.ReadHeaderTimeout = headerTimeout
	server.ReadTimeout = bodyTimeout
	server.IdleTimeout = idleTimeout
	server.MaxHeaderBytes = maxHeader
	server.BaseContext = func(net.Listener) context.Context { return ctx }

	crowd := newCrowd(l, maxConnections)
	server.ConnState = crowd.follow
	served := make(chan error, 1)
	go func() { served <- server.Serve(crowd) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if err := server.Shutdown(grace); err != nil {
		server.Close()
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
