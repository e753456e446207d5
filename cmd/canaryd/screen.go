package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
)

// A screen is a terminal that shows colours. Any other writer gets the same text without them.
type screen struct{ io.Writer }

// onScreen returns file as a screen if it is a terminal and NO_COLOR is not set
// (https://no-color.org).
func onScreen(file *os.File, getenv func(string) string) io.Writer {
	if getenv("NO_COLOR") != "" || !terminal(file, getenv) {
		return file
	}
	return screen{file}
}

// terminal reports whether file is a terminal that can move its cursor.
func terminal(file *os.File, getenv func(string) string) bool {
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == nil && getenv("TERM") != "dumb" && getenv("TERM") != ""
}

// A colour is the number of a terminal's colour.
type colour int

const (
	normal colour = 0
	bold   colour = 1
	red    colour = 31
	green  colour = 32
	yellow colour = 33
)

// paint returns text in a colour if w is a screen.
func paint(w io.Writer, c colour, text string) string {
	if _, ok := w.(screen); !ok || c == normal || text == "" {
		return text
	}
	return fmt.Sprintf("\x1b[%dm%s\x1b[0m", c, text)
}

// textFor returns what write writes. It has colours if w is a screen.
func textFor(w io.Writer, write func(w io.Writer)) string {
	var text strings.Builder
	if _, colours := w.(screen); colours {
		write(screen{&text})
	} else {
		write(&text)
	}
	return text.String()
}

// colourOf returns the colour of a table's cell. Only the present state and outcomes have one: a
// loss that is over must not alarm.
func colourOf(heading, cell string) colour {
	verdict, outcome := canary.Verdict(cell), reload.Outcome(cell)
	switch {
	case heading == "VERDICT" && verdict == canary.Intact, heading == "OUTCOME" && outcome == reload.Proved:
		return green
	case heading == "VERDICT" && verdict == canary.Unknown, heading == "OUTCOME" && outcome == reload.Raced:
		return yellow
	case heading == "VERDICT" && (verdict.Loss() || verdict == canary.Refused || verdict == canary.Partial), heading == "OUTCOME" && (outcome == reload.Partial || outcome == reload.Failed):
		return red
	default:
		return normal
	}
}

const (
	// patience is how long a command may run before it shows that it is at work.
	patience = time.Second
	// eraseLine moves the cursor to the start of the line and empties the line.
	eraseLine = "\r\x1b[K"
)

// atWork shows each second on a terminal how long a command has been running. The line disappears
// when the command prints something or ends.
func atWork(ctx context.Context, to io.Writer, name string) (done func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(patience)
		defer tick.Stop()
		for begin, shown := time.Now(), false; ; shown = true {
			select {
			case <-ctx.Done():
				if shown {
					_, _ = fmt.Fprint(to, eraseLine)
				}
				return
			case <-tick.C:
				// The cursor stays at the start, so that a line of the log covers this one.
				_, _ = fmt.Fprintf(to, "%scanaryd %s: %s\r", eraseLine, name, time.Since(begin).Round(time.Second))
			}
		}
	}()
	return sync.OnceFunc(func() {
		cancel()
		<-ended
	})
}

// An after calls a function before it writes.
type after struct {
	io.Writer
	first func()
}

// Write implements io.Writer.
func (a after) Write(p []byte) (int, error) {
	a.first()
	return a.Writer.Write(p)
}

// behind returns to with first called before each write.
func (to streams) behind(first func()) streams {
	if s, ok := to.out.(screen); ok {
		to.out = screen{after{s.Writer, first}}
	} else {
		to.out = after{to.out, first}
	}
	to.err = after{to.err, first}
	return to
}
