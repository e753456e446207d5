package main

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/canaryd/canaryd/internal/terminal"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
)

// A screen is a terminal that shows colours.
type screen = terminal.Screen

type colour = terminal.Colour

const (
	normal = terminal.Normal
	bold   = terminal.Bold
	red    = terminal.Red
	green  = terminal.Green
	yellow = terminal.Yellow
)

// Only these functions show text of other processes.
var (
	plain, plainJSON, oneLine = terminal.Plain, terminal.PlainJSON, terminal.OneLine
	paint, textFor            = terminal.Paint, terminal.TextFor
)

// colourOf returns the colour of a table's cell. Only the present state and outcomes have one,
// because a past loss must not alarm.
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
	// patience is how long a command may run before it shows that it is still working.
	patience = time.Second
	// eraseLine moves the cursor to the start of the line and empties the line.
	eraseLine = "\r\x1b[K"
)

// atWork shows on a terminal, each second, how long a command has been running, until done is
// called or ctx ends. The line disappears then; done may be called again.
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

// behind returns streams that call first before each write: run erases the line of atWork so.
func (to streams) behind(first func()) streams {
	if s, ok := to.out.(screen); ok {
		to.out = screen{Writer: after{s.Writer, first}}
	} else {
		to.out = after{to.out, first}
	}
	to.err = after{to.err, first}
	return to
}
