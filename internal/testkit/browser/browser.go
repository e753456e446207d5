// Package browser controls a headless Chromium through its debugging pipe, to test pages and to
// make pictures of them. It needs no library, because the pipe carries JSON messages that end
// in a zero byte.
package browser

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// programs are Chromium's names in distributions and from vendors, the smallest program first.
var programs = []string{"chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"}

// Find returns the program's path.
func Find() (string, error) {
	for _, name := range programs {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("none of %q is installed: run hack/install-deps.sh browser", programs)
}

// A Browser is a running Chromium.
type Browser struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	profile string
	stderr  tail

	mu      sync.Mutex
	last    int
	waiting map[int]chan<- answer
	tabs    map[string]*Tab
	gone    error         // why Chromium no longer answers; nil while it does
	done    chan struct{} // closed when gone is set
}

type answer struct {
	Result json.RawMessage
	Error  *struct{ Message string }
}

// Start starts a Chromium with a profile of its own. Call Close; it also ends with ctx.
func Start(ctx context.Context) (_ *Browser, err error) {
	program, err := Find()
	if err != nil {
		return nil, err
	}
	profile, err := os.MkdirTemp("", "canaryd-browser-")
	if err != nil {
		return nil, err
	}
	b := &Browser{profile: profile, waiting: map[int]chan<- answer{}, tabs: map[string]*Tab{}, done: make(chan struct{})}
	// Chromium reads from descriptor 3 and writes to 4.
	theirIn, in, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(profile))
	}
	out, theirOut, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, theirIn.Close(), in.Close(), os.RemoveAll(profile))
	}
	b.in = in
	// Chromium has no sandbox, because it refuses one to root, and it loads our own page only.
	b.cmd = exec.CommandContext(ctx, program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
		"--hide-scrollbars", "--no-first-run", "--disable-background-networking", "--disable-component-update",
		"--disable-extensions", "--force-color-profile=srgb",
		"--user-data-dir="+profile, "--remote-debugging-pipe", "about:blank")
	b.cmd.ExtraFiles = []*os.File{theirIn, theirOut}
	b.cmd.Stderr = &b.stderr
	b.cmd.WaitDelay = 5 * time.Second
	err = b.cmd.Start()
	err = errors.Join(err, theirIn.Close(), theirOut.Close())
	if err != nil {
		return nil, errors.Join(err, in.Close(), out.Close(), os.RemoveAll(profile))
	}
	go b.read(out)
	return b, nil
}

// Close kills Chromium, which may hang at its end, and removes its profile.
func (b *Browser) Close() error {
	_ = b.cmd.Process.Kill() // it may be gone already
	b.in.Close()
	<-b.done
	_ = b.cmd.Wait() // it was killed
	// Its children may still write into the profile for a moment.
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for {
		if err := os.RemoveAll(b.profile); !errors.Is(err, syscall.ENOTEMPTY) {
			return err
		}
		<-again.C
	}
}

// read delivers Chromium's messages until the pipe is closed.
func (b *Browser) read(out io.ReadCloser) {
	defer out.Close()
	r := bufio.NewReader(out)
	for {
		text, err := r.ReadBytes(0)
		if err != nil {
			b.end(err)
			return
		}
		var m struct {
			answer
			ID        int
			SessionID string
			Method    string
			Params    json.RawMessage
		}
		if err := json.Unmarshal(text[:len(text)-1], &m); err != nil {
			b.end(fmt.Errorf("reading a message of Chromium: %w", err))
			return
		}
		b.mu.Lock()
		if m.ID != 0 {
			if c := b.waiting[m.ID]; c != nil {
				c <- m.answer // c has room for one answer
				delete(b.waiting, m.ID)
			}
		} else if tab := b.tabs[m.SessionID]; tab != nil {
			tab.handle(m.Method, m.Params)
		}
		b.mu.Unlock()
	}
}

func (b *Browser) end(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gone = fmt.Errorf("chromium is gone: %w\n%s", err, b.stderr.String())
	close(b.done)
}

// call calls a method, of a tab's session or of the browser, and waits for the answer, or for the
// end of Chromium. in and out may be nil.
func (b *Browser) call(session, method string, in, out any) error {
	if in == nil {
		in = struct{}{}
	}
	c := make(chan answer, 1)
	b.mu.Lock()
	b.last++
	id := b.last
	b.waiting[id] = c
	b.mu.Unlock()
	text, err := json.Marshal(struct {
		ID        int    `json:"id"`
		SessionID string `json:"sessionId,omitempty"`
		Method    string `json:"method"`
		Params    any    `json:"params"`
	}{id, session, method, in})
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	if _, err := b.in.Write(append(text, 0)); err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	select {
	case a := <-c:
		if a.Error != nil {
			return fmt.Errorf("%s: %s", method, a.Error.Message)
		}
		if out == nil {
			return nil
		}
		if err := json.Unmarshal(a.Result, out); err != nil {
			return fmt.Errorf("%s: %w", method, err)
		}
		return nil
	case <-b.done:
		return fmt.Errorf("%s: %w", method, b.gone)
	}
}

// tail keeps the end of the written text.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	t.text = t.text[max(0, len(t.text)-4096):]
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}
