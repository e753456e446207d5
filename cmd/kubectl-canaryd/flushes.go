package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/terminal"
)

const (
	mostFlushes   = 100_000  // of all nodes
	mostFlushLine = 15 << 10 // bytes of a flush in JSON, as in canaryd's own lines
)

// A flushRow is a flush on a node, for people.
type flushRow struct {
	node, program, in      string // program: the culprit, without a pid
	kind, tables, lost, by string
	absent, outcome        string
	time                   time.Time
	times                  int
}

// A flushesReply is the answer for a fleet.
type flushesReply struct {
	Since time.Time `json:"since"`
	// Flushes are the lines of docs/architecture.md, the newest first.
	Flushes []json.RawMessage `json:"flushes"`
	Nodes   int               `json:"nodes"` // queried ones
	// Unanswered are the nodes whose flushes are unknown. Cut are nodes that may have had more
	// flushes.
	Unanswered []silence `json:"unanswered,omitempty"`
	Cut        []string  `json:"cut,omitempty"`
	// LeftOut is the number of flushes beyond this program's limit.
	LeftOut    int `json:"leftOut,omitempty"`
	WithoutPod int `json:"withoutPod,omitempty"`

	rows []flushRow
}

// runFlushes lists the flushes of all nodes within --since. The code is exitError if a node is
// silent or the list is incomplete.
func runFlushes(ctx context.Context, o *options, to streams) (int, error) {
	f, err := o.open(ctx, to)
	if err != nil {
		return exitError, err
	}
	now := to.now()
	reply := flushesReply{Since: now.Add(-o.since).UTC(), Nodes: len(f.nodes), WithoutPod: f.without}
	type line struct {
		row  flushRow
		json json.RawMessage
	}
	var lines []line
	states := f.status(ctx, to, func(n node, s api.Status) error {
		inside := recent(s.Flushes, reply.Since)
		if len(s.Flushes) >= api.KeptFlushes && len(inside) == len(s.Flushes) {
			reply.Cut = append(reply.Cut, n.name)
		}
		if more := len(inside) - api.KeptFlushes; more > 0 { // a node may not take the space of others
			slices.SortStableFunc(inside, func(a, b api.Flush) int { return b.Latest().Compare(a.Latest()) })
			inside, reply.LeftOut = inside[:api.KeptFlushes], reply.LeftOut+more
		}
		for _, flush := range inside {
			if len(lines) == mostFlushes {
				reply.LeftOut++
				continue
			}
			l := line{row: flushRowOf(n.name, flush, now)}
			if o.output == "json" {
				if l.json, err = flushJSON(n.name, flush, now); err != nil {
					return err
				}
			}
			lines = append(lines, l)
		}
		return nil
	})
	for _, n := range states.Nodes {
		if !n.Answered {
			reply.Unanswered = append(reply.Unanswered, silence{n.Node, n.Text})
		}
	}
	slices.Sort(reply.Cut)
	slices.SortStableFunc(lines, func(a, b line) int {
		return cmp.Or(b.row.time.Compare(a.row.time), cmp.Compare(a.row.node, b.row.node))
	})
	reply.Flushes = []json.RawMessage{}
	for _, l := range lines {
		reply.rows = append(reply.rows, l.row)
		if l.json != nil {
			reply.Flushes = append(reply.Flushes, l.json)
		}
	}
	code := exitOK
	if len(reply.Unanswered)+len(reply.Cut)+reply.LeftOut+reply.WithoutPod > 0 {
		code = exitError
	}
	return code, show(to.out, o.output, reply, func(w io.Writer) { writeFlushes(w, o, reply) })
}

// recent returns the flushes since then, and flushes whose rules are still missing.
func recent(all []api.Flush, since time.Time) []api.Flush {
	return slices.DeleteFunc(slices.Clone(all), func(f api.Flush) bool { return f.Latest().Before(since) && !f.Open() })
}

// flushRowOf returns the row of a flush for people. Its program and place (in) are the first
// known culprit's; writePrograms groups by them.
func flushRowOf(node string, f api.Flush, now time.Time) flushRow {
	families, tables, native := f.Where()
	row := flushRow{
		node: cell(node), kind: cell(string(f.Kind)), tables: cell(strings.Join(slices.Concat(families, tables, native), " ")),
		lost: cell(f.Lost.Text(strconv.Itoa)), by: cell(f.ByText()), absent: f.AbsentText(now), outcome: cell(f.OutcomeText()), time: f.Latest(), times: 1,
	}
	if f.Repeated != nil {
		row.times += max(f.Repeated.Times, 0)
	}
	row.program = "unknown"
	switch takers := f.Takers(); {
	case f.Drill != "":
		row.program = "canaryd drill"
	case len(takers) > 0 && takers[0].PID != 0:
		row.program, row.in = cmp.Or(cell(takers[0].Comm), "a process that had ended"), cell(takers[0].In())
		if f.CulpritsLikely {
			row.program = "likely " + row.program
		}
	}
	return row
}

// flushJSON returns the line of docs/architecture.md for -o json, without its lists if it is
// too long. A node may send any record: a line that is still too long is an error.
func flushJSON(node string, f api.Flush, now time.Time) (json.RawMessage, error) {
	line := f.Line(node, f.Stage(now))
	text, err := json.Marshal(line)
	if err == nil && len(text) > mostFlushLine {
		text, err = json.Marshal(line.Shorter())
	}
	if err == nil && len(text) > mostFlushLine {
		err = fmt.Errorf("the record of the flush %s is longer than canaryd writes them", clip(f.ID))
	}
	return text, err
}

// writeFlushes writes for people the programs that flushed, then each flush, and then the nodes
// whose flushes may be missing.
func writeFlushes(w io.Writer, o *options, r flushesReply) {
	if len(r.rows) == 0 {
		fmt.Fprintf(w, "no flush within %s on the nodes that answered\n", o.since)
	} else {
		writePrograms(w, r.rows)
		rows := [][]string{{"TIME", "NODE", "KIND", "TABLES", "LOST", "BY", "IN", "ABSENT", "OUTCOME"}}
		for _, f := range r.rows {
			outcome := f.outcome
			if f.times > 1 {
				outcome += fmt.Sprintf("; %d times", f.times)
			}
			rows = append(rows, []string{moment(f.time), f.node, f.kind, f.tables, f.lost, f.by, f.in, f.absent, outcome})
		}
		fmt.Fprintln(w)
		terminal.Table(w, rows, noColours)
	}
	fmt.Fprintf(w, "\n%s asked%s\n", count(r.Nodes, "node"), withoutText(r.WithoutPod))
	if r.LeftOut > 0 {
		fmt.Fprintf(w, "%s more are left out: choose fewer hours or nodes\n", count(r.LeftOut, "flush record"))
	}
	if len(r.Cut) > 0 {
		fmt.Fprintf(w, "older flushes within that time may be missing, because a node keeps %d: %s\n", api.KeptFlushes, listed(r.Cut))
	}
	writeSilent(w, r.Unanswered)
}

// writePrograms writes a row for each program that flushed, the most frequent first.
func writePrograms(w io.Writer, flushes []flushRow) {
	type who struct{ program, in string }
	type sum struct {
		times int
		nodes map[string]bool
		last  time.Time
	}
	sums := map[who]*sum{}
	for _, f := range flushes {
		key := who{f.program, f.in}
		if sums[key] == nil {
			sums[key] = &sum{nodes: map[string]bool{}}
		}
		s := sums[key]
		s.times, s.nodes[f.node] = s.times+f.times, true
		if f.time.After(s.last) {
			s.last = f.time
		}
	}
	rows := [][]string{{"PROGRAM", "IN", "NODES", "FLUSHES", "LAST"}}
	for _, key := range slices.SortedFunc(maps.Keys(sums), func(a, b who) int {
		return cmp.Or(cmp.Compare(sums[b].times, sums[a].times), cmp.Compare(a.program, b.program), cmp.Compare(a.in, b.in))
	}) {
		s := sums[key]
		rows = append(rows, []string{key.program, key.in, strconv.Itoa(len(s.nodes)), strconv.Itoa(s.times), moment(s.last)})
	}
	terminal.Table(w, rows, noColours)
}

// writeSilent names the nodes without an answer.
func writeSilent(w io.Writer, all []silence) {
	if len(all) == 0 {
		return
	}
	rows := [][]string{{"NO ANSWER", "WHY"}}
	for _, s := range all {
		rows = append(rows, []string{cell(s.Node), cell(s.Why)})
	}
	fmt.Fprintln(w)
	terminal.Table(w, rows, noColours)
}

// mostListed bounds the names in a sentence.
const mostListed = 50

// listed joins names of nodes, at most mostListed, and counts the others.
func listed(names []string) string {
	var words []string
	for _, name := range names[:min(len(names), mostListed)] {
		words = append(words, cell(name))
	}
	text := strings.Join(words, " ")
	if more := len(names) - len(words); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}
