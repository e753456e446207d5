package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// A cell has the results of one way's connections for the flushes of one kind.
type cell struct {
	Flush, Way string
	Standby    string // --standby
	Flushes    int

	Established int // connections, once for each flush
	Resets      int // how many of them ended, or had no answer for 20 s
	Stalls      []time.Duration

	Begun   int // patient connections
	Never   int // how many of them had no answer in 15 s
	Refused int // how many of them the node itself refused

	Asked  int // impatient connections
	Failed int // how many of them failed
	Calm   int // how many of them failed before the flush, because of the machine
	// Gaps has the longest gap of each flush, 0 if nothing failed. Afters has the part of it
	// after the flusher's last command. Both are neverHealed if no connection was answered
	// until the test repaired the rules.
	Gaps, Afters []time.Duration

	Wrong int // answers by pods of other services, or by another pod of a flow's service
}

const neverHealed = -1 * time.Nanosecond

// add adds one flush, and returns the wrong answers.
func (c *cell) add(w window, seen wayView, t truth) (strangers []string) {
	c.Flushes++
	var stall int64
	for _, f := range seen.Flows {
		c.Established++
		switch stall = max(stall, f.Stall); f.Lost {
		case reset, dead:
			c.Resets++
		case moved:
			c.Wrong++
			strangers = append(strangers, "another pod than before answers an established flow")
		}
	}
	c.Stalls = append(c.Stalls, time.Duration(stall)*time.Microsecond)
	for _, a := range seen.Patient {
		c.Begun++
		switch a.Outcome {
		case answered:
		case reset:
			c.Resets++
		case refused:
			c.Refused++
		default:
			c.Never++
		}
	}
	c.addImpatient(w, seen.Impatient)
	for _, a := range slices.Concat(seen.Patient, seen.Impatient) {
		if a.Outcome == answered && !t.right(a) {
			c.Wrong++
			strangers = append(strangers, a.String())
		}
	}
	return strangers
}

func (c *cell) addImpatient(w window, all []attempt) {
	if len(all) == 0 {
		return
	}
	slices.SortFunc(all, func(a, b attempt) int { return cmp.Compare(a.Start, b.Start) })
	for _, a := range all {
		if c.Asked++; a.Outcome != answered && a.Start+impatient.Microseconds() < w.From {
			c.Calm++
		}
	}
	g := longestGap(all, w)
	c.Failed += g.Failed
	if g.Open {
		g.Length, g.After = neverHealed, neverHealed
	}
	c.Gaps, c.Afters = append(c.Gaps, g.Length), append(c.Afters, g.After)
}

// addCounts adds the numbers of another cell, except flushes and times.
func (c *cell) addCounts(other cell) {
	c.Established += other.Established
	c.Resets += other.Resets
	c.Begun += other.Begun
	c.Never += other.Never
	c.Refused += other.Refused
	c.Asked += other.Asked
	c.Failed += other.Failed
	c.Calm += other.Calm
	c.Wrong += other.Wrong
}

// withWay adds another way's results for the same flushes: for each flush, the longest time
// counts.
func (c cell) withWay(other cell) cell {
	c.addCounts(other)
	c.Stalls, c.Gaps, c.Afters = longer(c.Stalls, other.Stalls), longer(c.Gaps, other.Gaps), longer(c.Afters, other.Afters)
	return c
}

// withFlushes adds the same way's results for other flushes.
func (c cell) withFlushes(other cell) cell {
	c.addCounts(other)
	c.Flushes += other.Flushes
	c.Stalls, c.Gaps, c.Afters = slices.Concat(c.Stalls, other.Stalls), slices.Concat(c.Gaps, other.Gaps), slices.Concat(c.Afters, other.Afters)
	return c
}

// longer returns the longer time of each flush. neverHealed is the longest.
func longer(some, others []time.Duration) []time.Duration {
	if len(some) == 0 || len(others) == 0 {
		return slices.Concat(some, others)
	}
	all := slices.Clone(some)
	for i := range min(len(some), len(others)) {
		if all[i] = max(some[i], others[i]); min(some[i], others[i]) == neverHealed {
			all[i] = neverHealed
		}
	}
	return all
}

// merge merges the cells of each name, and returns them sorted by name.
func merge(cells []cell, name func(cell) string, add func(a, b cell) cell) []cell {
	merged := map[string]cell{}
	for _, c := range cells {
		if one, found := merged[name(c)]; found {
			c = add(one, c)
		}
		merged[name(c)] = c
	}
	var all []cell
	for _, n := range slices.Sorted(maps.Keys(merged)) {
		all = append(all, merged[n])
	}
	return all
}

func byFlush(c cell) string { return c.Flush }
func byWay(c cell) string   { return c.Way }

// viewErr returns the lost connections of canaryd's clients, if they are a failure.
func (r result) viewErr() error {
	if r.Healer != byCanaryd || !r.Strict {
		return nil
	}
	var errs []error
	for _, c := range r.View {
		if c.Resets > 0 {
			errs = append(errs, fmt.Errorf("%s, %s: of %d established connections %d were reset", c.Flush, c.Way, c.Established, c.Resets))
		}
		if c.Never > 0 {
			errs = append(errs, fmt.Errorf("%s, %s: of %d patient connections %d never connected", c.Flush, c.Way, c.Begun, c.Never))
		}
	}
	return errors.Join(errs...)
}

// viewReport writes tables in Markdown: by flush, by kind of connection, and one with the cells
// that lost connections.
func viewReport(w io.Writer, results []result) {
	viewTable(w, results, "flush", func(cells []cell) []cell { return merge(cells, byFlush, cell.withWay) }, byFlush)
	viewTable(w, results, "connection", func(cells []cell) []cell { return merge(cells, byWay, cell.withFlushes) }, byWay)
	lost := func(cells []cell) []cell {
		return slices.DeleteFunc(slices.Clone(cells), func(c cell) bool { return c.Resets+c.Never+c.Wrong == 0 })
	}
	if slices.ContainsFunc(results, func(r result) bool { return len(lost(r.View)) > 0 }) {
		viewTable(w, results, "where connections were lost", lost, func(c cell) string { return c.Flush + ": " + c.Way })
	}
	fmt.Fprintln(w)
	for _, r := range results {
		asked := 0
		for _, c := range r.View {
			asked += c.Asked
		}
		fmt.Fprintf(w, "%s on %s, %d services: %d times two services changed their pods; of %d impatient connections %d failed before their flush; the healer took %.1f %% of a core.\n",
			r.Healer, r.Backend, r.ServiceCount, r.Changes, asked, r.Calm, 100*r.Processor)
	}
}

func viewTable(w io.Writer, results []result, what string, rows func([]cell) []cell, name func(cell) string) {
	head := []string{"healer", "backend", "services", what, "flushes", "resets", "longest stall", "never connected", "refused",
		"impatient failed", "longest gap", "longest gap behind the last command", "never healed", "wrong"}
	fmt.Fprintf(w, "\n| %s |\n|%s\n", strings.Join(head, " | "), strings.Repeat("---|", len(head)))
	for _, r := range results {
		for _, c := range rows(r.View) {
			fmt.Fprintf(w, "| %s | %s | %d | %s | %d | %d of %d | %s | %d of %d | %d | %s | %s | %s | %d | %d |\n", r.Healer, r.Backend, r.ServiceCount, name(c),
				c.Flushes, c.Resets, c.Established, medianAndWorst(c.Stalls), c.Never, c.Begun, c.Refused, share(c.Failed, c.Asked),
				medianAndWorst(c.Gaps), medianAndWorst(c.Afters), c.neverHealed(), c.Wrong)
		}
	}
}

// neverHealed returns the number of flushes after which no connection was answered until the
// test repaired the rules.
func (c cell) neverHealed() (n int) {
	for _, g := range c.Gaps {
		if g == neverHealed {
			n++
		}
	}
	return n
}

func share(some, all int) string {
	if all == 0 {
		return "-"
	}
	return fmt.Sprintf("%d of %d", some, all)
}

// medianAndWorst returns the median and the longest time, without flushes that were never healed.
func medianAndWorst(all []time.Duration) string {
	all = slices.DeleteFunc(slices.Clone(all), func(d time.Duration) bool { return d == neverHealed })
	if len(all) == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f / %s", quantile(all, 0.5).Seconds()*1000, milliseconds(quantile(all, 1)))
}
