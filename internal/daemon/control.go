package daemon

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

	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The control protocol is HTTP with JSON over a Unix socket, and the only way
// to change anything:
//
//	GET  /v1/status      the Status, in full
//	GET  /v1/healthz     "ok", or 503 with why the loop hangs
//	GET  /v1/readyz      "ok" and perhaps more, or 503 with why the node is not healthy
//	POST /v1/look        look now, then the Status
//	POST /v1/restore     RestoreRequest -> RestoreReply
//	POST /v1/pause       PauseRequest -> PauseReply
//	POST /v1/resume      {} -> PauseReply
//	POST /v1/dismiss     {} -> DismissReply
//	POST /v1/baseline    BaselineRequest -> BaselineReply
//	POST /v1/cleanup     CleanupRequest -> {}
//	GET  /v1/flush       ?name=ID|NUMBER -> FlushReply
//	GET  /v1/generation  ?id=ID&family=ipv4|ipv6 -> iptables-restore input
//
// An answer other than 200 is a failure: {"error": "one line"}.

// maxRequest bounds a request's body in bytes; the longest one names a
// generation.
const maxRequest = 64 << 10

// controlTimeout bounds one request, a restore of both families included:
// each may take a minute and be tried a few times.
const controlTimeout = 10 * time.Minute

// ErrNoGeneration: there is no generation of that ID, or none at all.
var ErrNoGeneration = errors.New("no such generation")

// A Looker tells what canaryd knows.
type Looker interface {
	// Alive returns nil, or why the loop hangs.
	Alive() error
	// Status returns the newest Status at once.
	Status() Status
	// Look looks now and returns a Status from after that look.
	Look(context.Context) (Status, error)
}

// A Changer changes what the kernel holds.
type Changer interface {
	// Restore replays a generation and proves it. The error is for what
	// kept it from being tried; an unproved replay is a reply.
	Restore(context.Context, RestoreRequest) (RestoreReply, error)
	// Cleanup removes what canaryd planted and stops healing.
	Cleanup(context.Context, CleanupRequest) error
}

// A Pauser holds replays.
type Pauser interface {
	// Pause holds replays for a while, from now on, whatever an earlier pause
	// was for.
	Pause(context.Context, PauseRequest) (PauseReply, error)
	// Resume ends a pause, and lets what is lost be replayed.
	Resume(context.Context) (PauseReply, error)
}

// A Decider ends the wait for a decision.
type Decider interface {
	// Dismiss accepts the loss that waits for a decision, if one does.
	Dismiss(context.Context) (DismissReply, error)
}

// A Confirmer keeps the generation that an operator confirmed.
type Confirmer interface {
	// Baseline shows the baseline, or confirms or forgets it.
	Baseline(context.Context, BaselineRequest) (BaselineReply, error)
}

// A Renderer writes a generation as iptables-restore input.
type Renderer interface {
	Render(context.Context, RenderRequest) (string, error)
}

// A Historian tells of one flush what may not leave through TCP.
type Historian interface {
	Flush(context.Context, FlushRequest) (FlushReply, error)
}

// A Controller is what stands behind the control socket. Its methods may be
// called by many goroutines; their contexts end when the client goes away or
// the daemon stops.
type Controller interface {
	Looker
	Changer
	Pauser
	Decider
	Confirmer
	Renderer
	Historian
}

// A RestoreRequest asks for a replay.
type RestoreRequest struct {
	// Generation is the ID of what to replay; empty means what ought to be
	// in force.
	Generation string `json:"generation,omitempty"`
	// DryRun: say what would change, and write nothing.
	DryRun bool `json:"dryRun,omitempty"`
	// Agreed are the removals that may be made: for each table the Removal of what a dry
	// run showed. A restore that would remove anything else writes nothing.
	Agreed reload.Agreement `json:"agreed,omitempty"`
}

// A RestoreReply says what became of a replay.
type RestoreReply struct {
	Generation string                   `json:"generation"`
	Outcomes   map[rules.Family]Outcome `json:"outcomes"`         // empty if nothing was tried
	Detail     string                   `json:"detail,omitempty"` // for people
	// Changes are those of each table: what was done or, of a dry run and of a refused
	// restore, what would be done.
	Changes []TableChange `json:"changes,omitempty"`
	// Refused is why nothing was written, or not all: it would remove rules that were not
	// agreed to.
	Refused string `json:"refused,omitempty"`
	// Baseline is what Changes are compared with; nil if none is confirmed.
	Baseline *BaselineName `json:"baseline,omitempty"`
	// Undo is the generation that was in force before, if it is stored.
	Undo string `json:"undo,omitempty"`
}

// Proved reports whether every family's rules are proved to be in force.
func (r RestoreReply) Proved() bool {
	for _, outcome := range r.Outcomes {
		if !outcome.Done() {
			return false
		}
	}
	return len(r.Outcomes) > 0
}

// A CleanupRequest asks for canaryd's own marks to be removed and, with Rules,
// the protected chains and hooks as well.
type CleanupRequest struct {
	Rules bool `json:"rules,omitempty"`
	// Protect narrows Rules to what it names, as --protect takes it; empty means all that
	// the daemon protects.
	Protect string `json:"protect,omitempty"`
}

// A PauseRequest asks for replays to be held.
type PauseRequest struct {
	Seconds float64 `json:"seconds"`
}

// A PauseReply says what a request found and what it made of it.
type PauseReply struct {
	WasPaused bool      `json:"wasPaused"`
	Until     time.Time `json:"until,omitzero"` // when the pause runs out; zero: there is none
}

// A RenderRequest asks for a generation's text.
type RenderRequest struct {
	Generation string       // its ID; empty: the one that ought to be in force
	Family     rules.Family // 0: every enabled family
}

// A failure is the body of every answer that is not 200.
type failure struct {
	Error string `json:"error"`
	// Reason tells failures apart that callers act upon.
	Reason string `json:"reason,omitempty"`
}

const (
	reasonNoGeneration = "no_generation"
	reasonNoFlush      = "no_flush"
)

// NewControlHandler returns the control protocol for c, to be served by
// ServeControl and never over TCP.
func NewControlHandler(c Controller) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, c.Status())
	})
	mux.HandleFunc("GET /v1/healthz", func(w http.ResponseWriter, _ *http.Request) { writeCheck(w, c.Alive(), "ok") })
	mux.HandleFunc("GET /v1/readyz", func(w http.ResponseWriter, _ *http.Request) {
		s := c.Status()
		writeCheck(w, s.Ready(), s.readyText())
	})
	mux.HandleFunc("POST /v1/look", handle(func(ctx context.Context, _ struct{}) (Status, error) {
		return c.Look(ctx)
	}))
	mux.HandleFunc("POST /v1/restore", handle(c.Restore))
	mux.HandleFunc("POST /v1/cleanup", handle(func(ctx context.Context, r CleanupRequest) (struct{}, error) {
		return struct{}{}, c.Cleanup(ctx, r)
	}))
	mux.HandleFunc("POST /v1/pause", handle(c.Pause))
	mux.HandleFunc("POST /v1/resume", handle(func(ctx context.Context, _ struct{}) (PauseReply, error) {
		return c.Resume(ctx)
	}))
	mux.HandleFunc("POST /v1/dismiss", handle(func(ctx context.Context, _ struct{}) (DismissReply, error) {
		return c.Dismiss(ctx)
	}))
	mux.HandleFunc("POST /v1/baseline", handle(c.Baseline))
	mux.HandleFunc("GET /v1/flush", func(w http.ResponseWriter, r *http.Request) {
		reply, err := c.Flush(r.Context(), FlushRequest{Name: r.URL.Query().Get("name")})
		if err != nil {
			writeFailure(w, err)
			return
		}
		writeJSON(w, http.StatusOK, reply)
	})
	mux.HandleFunc("GET /v1/generation", func(w http.ResponseWriter, r *http.Request) {
		request, err := renderRequest(r)
		if err != nil {
			writeJSON(w, http.StatusBadRequest, failure{Error: err.Error()})
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

// handle turns a function of a request and a reply into a handler.
func handle[Request, Reply any](do func(context.Context, Request) (Reply, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		request, err := decode[Request](http.MaxBytesReader(w, r.Body, maxRequest))
		if err != nil {
			writeJSON(w, http.StatusBadRequest, failure{Error: err.Error()})
			return
		}
		reply, err := do(r.Context(), request)
		if err != nil {
			writeFailure(w, err)
			return
		}
		writeJSON(w, http.StatusOK, reply)
	}
}

// decode reads one JSON object with no unknown field and nothing behind it. An
// empty body is an empty request.
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

func renderRequest(r *http.Request) (RenderRequest, error) {
	query := r.URL.Query()
	request := RenderRequest{Generation: query.Get("id")}
	if family := query.Get("family"); family != "" {
		err := request.Family.UnmarshalText([]byte(family))
		if err != nil || !slices.Contains(rules.Families(), request.Family) {
			return RenderRequest{}, fmt.Errorf("%q is neither ipv4 nor ipv6", family)
		}
	}
	return request, nil
}

func writeFailure(w http.ResponseWriter, err error) {
	if errors.Is(err, ErrNoGeneration) {
		writeJSON(w, http.StatusNotFound, failure{Error: err.Error(), Reason: reasonNoGeneration})
		return
	}
	if errors.Is(err, ErrNoFlush) {
		writeJSON(w, http.StatusNotFound, failure{Error: err.Error(), Reason: reasonNoFlush})
		return
	}
	writeJSON(w, http.StatusInternalServerError, failure{Error: err.Error()})
}

// ServeControl serves handler on l, as returned by ListenControl, to root and
// our own user until ctx ends, and closes l, which removes the socket. It
// returns nil after an orderly end.
func ServeControl(ctx context.Context, l *net.UnixListener, handler http.Handler) error {
	return serve(ctx, newPeerListener(ctx, l), &http.Server{Handler: handler, WriteTimeout: controlTimeout})
}
