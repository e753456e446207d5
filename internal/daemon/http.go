package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
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

// answerTimeout bounds an answer over TCP. The longest is a scrape, and
// Prometheus gives up after 10 s by default.
const answerTimeout = 15 * time.Second

// NewHTTPHandler returns the read-only face of the daemon: metrics, health,
// readiness, status as JSON and as a page. Nothing in it changes any state,
// and none of it shows rules or command lines: it may be served over TCP.
//
// node is the node's name for the page, or empty. snapshot returns the newest Status; alive says why the loop does not turn,
// or nil. Both are called by many goroutines.
func NewHTTPHandler(node string, snapshot func() Status, alive func() error, metrics prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		writeCheck(w, alive(), "ok")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		s := snapshot()
		writeCheck(w, s.Ready(), s.readyText())
	})
	mux.HandleFunc("GET /api/v1/status", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, snapshot().Public())
	})
	mux.Handle("GET /{$}", newPage(node, snapshot, alive))
	return guarded(mux)
}

// guarded adds the headers that every answer has: nothing is cached, guessed
// at, framed, or loaded from elsewhere.
func guarded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Cache-Control", "no-store")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'") // the page has its own
		next.ServeHTTP(w, r)
	})
}

// writeCheck answers with a line that begins with "ok", or 503 with one line that says
// what is wrong.
func writeCheck(w http.ResponseWriter, problem error, ok string) {
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
func writeJSON(w http.ResponseWriter, code int, value any) {
	text, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		http.Error(w, "the answer cannot be encoded", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(append(text, '\n'))
}

// ServeHTTP serves handler on l until ctx ends, and closes l. It returns nil after an orderly end.
func ServeHTTP(ctx context.Context, l net.Listener, handler http.Handler) error {
	server := &http.Server{Handler: handler, WriteTimeout: answerTimeout}
	// A connection is one answer: 64 that are idle would lock everybody out.
	server.SetKeepAlivesEnabled(false)
	return serve(ctx, l, server)
}

// serve runs server on l until ctx ends, then lets requests under way finish
// for shutdownTimeout. Every request's context ends with ctx, so that a long
// one learns of it.
func serve(ctx context.Context, l net.Listener, server *http.Server) error {
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
