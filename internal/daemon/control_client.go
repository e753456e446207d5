package daemon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNoDaemon: nobody listens at the control socket.
var ErrNoDaemon = errors.New("no canaryd is running")

// maxReply bounds an answer in bytes. The text of 5,000 services is 10 MB.
const maxReply = 256 << 20

// A RefusedError is a request that the daemon answered with a failure.
type RefusedError struct {
	Code    int // HTTP's
	Message string
	reason  string
}

func (e *RefusedError) Error() string { return e.Message }

// Is makes errors.Is(err, ErrNoGeneration) and ErrNoFlush true on both sides of
// the socket.
func (e *RefusedError) Is(target error) bool {
	return target == ErrNoGeneration && e.reason == reasonNoGeneration || target == ErrNoFlush && e.reason == reasonNoFlush
}

// A Client asks a running daemon through its control socket. Each call is one
// connection; every method returns an error that wraps ErrNoDaemon if nobody
// listens, and a *RefusedError if the daemon says no. Contexts bound the
// calls: there is no timeout besides.
type Client struct {
	Socket string // the path of the control socket
}

// Status returns what the daemon knows.
func (c Client) Status(ctx context.Context) (Status, error) {
	return call[Status](ctx, c, http.MethodGet, "/v1/status", nil)
}

// Look lets the daemon look now and returns what it knows then.
func (c Client) Look(ctx context.Context) (Status, error) {
	return call[Status](ctx, c, http.MethodPost, "/v1/look", struct{}{})
}

// Restore lets the daemon replay a generation.
func (c Client) Restore(ctx context.Context, r RestoreRequest) (RestoreReply, error) {
	return call[RestoreReply](ctx, c, http.MethodPost, "/v1/restore", r)
}

// Cleanup lets the daemon remove its marks; it stops healing then.
func (c Client) Cleanup(ctx context.Context, r CleanupRequest) error {
	_, err := call[struct{}](ctx, c, http.MethodPost, "/v1/cleanup", r)
	return err
}

// Pause lets the daemon hold replays.
func (c Client) Pause(ctx context.Context, r PauseRequest) (PauseReply, error) {
	return call[PauseReply](ctx, c, http.MethodPost, "/v1/pause", r)
}

// Resume lets the daemon end a pause.
func (c Client) Resume(ctx context.Context) (PauseReply, error) {
	return call[PauseReply](ctx, c, http.MethodPost, "/v1/resume", struct{}{})
}

// Dismiss lets the daemon accept the loss that waits for a decision.
func (c Client) Dismiss(ctx context.Context) (DismissReply, error) {
	return call[DismissReply](ctx, c, http.MethodPost, "/v1/dismiss", struct{}{})
}

// Flush returns all that the daemon knows of one flush.
func (c Client) Flush(ctx context.Context, r FlushRequest) (FlushReply, error) {
	return call[FlushReply](ctx, c, http.MethodGet, "/v1/flush?"+url.Values{"name": {r.Name}}.Encode(), nil)
}

// Render returns a generation as iptables-restore input.
func (c Client) Render(ctx context.Context, r RenderRequest) (string, error) {
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

// call sends request as JSON, unless it is nil, and reads a Reply.
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
		return none, fmt.Errorf("the daemon's answer cannot be read: %w", err)
	}
	return reply, nil
}

// do makes one connection for one request.
func (c Client) do(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	// The host is never looked up; HTTP wants one.
	request, err := http.NewRequestWithContext(ctx, method, "http://canaryd"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dialer net.Dialer
			return dialer.DialContext(ctx, "unix", c.Socket)
		},
	}}
	response, err := client.Do(request)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("%w: nobody listens at %s", ErrNoDaemon, c.Socket)
	}
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, maxReply))
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		return nil, refused(response.StatusCode, text)
	}
	return text, nil
}

// refused reads a failure; text that is none, such as another version's "404
// page not found", is passed on.
func refused(code int, text []byte) error {
	var f failure
	if err := json.Unmarshal(text, &f); err != nil || f.Error == "" {
		f.Error = fmt.Sprintf("the daemon answered %d: %s", code, strings.TrimSpace(string(text)))
	}
	return &RefusedError{Code: code, Message: f.Error, reason: f.Reason}
}
