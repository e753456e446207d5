package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/terminal"
)

// A pauseRow shows whether replays are paused on a node.
type pauseRow struct {
	Node string `json:"node"`
	// Paused is missing for a node without an answer, because the request may or may not have
	// reached it.
	Paused    *bool     `json:"paused,omitempty"`
	Until     time.Time `json:"until,omitzero"`
	WasPaused bool      `json:"wasPaused"`
	Why       string    `json:"why,omitempty"` // why there is no answer
}

type pauseReply struct {
	Nodes      []pauseRow `json:"nodes"`
	Unanswered int        `json:"unanswered"`
	WithoutPod int        `json:"withoutPod,omitempty"`
}

func runPause(ctx context.Context, o *options, to streams) (int, error) {
	return o.change(ctx, to, "This pauses replays for "+o.pause.String()+": rules that are flushed meanwhile stay away.", true,
		"pause", "--for="+o.pause.String(), "--why="+o.reason(), "-o", "json")
}

func runResume(ctx context.Context, o *options, to streams) (int, error) {
	return o.change(ctx, to, "This ends the pause of replays: lost rules are put back at once.", false, "resume", "-o", "json")
}

// change runs a command (words) on all selected nodes, once the user has seen their list: pause
// or resume. meaning explains it to the user; paused is the state that each answer must show.
func (o *options) change(ctx context.Context, to streams, meaning string, paused bool, words ...string) (int, error) {
	if !o.all && o.nodes == "" && len(o.names) == 0 {
		return exitError, errors.New("name nodes, select them with -l, or say --all")
	}
	f, err := o.open(ctx, to)
	if err != nil {
		return exitError, err
	}
	if !o.yes && !f.agreed(ctx, to, meaning) {
		return exitError, errors.New("nothing was asked of any node: --yes is needed, or a yes at a terminal")
	}
	reply := pauseReply{Nodes: []pauseRow{}, WithoutPod: f.without}
	askAll(ctx, f, to, func(ctx context.Context, n node) (pauseRow, error) {
		return pauseRowOf(n, f.exec(ctx, n, mostSmall, words...), paused)
	}, func(n node, row pauseRow, err error) {
		if err != nil {
			row = pauseRow{Node: n.name, Why: cell(err.Error())}
			reply.Unanswered++
		}
		reply.Nodes = append(reply.Nodes, row)
	})
	slices.SortFunc(reply.Nodes, func(a, b pauseRow) int {
		if (a.Paused == nil) != (b.Paused == nil) {
			return cmp.Compare(len(b.Why), len(a.Why))
		}
		return cmp.Compare(a.Node, b.Node)
	})
	code := exitOK
	if reply.Unanswered+reply.WithoutPod > 0 {
		code = exitError
	}
	return code, show(to.out, o.output, reply, func(w io.Writer) { writePaused(w, reply) })
}

// agreed shows the nodes to the user, and reports whether a change may go on; false without a
// terminal.
func (f *fleet) agreed(ctx context.Context, to streams, meaning string) bool {
	var names []string
	for _, n := range f.nodes {
		names = append(names, n.name)
	}
	_, _ = fmt.Fprintf(to.err, "%s\n%s: %s\n", meaning, count(len(names), "node"), listed(names))
	return terminal.Agreed(ctx, to.in, to.err, "Go on?")
}

// pauseRowOf reads the answer to canaryd pause or resume with -o json. An answer that does not
// show the wanted state paused is an error.
func pauseRowOf(n node, a answer, paused bool) (pauseRow, error) {
	if err := a.failed(); err != nil {
		return pauseRow{}, err
	}
	var reply struct {
		api.PauseReply
		WasPaused *bool `json:"wasPaused"` // it is in each reply
	}
	if err := read(a.out, &reply); err != nil {
		return pauseRow{}, err
	}
	if reply.WasPaused == nil || paused == reply.Until.IsZero() {
		return pauseRow{}, errors.New("the answer does not say until when replays are paused")
	}
	return pauseRow{Node: n.name, Paused: &paused, Until: reply.Until.UTC(), WasPaused: *reply.WasPaused}, nil
}

// writePaused writes the state of each node and then the sum. A silent node may be paused or
// not.
func writePaused(w io.Writer, r pauseReply) {
	rows := [][]string{{"NODE", "PAUSED", "UNTIL", "BEFORE", "WHY"}}
	for _, n := range r.Nodes {
		row := []string{cell(n.Node), "unknown", "", "", n.Why}
		if n.Paused != nil {
			row = []string{cell(n.Node), "no", moment(n.Until), "not paused", ""}
			if *n.Paused {
				row[1] = "yes"
			}
			if n.WasPaused {
				row[3] = "paused"
			}
		}
		rows = append(rows, row)
	}
	terminal.Table(w, rows, func(heading, cell string) terminal.Colour {
		if heading == "PAUSED" && cell == "unknown" {
			return terminal.Yellow
		}
		return terminal.Normal
	})
	text := count(len(r.Nodes), "node") + " asked"
	if r.Unanswered > 0 {
		text += fmt.Sprintf("; %d gave no answer, and may be paused or not", r.Unanswered)
	}
	fmt.Fprintf(w, "\n%s%s\n", text, withoutText(r.WithoutPod))
}
