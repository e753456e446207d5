package main

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/canaryd/canaryd/internal/terminal"
)

// askAll queries all nodes by ask, several at a time, and gives take one answer after the
// other, with its error. If ctx ends first, the answer of a node that was not queried is also
// an error.
func askAll[T any](ctx context.Context, f *fleet, to streams, ask func(context.Context, node) (T, error), take func(node, T, error)) {
	var mu sync.Mutex
	seen := progress{to: to, total: len(f.nodes)}
	var group errgroup.Group
	group.SetLimit(f.parallel)
	for _, n := range f.nodes {
		group.Go(func() error {
			answer, err := ask(ctx, n)
			mu.Lock()
			defer mu.Unlock()
			take(n, answer, err)
			seen.add(err)
			return nil
		})
	}
	_ = group.Wait() // errors are answers
	seen.end()
}

// A progress reports on the error stream how many nodes have been queried.
type progress struct {
	to                  streams
	total, done, silent int
}

// manyNodes is the number of nodes from which a log has progress, too.
const manyNodes = 100

// add counts an answer, and shows the progress: on a terminal in one line, else in a few lines
// if there are many nodes.
func (p *progress) add(err error) {
	p.done++
	if err != nil {
		p.silent++
	}
	switch {
	case p.to.watched && (p.done == p.total || p.done%(p.total/100+1) == 0):
		_, _ = fmt.Fprintf(p.to.err, "\r\x1b[K%d of %s, %d without an answer", p.done, count(p.total, "node"), p.silent)
	case !p.to.watched && p.total >= manyNodes && p.done%((p.total+9)/10) == 0:
		say(p.to, fmt.Sprintf("%d of %s", p.done, count(p.total, "node")))
	}
}

// end removes the line from a terminal.
func (p *progress) end() {
	if p.to.watched {
		_, _ = fmt.Fprint(p.to.err, "\r\x1b[K")
	}
}

// A silence is a node without an answer.
type silence struct {
	Node string `json:"node"`
	Why  string `json:"why"`
}

// cell prepares text of other programs for a table's cell.
func cell(text string) string { return terminal.Plain(clip(terminal.OneLine(text))) }

func noColours(string, string) terminal.Colour { return terminal.Normal }
