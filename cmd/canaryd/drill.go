package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/terminal"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

const aboutDrill = `A game day without an outage: the running daemon takes away its own canary, which packets do not
meet, and has to notice that, put it back and prove it. Where it guards native tables, it then makes
a table canaryd-drill next to them, takes that away in the same way, and removes it at the end.
Prints a timeline, the log's lines, and the alert that a flush would raise. canaryd records it as a
drill, and counts no flush.
With --for-real it takes the protected jumps of nat PREROUTING, after a question: then new
connections to services fail until the jumps are back, the drill counts as a flush, and its alert
fires. While canaryd is paused, observes, or is not healthy, it takes nothing and says why.
Exit code: 0 passed, 1 not passed, 2 refused, no daemon or trouble.
`

// errNotAgreed means that the operator did not agree to a drill for real.
var errNotAgreed = errors.New("nothing was taken: --for-real needs your yes, or --yes where there is no terminal")

// runDrill has the daemon drill; a drill for real needs a yes. The code is exitNo if it did not
// pass, exitError if it was refused.
func runDrill(ctx context.Context, o *options, to streams) (int, error) {
	request := api.DrillRequest{Table: rules.TableName(o.table), Kind: canary.Verdict(o.kind), ForReal: o.forReal}
	if o.forReal {
		if !o.yes && !terminal.Agreed(ctx, to.in, to.err, aboutForReal) {
			return exitError, errNotAgreed
		}
		request.Table, request.Kind = "", "" // complete has refused values from the operator
	}
	reply, err := o.client().Drill(ctx, request)
	if err != nil {
		return exitError, err
	}
	err = show(to.out, o.output, reply, func(w io.Writer) { fmt.Fprint(w, drillText(w, reply)) })
	switch reply.Result {
	case api.DrillPassed:
		return exitOK, err
	case api.DrillRefused:
		return exitError, cmp.Or(err, fmt.Errorf("the drill was refused, and nothing was taken: %s", reply.Reason))
	default:
		return exitNo, err
	}
}

// aboutForReal is the question before a drill for real.
const aboutForReal = `This removes the protected jumps of nat PREROUTING, in each family. Until they are back, usually
for less than a second, new connections to services fail, and it counts as a flush. Go on?`

// drillText returns a drill for people: its result, the timeline, the log and the alert; "" for
// a refused drill, which the error explains.
func drillText(w io.Writer, r api.DrillReply) string {
	var b strings.Builder
	switch r.Result {
	case api.DrillRefused: // the error explains it
		return ""
	case api.DrillPassed:
		took := "an unknown time"
		if n := len(r.Steps); n > 0 {
			took = fmt.Sprintf("%.1f ms", 1000*r.Steps[n-1].Seconds)
		}
		fmt.Fprintln(&b, paint(w, green, fmt.Sprintf("The drill has passed: canaryd noticed the loss, and put it back, proved after %s.", took)))
	default:
		fmt.Fprintln(&b, paint(w, red, fmt.Sprintf("The drill has NOT passed (%s): %s", r.Result, plain(oneLine(r.Reason)))))
	}
	b.WriteString("\n")
	rows := [][]string{{"AFTER", "WHAT"}}
	for _, s := range r.Steps {
		rows = append(rows, []string{fmt.Sprintf("%.1f ms", 1000*s.Seconds), plain(s.What)})
	}
	writeTable(&b, rows)
	if len(r.Log) > 0 {
		b.WriteString("\nThe log:\n")
	}
	for _, line := range r.Log {
		fmt.Fprintf(&b, "  %s\n", plain(line))
	}
	b.WriteString("\n" + alertText(r))
	if r.Flush != "" {
		fmt.Fprintf(&b, "The record: canaryd status --flush %s\n", r.Flush)
	}
	return b.String()
}

// alertText names the alert of a flush like this drill, and whether it fires now.
func alertText(r api.DrillReply) string {
	if r.Alert.Fires {
		return fmt.Sprintf("The alert %s (severity %s) fires, because this was a flush.\n", r.Alert.Name, r.Alert.Severity)
	}
	return fmt.Sprintf("A flush of rules would have raised the alert %s (severity %s); a drill does not.\n", r.Alert.Name, r.Alert.Severity)
}

// lastDrillText describes the end of the last drill in one line; empty if there was none.
func lastDrillText(w io.Writer, end *api.DrillEnd) string {
	switch {
	case end == nil:
		return ""
	case end.Result == api.DrillPassed:
		return fmt.Sprintf("the last drill passed %s\n", ago(end.Time))
	default:
		return paint(w, yellow, fmt.Sprintf("the last drill did NOT pass (%s), %s", end.Result, ago(end.Time))) + "\n"
	}
}
