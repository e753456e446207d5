// Package serve serves HTTP within bounds: a limited number of connections, each with a deadline.
// It also finds the process at the other end of a Unix socket.
//
// [Serve] runs a server until its context ends. [WriteCheck] and [WriteJSON] write answers;
// [PeerOf] identifies a client. Serve returns nil after an orderly end, and else the error of the
// server. Any goroutine may call the functions.
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

// The limits of both servers: TCP and the control socket.
const (
	headerTimeout = 2 * time.Second
	bodyTimeout   = 4 * time.Second // header and body; a handler may take longer
	idleTimeout   = 10 * time.Second
	// shutdownTimeout is how long open requests may take when the daemon ends.
	shutdownTimeout = 5 * time.Second
	maxHeader       = 16 << 10
	// maxConnections bounds the connections of each server (see crowd). More would use up the file
	// descriptors that canaryd needs for iptables and netlink.
	maxConnections = 64
)

// WriteCheck answers with a line that begins with "ok", or with 503 and the problem in one
// line. healthz and readyz answer so; ok is the whole line.
func WriteCheck(w http.ResponseWriter, problem error, ok string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if problem != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintln(w, problem)
		return
	}
	fmt.Fprintln(w, ok)
}

// WriteJSON answers with one JSON object. It ignores an error of the connection, because the
// client notices it.
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

// Serve runs server on l until ctx ends, and then lets open requests finish within
// shutdownTimeout. The context of every request ends with ctx, so that a long request can stop.
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
