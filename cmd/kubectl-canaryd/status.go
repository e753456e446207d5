package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/terminal"
)

// A statusRow is the state of one node.
type statusRow struct {
	Node string `json:"node"`
	Pod  string `json:"pod,omitempty"`
	// State is a state of api.Health; also unknown without an answer.
	State    api.HealthState `json:"state"`
	Healthy  bool            `json:"healthy"`
	Answered bool            `json:"answered"`
	// Text is why the node is not healthy, a warning, or why there is no answer.
	Text      string    `json:"text,omitempty"`
	Mode      string    `json:"mode,omitempty"`
	Backend   string    `json:"backend,omitempty"`
	Guarded   int       `json:"guardedRules"`
	Flushes   int       `json:"flushes"` // in the last 24 hours, as far as the node lists them
	LastFlush time.Time `json:"lastFlush,omitzero"`
}

// A statusReply is the answer for a fleet.
type statusReply struct {
	Nodes []statusRow `json:"nodes"` // the worst first
	// States counts the nodes by state, and Unanswered the nodes without an answer.
	States     map[api.HealthState]int `json:"states"`
	Unanswered int                     `json:"unanswered"`
	// WithoutPod is how many nodes of the DaemonSet have no pod, and so no row.
	WithoutPod int `json:"withoutPod,omitempty"`
}

// worstFirst is the order of states.
var worstFirst = []api.HealthState{
	api.StateLost, api.StatePartial, api.StateUnknown, api.StateRefused, api.StateStopped, api.StatePaused, api.StateNothing, api.StateHealthy,
}

// flushesWithin is the time for which a status counts flushes.
const flushesWithin = 24 * time.Hour

// runStatus prints the state of each node, the worst first. Its exit code is reply.code().
func runStatus(ctx context.Context, o *options, to streams) (int, error) {
	f, err := o.open(ctx, to)
	if err != nil {
		return exitError, err
	}
	reply := f.status(ctx, to, func(node, api.Status) error { return nil })
	return reply.code(), show(to.out, o.output, reply, func(w io.Writer) { writeFleet(w, reply) })
}

// status queries all nodes for their status, and returns a row for each. take gets each status,
// one at a time; its error makes the node count as one without an answer.
func (f *fleet) status(ctx context.Context, to streams, take func(node, api.Status) error) statusReply {
	type known struct {
		row    statusRow
		status api.Status
	}
	reply := statusReply{Nodes: []statusRow{}, States: map[api.HealthState]int{}, WithoutPod: f.without}
	askAll(ctx, f, to, func(ctx context.Context, n node) (known, error) {
		s, h, err := statusOf(f.exec(ctx, n, mostStatus, "status", "-o", "json"))
		return known{rowOf(n, s, h, err, to.now()), s}, err
	}, func(n node, k known, err error) {
		if err == nil {
			err = take(n, k.status)
		}
		if err != nil && k.row.Answered {
			k.row = rowOf(n, api.Status{}, api.Health{}, err, to.now())
		}
		reply.add(k.row)
	})
	reply.sort()
	return reply
}

// add adds a node's row, and counts it by its state.
func (r *statusReply) add(row statusRow) {
	r.Nodes = append(r.Nodes, row)
	r.States[row.State]++
	if !row.Answered {
		r.Unanswered++
	}
}

// sort sorts the rows by rank, and then by name.
func (r *statusReply) sort() {
	slices.SortFunc(r.Nodes, func(a, b statusRow) int {
		return cmp.Or(cmp.Compare(a.rank(), b.rank()), cmp.Compare(a.Node, b.Node))
	})
}

// rowOf returns the row of a node from its status s and health h. If err is not nil, the row
// says so, and the node's state is unknown.
func rowOf(n node, s api.Status, h api.Health, err error, now time.Time) statusRow {
	row := statusRow{Node: n.name, Pod: n.pod, State: api.StateUnknown}
	if err != nil {
		row.Text = cell(err.Error())
		return row
	}
	row.Answered, row.State, row.Healthy = true, h.State, h.Healthy()
	row.Text = cell(cmp.Or(h.Problem, h.Warning))
	row.Mode, row.Backend = cell(string(s.Mode)), cell(string(s.Backend.Name))
	row.Guarded = s.Generation.Rules + s.NativeCounts().Rules
	for _, flush := range s.Flushes {
		if !flush.Requested() && flush.Drill == "" && flush.Latest().After(now.Add(-flushesWithin)) {
			row.Flushes++
		}
	}
	if last, ok := s.LastFlush(); ok {
		row.LastFlush = last.Latest().UTC()
	}
	return row
}

// rank is the row's place: the worst has the smallest.
func (r statusRow) rank() int {
	at := slices.Index(worstFirst, r.State)
	if at < 0 { // a state that this program does not know is not good
		at = slices.Index(worstFirst, api.StateUnknown)
	}
	rank := 2 * at
	if r.Answered && r.Text == "" {
		rank++ // after nodes of the same state that have a warning
	}
	return rank
}

// code returns the exit code for a fleet.
func (r statusReply) code() int {
	switch {
	case r.Unanswered+r.WithoutPod+r.States[api.StateUnknown] > 0:
		return exitError
	case r.States[api.StateHealthy] < len(r.Nodes):
		return exitNo
	default:
		return exitOK
	}
}

// writeFleet writes a row for each node and then the sum, because a terminal shows the end.
func writeFleet(w io.Writer, r statusReply) {
	rows := [][]string{{"NODE", "STATE", "MODE", "BACKEND", "RULES", "FLUSHES", "LAST FLUSH", "WHY"}}
	for _, n := range r.Nodes {
		row := []string{cell(n.Node), string(n.State), n.Mode, n.Backend, "", "", moment(n.LastFlush), n.Text}
		if n.Answered {
			row[4], row[5] = strconv.Itoa(n.Guarded), strconv.Itoa(n.Flushes)
		}
		rows = append(rows, row)
	}
	terminal.Table(w, rows, func(heading, cell string) terminal.Colour {
		switch {
		case heading != "STATE":
			return terminal.Normal
		case cell == string(api.StateHealthy):
			return terminal.Green
		case cell == string(api.StateUnknown), cell == string(api.StatePaused), cell == string(api.StateNothing):
			return terminal.Yellow
		default:
			return terminal.Red
		}
	})
	fmt.Fprintf(w, "\n%s\n", r.sum())
}

// sum describes the fleet in one line: "500 nodes: 2 lost, 1 unknown, 497 healthy".
func (r statusReply) sum() string {
	var parts []string
	for _, state := range worstFirst {
		if n := r.States[state]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, state))
		}
	}
	text := count(len(r.Nodes), "node") + ": " + strings.Join(parts, ", ")
	if r.Unanswered > 0 {
		text += fmt.Sprintf("; %d gave no answer", r.Unanswered)
	}
	return text + withoutText(r.WithoutPod)
}

// withoutText counts the nodes without a pod; "" if there are none.
func withoutText(n int) string {
	switch n {
	case 0:
		return ""
	case 1:
		return "; 1 more node of the DaemonSet has no pod"
	default:
		return fmt.Sprintf("; %d more nodes of the DaemonSet have no pod", n)
	}
}

// moment returns a time for people, in UTC, because users compare the rows of many nodes.
func moment(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02 15:04:05")
}

// problemOf returns the problem in a headline.
func problemOf(headline string) string {
	return cmp.Or(strings.TrimPrefix(headline, "NOT healthy: "), "not healthy")
}
