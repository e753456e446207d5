// Package web serves metrics, health, readiness, and the status as JSON and as a page over HTTP. It
// changes nothing, and shows neither rules nor command lines.
//
// [NewHTTPHandler] makes the handler. [Listening] serves it at an address, and waits as long as
// another process uses the port; [ServeHTTP] serves it on a listener. An address that can never be
// used is an error of [Listening.Run]. Any goroutine may use the handler.
package web

import (
	"context"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/serve"
)

// answerTimeout bounds an answer over TCP. A scrape takes longest, and Prometheus gives up
// after 10 s by default.
const answerTimeout = 15 * time.Second

// NewHTTPHandler returns the handler for metrics, health, readiness, and the status as JSON and as
// a page. It changes nothing, and shows neither rules nor command lines, so that it may be served
// over TCP.
//
// about is for the page. snapshot returns the newest Status.
// alive returns why the loop hangs, or nil. Many goroutines may call both.
func NewHTTPHandler(about About, snapshot func() api.Status, alive func() error, metrics prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		serve.WriteCheck(w, alive(), "ok")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		s := snapshot()
		serve.WriteCheck(w, s.Ready(), s.ReadyText())
	})
	mux.HandleFunc("GET /api/v1/status", func(w http.ResponseWriter, _ *http.Request) {
		serve.WriteJSON(w, http.StatusOK, snapshot().Public())
	})
	mux.Handle("GET /{$}", newPage(about, snapshot, alive))
	return guarded(mux)
}

// guarded adds headers to every answer, so that browsers do not cache it, guess its type, frame it,
// or load anything from elsewhere.
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

// ServeHTTP serves handler on l until ctx ends, and closes l. It returns nil after an orderly end.
func ServeHTTP(ctx context.Context, l net.Listener, handler http.Handler) error {
	server := &http.Server{Handler: handler, WriteTimeout: answerTimeout}
	// Each connection carries one answer, because 64 idle ones would lock all others out.
	server.SetKeepAlivesEnabled(false)
	return serve.Serve(ctx, l, server)
}
