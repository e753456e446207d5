package control

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
)

// ErrNoDaemon means that no process listens at the control socket.
var ErrNoDaemon = errors.New("no canaryd is running")

// ErrForbidden means that a daemon may be running, but serves other users only.
var ErrForbidden = errors.New("only root, and the user that canaryd runs as, may ask canaryd")

// ErrNotCanaryd means that the process at the control socket does not answer like canaryd.
var ErrNotCanaryd = errors.New("the process that listens there is not canaryd")

// statusTimeout bounds a request that a daemon answers from memory.
const statusTimeout = 30 * time.Second

// maxReply bounds an answer in bytes. The rules of 5,000 services take 10 MB.
const maxReply = 256 << 20

// A RefusedError is the daemon's answer to a request that failed.
type RefusedError struct {
	Code    int // the HTTP status
	Message string
	reason  string
}

func (e *RefusedError) Error() string { return e.Message }

// Is makes errors.Is find api.ErrNoGeneration and api.ErrNoFlush on both sides of the socket.
func (e *RefusedError) Is(target error) bool {
	return slices.ContainsFunc(knownFailures, func(f knownFailure) bool { return f.err == target && f.reason == e.reason && f.reason != "" })
}

// A Client sends requests to a running daemon through its control socket. Each call is one
// connection. Every method returns an error that wraps ErrNoDaemon if no process listens, and a
// *RefusedError if the daemon refuses. Contexts bound the calls; only Status has a timeout of
// its own.
type Client struct {
	Socket string // the path of the control socket
}

// Status returns the daemon's present status. It waits for statusTimeout at most: then another
// program may hold the socket, or the daemon hangs.
func (c Client) Status(ctx context.Context) (api.Status, error) {
	within, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	s, err := call[api.Status](within, c, http.MethodGet, "/v1/status", nil)
	if err != nil && within.Err() != nil && ctx.Err() == nil {
		return s, fmt.Errorf("%s: %w, or it hangs: no answer within %s (--socket names canaryd's control socket)", c.Socket, ErrNotCanaryd, statusTimeout)
	}
	return s, err
}

// Alive returns "ok" if the daemon's loop works, and else a *RefusedError with the reason why
// it hangs.
func (c Client) Alive(ctx context.Context) (string, error) { return c.probe(ctx, "/v1/healthz") }

// Ready returns a line that begins with "ok" if the node is ready, and else a *RefusedError
// with the reason.
func (c Client) Ready(ctx context.Context) (string, error) { return c.probe(ctx, "/v1/readyz") }

func (c Client) probe(ctx context.Context, path string) (string, error) {
	text, err := c.do(ctx, http.MethodGet, path, nil)
	return strings.TrimSpace(string(text)), err
}

// Look makes the daemon look now, and returns its status after that.
func (c Client) Look(ctx context.Context) (api.Status, error) {
	return call[api.Status](ctx, c, http.MethodPost, "/v1/look", struct{}{})
}

// Restore makes the daemon replay a generation.
func (c Client) Restore(ctx context.Context, r api.RestoreRequest) (api.RestoreReply, error) {
	return call[api.RestoreReply](ctx, c, http.MethodPost, "/v1/restore", r)
}

// Cleanup makes the daemon remove its marks, and ends its healing.
func (c Client) Cleanup(ctx context.Context, r api.CleanupRequest) error {
	_, err := call[struct{}](ctx, c, http.MethodPost, "/v1/cleanup", r)
	return err
}

// Pause pauses the daemon's replays.
func (c Client) Pause(ctx context.Context, r api.PauseRequest) (api.PauseReply, error) {
	return call[api.PauseReply](ctx, c, http.MethodPost, "/v1/pause", r)
}

// Resume ends a pause.
func (c Client) Resume(ctx context.Context) (api.PauseReply, error) {
	return call[api.PauseReply](ctx, c, http.MethodPost, "/v1/resume", struct{}{})
}

// Dismiss makes the daemon accept the loss that waits for a decision.
func (c Client) Dismiss(ctx context.Context) (api.DismissReply, error) {
	return call[api.DismissReply](ctx, c, http.MethodPost, "/v1/dismiss", struct{}{})
}

// Drill makes the daemon remove its own canary, and returns the course of the drill.
func (c Client) Drill(ctx context.Context, r api.DrillRequest) (api.DrillReply, error) {
	return call[api.DrillReply](ctx, c, http.MethodPost, "/v1/drill", r)
}

// Baseline returns, confirms or removes the baseline.
func (c Client) Baseline(ctx context.Context, r api.BaselineRequest) (api.BaselineReply, error) {
	return call[api.BaselineReply](ctx, c, http.MethodPost, "/v1/baseline", r)
}

// Flush returns all that the daemon knows about one flush.
func (c Client) Flush(ctx context.Context, r api.FlushRequest) (api.FlushReply, error) {
	return call[api.FlushReply](ctx, c, http.MethodGet, "/v1/flush?"+url.Values{"name": {r.Name}}.Encode(), nil)
}

// Render returns a generation as iptables-restore input, or a native table's in words. It is
// the daemon's present generation if r names none.
func (c Client) Render(ctx context.Context, r api.RenderRequest) (string, error) {
	query := url.Values{}
	if r.Generation != "" {
		query.Set("id", r.Generation)
	}
	if r.Family != 0 {
		query.Set("family", r.Family.String())
	}
	text, err := c.do(ctx, http.MethodGet, "/v1/generation?"+query.Encode(), nil)
	return string(text), err
}

// call sends request as JSON, unless it is nil, and reads a Reply. An answer that is none means
// another program or version (ErrNotCanaryd).
func call[Reply any](ctx context.Context, c Client, method, path string, request any) (Reply, error) {
	var reply, none Reply
	var body []byte
	if request != nil {
		var err error
		if body, err = json.Marshal(request); err != nil {
			return none, err
		}
	}
	text, err := c.do(ctx, method, path, body)
	if err != nil {
		return none, err
	}
	if err := json.Unmarshal(text, &reply); err != nil {
		return none, fmt.Errorf("%s: %w, or another version of it: its answer cannot be read: %w", c.Socket, ErrNotCanaryd, err)
	}
	return reply, nil
}

// do makes one request, and reads the whole answer. body is JSON or nil.
func (c Client) do(ctx context.Context, method, path string, body []byte) (text []byte, err error) {
	err = c.ask(ctx, method, path, body, func(answer io.Reader) error {
		text, err = io.ReadAll(io.LimitReader(answer, maxReply))
		return err
	})
	return text, err
}

// ask makes one request on a connection of its own for do and Watch, and calls read with its
// answer if that is no failure. Without a listener the error is ErrNoDaemon.
//
// It writes and reads the connection itself: http.Client would add its pool of connections,
// proxies, TLS and names in Unicode to the program, more than half a megabyte.
func (c Client) ask(ctx context.Context, method, path string, body []byte, read func(answer io.Reader) error) error {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", c.Socket)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("%w: no process listens at %s", ErrNoDaemon, c.Socket)
	}
	if err != nil {
		return c.explain(ctx, err, false)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	response, err := exchange(conn, method, path, body)
	if err != nil {
		return c.explain(ctx, err, true)
	}
	if response.StatusCode == http.StatusOK {
		err = read(response.Body)
	} else if text, failed := io.ReadAll(io.LimitReader(response.Body, maxReply)); failed != nil {
		err = failed
	} else {
		err = c.refused(response.StatusCode, text)
	}
	if errors.Is(err, net.ErrClosed) { // at the end of ctx
		return c.explain(ctx, err, true)
	}
	return err
}

// exchange writes a request to conn, and returns its answer, whose body ends with conn. A listener
// may answer and close before it has read the request, so an answer counts although the request
// could not be written. The error is io.EOF if the listener closes without an answer.
//
// HTTP requires a host, which is not used.
func exchange(conn net.Conn, method, path string, body []byte) (*http.Response, error) {
	request := fmt.Appendf(nil, "%s %s HTTP/1.1\r\nHost: canaryd\r\nConnection: close\r\nContent-Length: %d\r\n\r\n", method, path, len(body))
	_, unwritten := conn.Write(append(request, body...))
	answer := bufio.NewReader(conn)
	if _, err := answer.Peek(1); err != nil {
		return nil, cmp.Or(unwritten, err)
	}
	return http.ReadResponse(answer, nil)
}

// explain words the cause and the remedy of a request without an answer. connected means that
// the socket took the connection. If the socket's mode lets another user connect, the daemon
// closes the connection without reading from it.
func (c Client) explain(ctx context.Context, err error, connected bool) error {
	closed := errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("asking %s: %w", c.Socket, ctx.Err())
	case errors.Is(err, fs.ErrPermission), connected && closed && os.Geteuid() != 0:
		return fmt.Errorf("%w at %s", ErrForbidden, c.Socket)
	case connected && closed:
		return fmt.Errorf("%s: %w, or it has just been stopped: it closed the connection without an answer (--socket names canaryd's control socket)", c.Socket, ErrNotCanaryd)
	case connected, errors.Is(err, unix.EPROTOTYPE):
		return fmt.Errorf("%s: %w (--socket names canaryd's control socket)", c.Socket, ErrNotCanaryd)
	default:
		return err
	}
}

// refused returns the failure in an answer that is not 200, as a RefusedError. It passes on
// other text, such as another version's "404 page not found".
func (c Client) refused(code int, text []byte) error {
	var f failure
	err := json.Unmarshal(text, &f)
	switch {
	case err != nil && code == http.StatusServiceUnavailable: // the form of serve.WriteCheck
		f.Error = strings.TrimSpace(string(text))
	case err != nil || f.Error == "":
		f.Error = fmt.Sprintf("%s: %v, or another version of it: it answered %d: %.200s", c.Socket, ErrNotCanaryd, code, strings.TrimSpace(string(text)))
	}
	return &RefusedError{Code: code, Message: f.Error, reason: f.Reason}
}
