// Package control is the control socket of the daemon. The server serves only root and canaryd's
// own user; canaryd's commands use the client.
//
// A daemon calls [Listen], then [Serve] with the handler that [NewHandler] makes of a [Controller].
// A command calls the methods of a [Client]; each call is one connection.
//
// A Client's error wraps [ErrNoDaemon], [ErrForbidden], [ErrNotCanaryd] or [ErrEnded], or is a
// [*RefusedError] with the daemon's own answer. A Client is a value that any goroutine may use, and
// the server calls a Controller from many goroutines.
package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/serve"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The control protocol is HTTP with JSON over a Unix socket, and the only way
// to change anything:
//
//	GET  /v1/status      the Status, in full
//	GET  /v1/healthz     "ok", or 503 with why the loop hangs
//	GET  /v1/readyz      "ok" and perhaps more, or 503 with why the node is not healthy
//	GET  /v1/watch       a Status as a line of JSON now and after each change; empty lines between
//	POST /v1/look        look now, then the Status
//	POST /v1/restore     RestoreRequest -> RestoreReply
//	POST /v1/pause       PauseRequest -> PauseReply
//	POST /v1/resume      {} -> PauseReply
//	POST /v1/dismiss     {} -> DismissReply
//	POST /v1/baseline    BaselineRequest -> BaselineReply
//	POST /v1/drill       DrillRequest -> DrillReply
//	POST /v1/cleanup     CleanupRequest -> {}
//	GET  /v1/flush       ?name=ID|NUMBER -> FlushReply
//	GET  /v1/generation  ?id=ID&family=ipv4|ipv6 -> iptables-restore input
//
// An answer other than 200 is a failure: {"error": "one line"}.

// maxRequest bounds the body of a request in bytes. The longest one names a generation.
const maxRequest = 64 << 10

// controlTimeout bounds one request, such as a restore of both families: each may take a minute and
// several tries.
const controlTimeout = 10 * time.Minute

// A Controller answers the requests of the control socket. Many goroutines may call its methods.
// Their contexts end when the client disconnects or the daemon stops.
type Controller interface {
	// Alive returns nil, or why the loop hangs.
	Alive() error
	// Status returns the newest Status at once.
	Status() api.Status
	// Watch calls see with the present Status and with each later Status that differs in
	// substance, until its context ends or see fails. It may be refused because there are too
	// many watchers.
	Watch(ctx context.Context, see func(api.Status) error) error
	// Look looks now, and returns a Status that is newer than that look.
	Look(context.Context) (api.Status, error)

	// Restore replays a generation and proves it. An error means that nothing could be tried;
	// an unproved replay is a reply.
	Restore(context.Context, api.RestoreRequest) (api.RestoreReply, error)
	// Cleanup removes everything that canaryd planted, and ends healing.
	Cleanup(context.Context, api.CleanupRequest) error
	// Pause pauses replays for a time from now on, and replaces an earlier pause.
	Pause(context.Context, api.PauseRequest) (api.PauseReply, error)
	// Resume ends a pause, so that lost rules are replayed.
	Resume(context.Context) (api.PauseReply, error)
	// Drill removes canaryd's own canary, and returns once it is back, or when it is overdue.
	Drill(context.Context, api.DrillRequest) (api.DrillReply, error)
	// Dismiss accepts the loss that waits for a decision, if there is one.
	Dismiss(context.Context) (api.DismissReply, error)

	// Baseline returns, confirms or removes the baseline.
	Baseline(context.Context, api.BaselineRequest) (api.BaselineReply, error)
	// Render returns a generation as iptables-restore input.
	Render(context.Context, api.RenderRequest) (string, error)
	// Flush returns all facts about one flush, including details that may not leave through
	// TCP.
	Flush(context.Context, api.FlushRequest) (api.FlushReply, error)
}

// A failure is the body of every answer that is not 200.
type failure struct {
	Error string `json:"error"`
	// Reason distinguishes the failures that callers handle.
	Reason string `json:"reason,omitempty"`
}

// A knownFailure is an error with an answer of its own.
type knownFailure struct {
	err    error
	code   int
	reason string // clients find the error by it; may be empty
}

var knownFailures = []knownFailure{
	{api.ErrNoGeneration, http.StatusNotFound, "no_generation"},
	{api.ErrNoFlush, http.StatusNotFound, "no_flush"},
	{api.ErrTooManyWatchers, http.StatusTooManyRequests, ""},
}

// NewHandler returns the handler of the control protocol. Serve serves it; it must
// never be served over TCP.
func NewHandler(c Controller) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) {
		serve.WriteJSON(w, http.StatusOK, c.Status())
	})
	mux.HandleFunc("GET /v1/watch", serveWatch(c))
	mux.HandleFunc("GET /v1/healthz", func(w http.ResponseWriter, _ *http.Request) { serve.WriteCheck(w, c.Alive(), "ok") })
	mux.HandleFunc("GET /v1/readyz", func(w http.ResponseWriter, _ *http.Request) {
		s := c.Status()
		serve.WriteCheck(w, s.Ready(), s.ReadyText())
	})
	mux.HandleFunc("POST /v1/look", handle(bare(c.Look)))
	mux.HandleFunc("POST /v1/restore", handle(c.Restore))
	mux.HandleFunc("POST /v1/cleanup", handle(func(ctx context.Context, r api.CleanupRequest) (struct{}, error) {
		return struct{}{}, c.Cleanup(ctx, r)
	}))
	mux.HandleFunc("POST /v1/pause", handle(c.Pause))
	mux.HandleFunc("POST /v1/resume", handle(bare(c.Resume)))
	mux.HandleFunc("POST /v1/dismiss", handle(bare(c.Dismiss)))
	mux.HandleFunc("POST /v1/drill", handle(c.Drill))
	mux.HandleFunc("POST /v1/baseline", handle(c.Baseline))
	mux.HandleFunc("GET /v1/flush", func(w http.ResponseWriter, r *http.Request) {
		reply, err := c.Flush(r.Context(), api.FlushRequest{Name: r.URL.Query().Get("name")})
		writeReply(w, reply, err)
	})
	mux.HandleFunc("GET /v1/generation", func(w http.ResponseWriter, r *http.Request) {
		request, err := renderRequest(r)
		if err != nil {
			serve.WriteJSON(w, http.StatusBadRequest, failure{Error: err.Error()})
			return
		}
		text, err := c.Render(r.Context(), request)
		if err != nil {
			writeFailure(w, err)
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = io.WriteString(w, text)
	})
	return mux
}

// handle makes a handler of a function from a request to a reply, both as JSON. A request that
// cannot be read is a 400.
func handle[Request, Reply any](do func(context.Context, Request) (Reply, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		request, err := decode[Request](http.MaxBytesReader(w, r.Body, maxRequest))
		if err != nil {
			serve.WriteJSON(w, http.StatusBadRequest, failure{Error: err.Error()})
			return
		}
		reply, err := do(r.Context(), request)
		writeReply(w, reply, err)
	}
}

// bare adapts for handle a function that needs no request.
func bare[Reply any](do func(context.Context) (Reply, error)) func(context.Context, struct{}) (Reply, error) {
	return func(ctx context.Context, _ struct{}) (Reply, error) { return do(ctx) }
}

// writeReply answers a request with the reply as JSON, or with the failure if err is not nil.
func writeReply(w http.ResponseWriter, reply any, err error) {
	if err != nil {
		writeFailure(w, err)
		return
	}
	serve.WriteJSON(w, http.StatusOK, reply)
}

// decode reads one JSON object, without unknown fields and with nothing after it, so that no
// mistyped field counts as its default. An empty body is an empty request.
func decode[Request any](body io.Reader) (Request, error) {
	var request, none Request
	decoder := json.NewDecoder(body)
	decoder.DisallowUnknownFields()
	switch err := decoder.Decode(&request); {
	case errors.Is(err, io.EOF):
		return none, nil
	case err != nil:
		return none, fmt.Errorf("the request cannot be read: %w", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return none, errors.New("the request cannot be read: something follows the JSON object")
	}
	return request, nil
}

// renderRequest returns the request of GET /v1/generation. Without a family, Family is 0.
func renderRequest(r *http.Request) (api.RenderRequest, error) {
	query := r.URL.Query()
	request := api.RenderRequest{Generation: query.Get("id")}
	if family := query.Get("family"); family != "" {
		err := request.Family.UnmarshalText([]byte(family))
		if err != nil || !slices.Contains(rules.Families(), request.Family) {
			return api.RenderRequest{}, fmt.Errorf("%q is neither ipv4 nor ipv6", family)
		}
	}
	return request, nil
}

// writeFailure answers a request with an error, as JSON. An error of knownFailures has a
// status and a reason of its own; any other is a 500.
func writeFailure(w http.ResponseWriter, err error) {
	code, answer := http.StatusInternalServerError, failure{Error: err.Error()}
	for _, known := range knownFailures {
		if errors.Is(err, known.err) {
			code, answer.Reason = known.code, known.reason
		}
	}
	serve.WriteJSON(w, code, answer)
}

// Serve serves handler to root and canaryd's own user until ctx ends. It closes l, which
// removes the socket, and returns nil after an orderly end.
func Serve(ctx context.Context, l *net.UnixListener, handler http.Handler) error {
	return serve.Serve(ctx, newPeerListener(ctx, l), &http.Server{Handler: handler, WriteTimeout: controlTimeout})
}
