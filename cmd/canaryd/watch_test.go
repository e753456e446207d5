package main

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A watched shows one status to each client, and then ends the first connection.
type watched struct {
	control.Controller
	calls *atomic.Int32
	err   error // nil: it shows
}

func (w watched) Watch(ctx context.Context, see func(api.Status) error) error {
	if w.err != nil {
		return w.err
	}
	s, n := status(), w.calls.Add(1)
	if n > 1 {
		s.Families[rules.IPv4][rules.Mangle] = canary.Replaced
	}
	if err := see(s); err != nil || n == 1 {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

// A waiting writer calls enough once it has that text.
type waiting struct {
	mu     sync.Mutex
	text   bytes.Buffer
	until  string
	enough func()
}

func (w *waiting) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text.Write(p)
	if strings.Contains(w.text.String(), w.until) {
		w.enough()
	}
	return len(p), nil
}

func (w *waiting) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}

// TestStatusWatch: the output is a line for each change, or a screen. When the daemon ends, the
// command reports that once and waits for it. Its own end is clean.
func TestStatusWatch(t *testing.T) {
	for _, test := range []struct {
		name, until string
		args        []string
		size        func() (int, int)
	}{
		{name: "lines", until: "replaced"},
		{name: "json", until: `"replaced"`, args: []string{"-o", "json"}},
		{name: "screen", until: "replaced", size: func() (int, int) { return 100, 40 }},
	} {
		t.Run(test.name, func(t *testing.T) {
			socket := serveControl(t, watched{calls: &atomic.Int32{}})
			ctx, cancel := context.WithCancel(t.Context())
			out, errs := &waiting{until: test.until, enough: cancel}, &bytes.Buffer{}
			code := run(ctx, append([]string{"status", "--watch", "--socket=" + socket}, test.args...), streams{out: out, err: errs, size: test.size})
			if code != exitOK {
				t.Errorf("exit code %d, %q", code, errs.String())
			}
			text := out.String()
			switch test.name {
			case "screen":
				if !strings.HasPrefix(text, enterScreen+"\x1b[H") || !strings.HasSuffix(text, leaveScreen) || strings.Contains(text, "\x1b[2J") ||
					!strings.Contains(text, "no daemon since ") || !strings.Contains(text, "its last status:") || errs.Len() > 0 {
					t.Errorf("the screen got %q, and stderr %q", text, errs.String())
				}
				return
			case "json":
				for line := range strings.Lines(text) {
					var s api.Status
					if err := json.Unmarshal([]byte(line), &s); err != nil || len(s.Families) == 0 {
						t.Errorf("%v: %q", err, line)
					}
				}
			}
			if n := strings.Count(text, "\n"); n != 2 {
				t.Errorf("%d lines for two statuses:\n%s", n, text)
			}
			if got := errs.String(); got != "canaryd: canaryd has ended the connection; waiting for it\n" {
				t.Errorf("stderr has %q", got)
			}
		})
	}
}

// TestStatusWatchEnds: errors for which the command must not wait.
func TestStatusWatchEnds(t *testing.T) {
	socket := serveControl(t, watched{err: api.ErrTooManyWatchers})
	for _, args := range [][]string{{"--socket=" + socket}, {"--flush=1"}} {
		code, stdout, stderr := call(t, append([]string{"status", "--watch"}, args...)...)
		if code != exitError || stdout != "" || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%q: exit code %d, %q, %q", args, code, stdout, stderr)
		}
	}
}

// TestScreenView: a terminal shows the status with and without a daemon, and is redrawn only
// after a change.
func TestScreenView(t *testing.T) {
	var out bytes.Buffer
	rows := 60
	v := &screenView{to: streams{out: &out, size: func() (int, int) { return 90, rows }}}
	now := time.Date(2026, 11, 22, 3, 0, 0, 0, time.UTC)
	if err := v.see(seenStatus{err: control.ErrNoDaemon}, now); err != nil {
		t.Fatal(err)
	}
	if err := v.see(seenStatus{status: status()}, now.Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	length := out.Len()
	if err := v.tick(now.Add(time.Second)); err != nil || out.Len() != length {
		t.Errorf("the same is drawn again: %q", out.String()[length:])
	}
	rows = 12
	if err := v.see(seenStatus{err: control.ErrEnded}, now.Add(2*time.Second)); err != nil {
		t.Fatal(err)
	}
	golden(t, "watch-screen", strings.NewReplacer("\x1b", "ESC", "\r\n", "\n").Replace(out.String())+"\n")
}

// TestCut: a line never wraps, colours take no columns, and none continues after the line.
func TestCut(t *testing.T) {
	for _, test := range []struct{ line, want string }{
		{"", ""},
		{"abcd", "abcd"},
		{"abcdef", "abcd"},
		{"äöüßä", "äöüß"},
		{"\x1b[31mabcdef\x1b[0m", "\x1b[31mabcd\x1b[0m"},
		{"ab\x1b[31mcdef\x1b[0mgh", "ab\x1b[31mcd\x1b[0m"},
		{"\x1b[31mab\x1b[0mcdef", "\x1b[31mab\x1b[0mcd"},
		{"ab\x1b[", "ab"},
	} {
		if diff := cmp.Diff(test.want, cut(test.line, 4)); diff != "" {
			t.Errorf("%q (-want +got):\n%s", test.line, diff)
		}
	}
}
