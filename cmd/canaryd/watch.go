package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/control"
)

// watchAgain is how long canaryd status --watch waits before it looks for a daemon again.
const watchAgain = time.Second

// A seenStatus is a status of the daemon, or the reason why there is none now.
type seenStatus struct {
	status api.Status
	err    error // nil: there is a status
	final  bool  // another try is useless
}

// runWatch shows the status, and each change of it, until ctx ends. While no daemon runs it waits.
func runWatch(ctx context.Context, o *options, to streams) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	news := make(chan seenStatus)
	var follower sync.WaitGroup
	follower.Go(func() { follow(ctx, o.client(), news) })
	defer follower.Wait()
	defer cancel()
	view := o.view(to)
	defer view.end()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return exitOK, nil
		case seen := <-news:
			if seen.final {
				return exitError, seen.err
			}
			err = view.see(seen, time.Now())
		case now := <-tick.C:
			err = view.tick(now)
		}
		if err != nil {
			return exitError, err
		}
	}
}

// follow sends the daemon's statuses to news until ctx ends. If the daemon ends, it sends the
// error and looks for a daemon again. A refusal is final, and ends follow.
func follow(ctx context.Context, client control.Client, news chan<- seenStatus) {
	send := func(s seenStatus) error {
		select {
		case news <- s:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for ctx.Err() == nil {
		err := client.Watch(ctx, func(s api.Status) error { return send(seenStatus{status: s}) })
		var refused *control.RefusedError
		final := errors.As(err, &refused) || errors.Is(err, control.ErrForbidden)
		if ctx.Err() != nil || send(seenStatus{err: err, final: final}) != nil || final {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(watchAgain):
		}
	}
}

// A view displays statuses. One goroutine uses it.
type view interface {
	see(s seenStatus, now time.Time) error
	tick(now time.Time) error
	end()
}

// view returns the view of the output for runWatch: on a terminal a screen that is drawn again,
// else a line per change.
func (o *options) view(to streams) view {
	if o.output == "json" || to.size == nil {
		return &lineView{to: to, json: o.output == "json"}
	}
	_, _ = io.WriteString(to.out, enterScreen)
	return &screenView{to: to}
}

// A lineView writes a line for each change.
type lineView struct {
	to   streams
	json bool
	last string // the last line
	gone bool   // the error stream has said that no daemon runs
}

// see prints a line (or the status as JSON) if it differs from the last one. The end of the
// daemon is printed once, on the error stream.
func (v *lineView) see(s seenStatus, now time.Time) error {
	if s.err != nil {
		if !v.gone {
			_, _ = fmt.Fprintf(v.to.err, "canaryd: %s; waiting for it\n", plain(oneLine(s.err.Error())))
		}
		v.gone, v.last = true, "" // its return is news
		return nil
	}
	v.gone = false
	line := plain(s.status.Line())
	if v.json {
		text, err := json.Marshal(s.status)
		if err != nil {
			return err
		}
		line = string(plainJSON(text))
	}
	if line == v.last {
		return nil
	}
	if v.last = line; !v.json {
		line = now.UTC().Format(time.RFC3339) + " " + line
	}
	_, err := fmt.Fprintln(v.to.out, line)
	return err
}

func (v *lineView) tick(time.Time) error { return nil }

func (v *lineView) end() {}

const (
	// enterScreen opens the terminal's second screen and hides the cursor; leaveScreen undoes that.
	enterScreen = "\x1b[?1049h\x1b[?25l"
	leaveScreen = "\x1b[?25h\x1b[?1049l"
)

// A screenView draws the status on a terminal. It writes a frame at once, over the previous
// frame, and only if it differs, so that nothing flickers.
type screenView struct {
	to    streams
	seen  *api.Status // the last one; nil: none yet
	err   error       // why there is no daemon now; nil: there is one
	since time.Time   // when that was first seen
	last  string      // the last frame
}

// see takes a new status or error, and draws the screen again. The last status stays on it
// while no daemon runs.
func (v *screenView) see(s seenStatus, now time.Time) error {
	switch {
	case s.err == nil:
		v.seen, v.err = &s.status, nil
	case v.err == nil:
		v.err, v.since = s.err, now
	default:
		v.err = s.err
	}
	return v.tick(now)
}

// tick draws the screen again if its text has changed, each second, because it says how long
// ago things happened.
func (v *screenView) tick(now time.Time) error {
	columns, rows := v.to.size()
	next := frame(textFor(v.to.out, func(w io.Writer) { v.draw(w, now) }), columns, rows)
	if next == v.last {
		return nil
	}
	v.last = next
	_, err := io.WriteString(v.to.out, next)
	return err
}

// draw writes the whole text of the screen; frame then cuts it to the terminal.
func (v *screenView) draw(w io.Writer, now time.Time) {
	fmt.Fprintf(w, "canaryd status --watch, %s (Ctrl-C ends it)\n", now.UTC().Format("2006-01-02 15:04:05 MST"))
	if v.err != nil {
		fmt.Fprintln(w, paint(w, red, fmt.Sprintf("no daemon since %s, waiting for it: %s", v.since.UTC().Format("15:04:05"), plain(oneLine(v.err.Error())))))
	}
	if v.seen != nil && v.err != nil {
		fmt.Fprintln(w, "its last status:")
	}
	if v.seen != nil {
		writeStatus(w, *v.seen)
	}
}

func (v *screenView) end() { _, _ = io.WriteString(v.to.out, leaveScreen) }

// frame returns the codes that draw text over the previous frame, as much as fits the terminal.
// The last row then counts the hidden lines.
func frame(text string, columns, rows int) string {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if len(lines) > rows {
		hidden := len(lines) - rows + 1
		lines = append(lines[:rows-1:rows-1], fmt.Sprintf("(%s: canaryd status)", count(hidden, "more line")))
	}
	var b strings.Builder
	b.WriteString("\x1b[H")
	for i, line := range lines {
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(cut(line, columns) + "\x1b[K")
	}
	b.WriteString("\x1b[J")
	return b.String()
}

// cut returns the first columns of a line, so that no line of a frame wraps. Colours take no
// columns, and end with the line.
func cut(line string, columns int) string {
	var b strings.Builder
	shown, coloured := 0, false
	for line != "" {
		if strings.HasPrefix(line, "\x1b[") {
			end := strings.IndexByte(line, 'm') + 1
			if end == 0 {
				break
			}
			coloured = line[:end] != "\x1b[0m"
			b.WriteString(line[:end])
			line = line[end:]
			continue
		}
		if shown == columns {
			break
		}
		_, size := utf8.DecodeRuneInString(line)
		b.WriteString(line[:size])
		line, shown = line[size:], shown+1
	}
	if coloured {
		b.WriteString("\x1b[0m")
	}
	return b.String()
}

// sizeOf returns a function for the size of a terminal: 80 columns and 24 rows if it is
// unknown.
func sizeOf(file *os.File) func() (columns, rows int) {
	return func() (int, int) {
		size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
		if err != nil || size.Col == 0 || size.Row < 2 {
			return 80, 24
		}
		return int(size.Col), int(size.Row)
	}
}
