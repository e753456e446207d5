package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
)

// runFlush prints one flush record (canaryd status --flush); an unknown name or number is
// exitNo.
func runFlush(ctx context.Context, o *options, to streams) (int, error) {
	reply, err := o.client().Flush(ctx, api.FlushRequest{Name: o.flush})
	switch {
	case errors.Is(err, api.ErrNoFlush):
		fail(to, err)
		return exitNo, nil
	case err != nil:
		return exitError, err
	}
	return exitOK, show(to.out, o.output, reply, func(w io.Writer) { fmt.Fprint(w, flushText(reply)) })
}

// flushText returns one flush for people: first its kind and time, then the processes and the
// counts, and last the rules as a diff.
func flushText(r api.FlushReply) string {
	var b strings.Builder
	f := r.Flush
	fmt.Fprintf(&b, "flush %s at %s, %s\n", f.ID, f.Time.UTC().Format("2006-01-02 15:04:05.000 MST"), ago(f.Time))
	fmt.Fprintf(&b, "%s, %s: noticed after %s, %s, %s\n", f.Kind, plain(f.OutcomeText()), noticedText(f), absentFully(f), count(f.Attempts, "replay"))
	if !f.LastInForce.IsZero() {
		how := "the exact time is not known"
		if f.Stalled {
			how = "canaryd was stalled when it happened"
		}
		fmt.Fprintf(&b, "%s; the rules were last seen in force at %s\n", how, f.LastInForce.UTC().Format("2006-01-02 15:04:05 MST"))
	}
	if f.Earlier {
		b.WriteString("seen by an earlier run of canaryd\n")
	}
	if r := f.Repeated; r != nil {
		fmt.Fprintf(&b, "the same process flushed the same tables again: %s, absent for at most %s each\n", r.Text(), span(r.MostAbsentSeconds))
	}
	if f.Standby != nil {
		fmt.Fprintf(&b, "%s\n", f.Standby.Text())
	}
	if f.Detail != "" {
		fmt.Fprintf(&b, "%s\n", plain(f.Detail))
	}
	b.WriteString("\n" + byFully(f))
	if len(f.Writers) > 0 {
		who := "all that wrote"
		if f.CulpritsLikely {
			who = "all that held the xtables lock, and may have written,"
		}
		b.WriteString(who + " between the last look that found everything in force and the read that showed the loss:\n")
		rows := [][]string{{"TIME", "PID", "COMM", "COMMAND"}}
		for _, w := range f.Writers {
			rows = append(rows, []string{
				w.Time.UTC().Format("15:04:05.000000"), strconv.Itoa(int(w.PID)),
				cmp.Or(plain(w.Comm), "?"), cmp.Or(plain(w.Command), "?"), // "?": it ended before canaryd read /proc
			})
		}
		writeTable(&b, rows)
	}

	writeLost(&b, f)
	for _, p := range f.Pods {
		fmt.Fprintf(&b, "host ports of pod %s\n", plain(p.String()))
	}
	if f.MorePods > 0 {
		fmt.Fprintf(&b, "and of %s\n", count(f.MorePods, "more pod"))
	}
	for _, p := range f.Policies {
		fmt.Fprintf(&b, "another policy, which canaryd leaves: %s\n", plain(p))
	}
	if r.NoDiff != "" {
		fmt.Fprintf(&b, "\nthe rules cannot be shown: %s\n", plain(oneLine(r.NoDiff)))
	}
	for _, d := range r.Diff {
		if len(d.Lines)+d.More == 0 { // only marks were lost
			continue
		}
		fmt.Fprintf(&b, "\n@@ %s @@\n", plain(d.Name()))
		for _, line := range d.Lines {
			fmt.Fprintf(&b, "%s\n", plain(line))
		}
		if d.More > 0 {
			fmt.Fprintf(&b, "@@ %s not kept @@\n", count(d.More, "more line"))
		}
	}
	return b.String()
}

// writeLost writes the lost rules of a record: the sum, a row for each table and chain, and the
// native tables.
func writeLost(b *strings.Builder, f api.Flush) {
	fmt.Fprintf(b, "\nlost %s\n", f.Lost.Text(strconv.Itoa)+f.Lost.UnprotectedText())
	b.WriteString(notInBaselineText(f))
	rows := [][]string{{"FAMILY", "TABLE", "KIND", "CHAIN", "RULES", "BY"}}
	for _, t := range f.TablesHit() {
		rows = append(rows, []string{t.Family.String(), string(t.Table), string(t.Kind), fmt.Sprintf("%s, %s", count(t.Chains, "chain"), count(t.Jumps, "jump")), strconv.Itoa(t.Rules), plain(f.TakersOf(t))})
		left := t.Rules
		for _, c := range t.PerChain {
			left -= c.Rules
			rows = append(rows, []string{"", "", "", plain(c.Chain), strconv.Itoa(c.Rules), ""})
		}
		if t.More > 0 {
			rows = append(rows, []string{"", "", "", fmt.Sprintf("%d more", t.More), strconv.Itoa(left), ""})
		}
		switch {
		case t.UnprotectedUnknown:
			rows = append(rows, []string{"", "", "", "not named by --protect", "not known", ""})
		case t.Unprotected > 0:
			rows = append(rows, []string{"", "", "", "not named by --protect", strconv.Itoa(t.Unprotected), ""})
		}
	}
	if len(rows) > 1 {
		writeTable(b, rows)
	}
	for _, l := range f.Native {
		fmt.Fprintf(b, "native table %s\n", plain(l.String()))
		for _, part := range l.Parts {
			fmt.Fprintf(b, "  %s\n", plain(part))
		}
		if l.More > 0 {
			fmt.Fprintf(b, "  and %s\n", count(l.More, "more part"))
		}
	}
}

// noticedText returns the time from the flush to its verdict, "at most" if only a bound is
// known.
func noticedText(f api.Flush) string {
	noticed, bound := f.NoticedFor()
	if bound {
		return "at most " + span(noticed.Seconds())
	}
	return span(noticed.Seconds())
}

// absentFully says when the rules were written, and how long they were missing, "at most" if
// only a bound is known.
func absentFully(f api.Flush) string {
	switch {
	case f.Open():
		return "absent for " + absentText(f)
	case f.AbsentSeconds == 0:
		return "not known to be back"
	}
	absent := "absent for " + span(f.AbsentSeconds)
	if f.AbsentAtMost {
		absent = "absent for at most " + span(f.AbsentSeconds)
	}
	if f.WrittenSeconds > 0 {
		absent = "written after " + span(f.WrittenSeconds) + ", " + absent
	}
	return absent
}

// byFully names the processes that removed something, each with its ancestors and command line,
// for a flush in full. Unknown or missed processes are said to be so.
func byFully(f api.Flush) string {
	if f.Drill != "" {
		return "by canaryd drill, on request\n"
	}
	text := ""
	for _, c := range f.Takers() {
		text += "by "
		if f.CulpritsLikely {
			text += "(likely) "
		}
		text += plain(c.Text())
		if c.Command != "" {
			text += ": " + plain(c.Command)
		}
		text += "\n"
	}
	switch {
	case text == "":
		return "by unknown\n"
	case f.CulpritsMissed:
		text += "messages of the kernel were missed: others may have removed something, too\n"
	}
	return text
}

// count returns "1 rule" and "2 rules".
func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}

// span returns a duration of a record for people.
func span(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	if d >= time.Second {
		return d.Round(time.Millisecond).String()
	}
	return d.Round(10 * time.Microsecond).String()
}
