package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/cluster"
)

// A side has the results of the services, or of the host ports.
type side struct {
	Failed int
	// Gaps has the longest gap of each flush that made a connection fail.
	Gaps []time.Duration
	// Afters has the part of each gap after the end of the flush.
	Afters []time.Duration
	Open   int // flushes without an answer until the test repaired the rules
}

// A kindResult is the result of the flushes of one kind.
type kindResult struct {
	Flushes, Failed int
	Open            int           // never healed
	Longest         time.Duration // the longest gap of the services
	After           time.Duration // the longest part of a gap after the end of the flush
}

// A result is the result of one node.
type result struct {
	Healer, Backend string
	Connections     int
	Rate            float64 // connections opened a second
	Skipped         int     // connections omitted because too many were open
	Flushes         int
	ByKind          map[string]kindResult
	Changes         int // moments at which services changed their pods
	Services        side
	HostPorts       side
	Calm            int      // connections that failed before the first flush, by the machine
	Wrong           int      // answers by pods of other services
	Strangers       []string // the first wrong answers
	Processor       float64  // cores that the healer and its children used
	View            []cell   // the results of the view's clients
	Strict          bool     // a lost connection of the view is a failure
	ServiceCount    int
	Mode            string // of kube-proxy
	Costs           []cost // of canaryd at rest
	Problems        []string
}

// maxStrangers bounds the listed wrong answers.
const maxStrangers = 20

func (l *lab) result(attempts []attempt, skipped int, used time.Duration) result {
	r := result{
		Healer: l.Healer, Backend: string(l.Backend), ServiceCount: l.Services(), Connections: len(attempts), Skipped: skipped,
		Flushes: len(l.windows), ByKind: map[string]kindResult{}, Changes: len(l.truth.Changes) / 2, Problems: l.problems,
	}
	if len(attempts) == 0 {
		r.Problems = append(r.Problems, "no connection was opened")
		return r
	}
	first, last := attempts[0].Start, attempts[len(attempts)-1].Start
	for i := range l.windows {
		w := &l.windows[i]
		if w.To == 0 && i+1 < len(l.windows) {
			w.To = l.windows[i+1].From
		} else if w.To == 0 {
			w.To = last + 1
		}
	}
	span := max(time.Duration(last-first)*time.Microsecond, time.Millisecond)
	r.Rate = float64(len(attempts)) / span.Seconds()
	r.Processor = used.Seconds() / span.Seconds()
	var services, ports []attempt
	for _, a := range attempts {
		if a.Target < l.Services() {
			services = append(services, a)
		} else {
			ports = append(ports, a)
		}
		if a.Outcome == answered && !l.truth.right(a) {
			if r.Wrong++; r.Wrong <= maxStrangers {
				r.Strangers = append(r.Strangers, a.String())
			}
		}
		if a.Outcome != answered && len(l.windows) > 0 && a.Start < l.windows[0].From {
			r.Calm++
		}
	}
	r.Services, r.HostPorts = l.side(services), l.side(ports)
	for _, w := range l.windows {
		g, k := longestGap(services, w), r.ByKind[w.Kind]
		k.Flushes, k.Failed = k.Flushes+1, k.Failed+g.Failed
		if g.Open {
			k.Open++
		} else {
			k.Longest, k.After = max(k.Longest, g.Length), max(k.After, g.After)
		}
		r.ByKind[w.Kind] = k
	}
	return r
}

func (l *lab) side(attempts []attempt) side {
	var s side
	for _, w := range l.windows {
		g := longestGap(attempts, w)
		s.Failed += g.Failed
		switch {
		case g.Open:
			s.Open++
		case g.Length > 0:
			s.Gaps, s.Afters = append(s.Gaps, g.Length), append(s.Afters, g.After)
		}
	}
	return s
}

// err returns the failures of the node, except for times.
func (r result) err() error {
	var errs []error
	for _, p := range r.Problems {
		errs = append(errs, errors.New(p))
	}
	if r.Wrong > 0 {
		errs = append(errs, fmt.Errorf("%d connections reached pods of other services, such as (start, end, target, outcome, pod):\n%s", r.Wrong, strings.Join(r.Strangers, "\n")))
	}
	if r.Flushes == 0 {
		errs = append(errs, errors.New("nothing was flushed"))
	}
	if r.Healer == byCanaryd && r.Services.Open+r.HostPorts.Open > 0 {
		errs = append(errs, fmt.Errorf("after %d flushes no pod answered any more", r.Services.Open+r.HostPorts.Open))
	}
	return errors.Join(append(errs, r.viewErr())...)
}

// report writes a table in Markdown. Its gaps are of flushes that made connections fail, and
// that the healer repaired.
func report(w io.Writer, results []result) {
	fmt.Fprintln(w, "\n| healer | backend | target | connections | rate reached | flushes | with failures | never healed | failed | gap p50 | gap p99 | longest | p99 behind the flush | wrong | processor |")
	fmt.Fprintln(w, "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
	for _, r := range results {
		for _, part := range []struct {
			name string
			side side
		}{{"cluster IPs", r.Services}, {fmt.Sprintf("%d host ports", cluster.HostPorts), r.HostPorts}} {
			s := part.side
			fmt.Fprintf(w, "| %s | %s | %s | %d | %.0f/s | %d | %d | %d | %d | %s | %s | %s | %s | %d | %.1f %% |\n",
				r.Healer, r.Backend, part.name, r.Connections/2, r.Rate/2, r.Flushes, len(s.Gaps)+s.Open, s.Open, s.Failed,
				milliseconds(quantile(s.Gaps, 0.5)), milliseconds(quantile(s.Gaps, 0.99)), milliseconds(quantile(s.Gaps, 1)),
				milliseconds(quantile(s.Afters, 0.99)), r.Wrong, 100*r.Processor)
		}
	}
	fmt.Fprintln(w, "\n| healer | backend | flush | flushes | never healed | failed to cluster IPs | longest gap | longest behind the flush |\n|---|---|---|---|---|---|---|---|")
	for _, r := range results {
		for _, kind := range slices.Sorted(maps.Keys(r.ByKind)) {
			k := r.ByKind[kind]
			fmt.Fprintf(w, "| %s | %s | %s | %d | %d | %d | %s | %s |\n", r.Healer, r.Backend, kind, k.Flushes, k.Open, k.Failed, milliseconds(k.Longest), milliseconds(k.After))
		}
	}
	fmt.Fprintln(w)
	for _, r := range results {
		fmt.Fprintf(w, "%s on %s: %d times two services changed their pods; %d connections failed before the first flush; %d were due and not opened.\n",
			r.Healer, r.Backend, r.Changes, r.Calm, r.Skipped)
	}
}

func milliseconds(d time.Duration) string { return fmt.Sprintf("%.0f ms", d.Seconds()*1000) }
