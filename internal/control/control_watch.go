package control

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/canaryd/canaryd/internal/api"
)

const (
	// watchBeat is the time between empty lines while nothing changes. They show the client
	// that the daemon lives, and the daemon that the client does.
	watchBeat = 5 * time.Second
	// watchSilence is how long a client waits for a line until it takes the daemon for gone.
	watchSilence = 4 * watchBeat
	// watchWrite is how long a client may take to read a line.
	watchWrite = 10 * time.Second
	// maxWatchLine bounds a line in bytes.
	maxWatchLine = 16 << 20
)

// ErrEnded means that the daemon ended the connection, or sends nothing any more.
var ErrEnded = errors.New("canaryd has ended the connection")

// serveWatch handles GET /v1/watch: it writes a line of JSON for each status that c.Watch
// shows, until the client or the daemon ends. An empty line each watchBeat shows that the
// daemon lives. Each write has its own deadline, so that a client that does not read is cut
// off.
func serveWatch(c Controller) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		ctx, cancel := context.WithCancel(r.Context())
		lines, ended, begun := make(chan []byte), make(chan error, 1), false
		var watching sync.WaitGroup
		defer watching.Wait()
		defer cancel()
		watching.Go(func() {
			ended <- c.Watch(ctx, func(s api.Status) error {
				line, err := json.Marshal(s.ForWatch())
				if err != nil {
					return err
				}
				select {
				case lines <- line:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
		})
		beat := time.NewTicker(watchBeat)
		defer beat.Stop()
		for {
			var line []byte
			select {
			case line = <-lines:
			case <-beat.C:
			case err := <-ended:
				if !begun {
					writeFailure(w, err)
				}
				return
			}
			if !begun {
				w.Header().Set("Content-Type", "application/x-ndjson")
			}
			begun = true
			_ = control.SetWriteDeadline(time.Now().Add(watchWrite))
			if _, err := w.Write(append(line, '\n')); err != nil || control.Flush() != nil {
				return
			}
		}
	}
}

// Watch calls see with the daemon's status, and with each later status that differs in
// substance. It ends with ctx, or with the first error of see, which it returns. The error
// wraps ErrEnded if the daemon ends, or is silent for watchSilence; it may be back later.
func (c Client) Watch(ctx context.Context, see func(api.Status) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return c.ask(ctx, http.MethodGet, "/v1/watch", nil, func(answer io.Reader) error {
		silent := time.AfterFunc(watchSilence, cancel)
		defer silent.Stop()
		lines := bufio.NewScanner(answer)
		lines.Buffer(nil, maxWatchLine)
		for lines.Scan() {
			silent.Reset(watchSilence)
			if len(lines.Bytes()) == 0 {
				continue
			}
			var s api.Status
			if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
				return fmt.Errorf("%s: %w, or another version of it: its answer cannot be read: %w", c.Socket, ErrNotCanaryd, err)
			}
			if err := see(s); err != nil {
				return err
			}
		}
		return ErrEnded
	})
}
