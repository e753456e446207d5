package main

import (
	"context"
	"encoding/json"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/severity"
)

// flushLines writes a line of JSON for each flush to standard output, for programs that collect
// the lines of many nodes. docs/architecture.md describes the fields.
type flushLines struct {
	to    *lineWriter
	node  string
	bound logBound
}

// run writes a line on standard output for each stage that follow reports, until ctx ends.
// canaryd continues after the reader of standard output has ended, and a reader that does not
// read delays no replay.
func (l *flushLines) run(ctx context.Context, follow func(context.Context, func(api.Flush, api.Stage))) {
	// The runtime ends a program that writes to a closed standard output, unless it catches the
	// signal. Children still get the signal as usual.
	closed := make(chan os.Signal, 1)
	signal.Notify(closed, syscall.SIGPIPE)
	defer signal.Stop(closed)
	log := klog.FromContext(ctx)
	follow(ctx, func(f api.Flush, stage api.Stage) { l.say(log, f, stage) })
}

// say writes the line of one stage of a flush, unless there are too many. A line that is too
// long loses its lists.
func (l *flushLines) say(log klog.Logger, f api.Flush, stage api.Stage) {
	more, ok := l.bound.admit(api.EventFlush)
	if !ok {
		return
	}
	line := f.Line(l.node, stage)
	if len(more) > 0 && more[0] == "leftOut" {
		line.LeftOut, _ = more[1].(int)
	}
	text, err := plainLine(line)
	if err == nil && len(text) > mostLine {
		text, err = plainLine(line.Shorter())
	}
	if err != nil {
		log.Error(err, "The line of a flush could not be made; `canaryd status --flush` shows its record", "flush", f.ID)
		return
	}
	level := severity.Warning
	switch {
	case stage != api.Over:
		level = severity.Error
	case f.Drill != "" || f.Outcome == api.Requested:
		level = severity.Notice
	}
	l.to.write(level, text)
}

func plainLine(line api.FlushLine) ([]byte, error) {
	text, err := json.Marshal(line)
	return plainJSON(text), err
}
