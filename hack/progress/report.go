package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	module = "github.com/canaryd/canaryd/"
	// These are the times between two lines, on a normal output and on a terminal that rewrites
	// them.
	every, rewritten = 10 * time.Second, time.Second
)

// A report prints the progress of go test.
type report struct {
	mu    sync.Mutex
	out   io.Writer
	width int // columns of a terminal, or 0
	all   plan
	began time.Time
	// of all runs of go test
	packages, tests                   int
	passed, failed, skipped, leftOver int
	failures                          []string
	reasons                           map[string]map[string]int // by reason, then package: how many tests are skipped
	processor                         time.Duration
	running                           map[string]*runningPackage
	drawn                             bool // a line must be rewritten
}

// A runningPackage is a package whose tests run now.
type runningPackage struct {
	tests, failed int
	since         map[string]time.Time // the start of each running test
	output        map[string][]string  // by test; the key "" is for the package itself
}

// An event is a line of go test -json.
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

func (e event) took() string { return duration(time.Duration(e.Elapsed * float64(time.Second))) }

func newReport(out io.Writer, width int, all plan) *report {
	return &report{
		out: out, width: width, all: all, began: time.Now(),
		reasons: map[string]map[string]int{}, running: map[string]*runningPackage{},
	}
}

// tick prints a line of progress, again and again until the context ends.
func (r *report) tick(ctx context.Context) {
	interval := every
	if r.width > 0 {
		interval = rewritten
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			r.mu.Lock()
			r.progress()
			r.mu.Unlock()
		}
	}
}

func (r *report) progress() {
	line := r.line()
	if r.width == 0 {
		fmt.Fprintln(r.out, line)
		return
	}
	if columns := []rune(line); len(columns) >= r.width {
		line = string(columns[:r.width-1])
	}
	fmt.Fprint(r.out, "\r\x1b[K"+line)
	r.drawn = true
}

func (r *report) line() string {
	return fmt.Sprintf("%6s  %s packages, %s tests, %d failed; %s",
		duration(time.Since(r.began)), ofAll(r.packages, r.all.packages), ofAll(r.tests, r.all.tests), r.failed, r.now())
}

func ofAll(n, all int) string {
	if all < n || all == 0 {
		return number(n)
	}
	return number(n) + " of " + number(all)
}

// now names each running package, with its longest running test.
func (r *report) now() string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(r.running)) {
		test, since := "", time.Time{}
		for _, candidate := range slices.Sorted(maps.Keys(r.running[name].since)) {
			if start := r.running[name].since[candidate]; counted(candidate) && (test == "" || start.Before(since)) {
				test, since = candidate, start
			}
		}
		if test == "" {
			parts = append(parts, name)
			continue
		}
		parts = append(parts, fmt.Sprintf("%s %s %s", name, test, duration(time.Since(since))))
	}
	if len(parts) == 0 {
		return "building"
	}
	return "now " + strings.Join(parts, ", ")
}

// print prints a line that stays.
func (r *report) print(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.printf("%s\n", text)
}

func (r *report) printf(format string, args ...any) {
	if r.drawn {
		fmt.Fprint(r.out, "\r\x1b[K")
		r.drawn = false
	}
	fmt.Fprintf(r.out, format, args...)
}

// used adds the processor time of a run, including all programs that it started.
func (r *report) used(processor time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.processor += processor
}

// read reads the output of go test -json to its end.
func (r *report) read(from io.Reader) error {
	for lines := bufio.NewReader(from); ; {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			r.event(line)
		}
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("reading the output of go test: %w", err)
		}
	}
}

// event processes a line of go test -json. Any other line is printed unchanged.
func (r *report) event(line []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var e event
	if err := json.Unmarshal(line, &e); err != nil {
		r.printf("%s", line)
		return
	}
	if e.Package == "" {
		r.printf("%s", e.Output) // from the compiler or from vet
		return
	}
	name := short(e.Package)
	p := r.running[name]
	if p == nil {
		p = &runningPackage{since: map[string]time.Time{}, output: map[string][]string{}}
		r.running[name] = p
	}
	if e.Action == "output" {
		p.output[e.Test] = append(p.output[e.Test], e.Output)
		return
	}
	if e.Test != "" {
		r.testEvent(name, p, e)
		return
	}
	r.packageEvent(name, p, e)
}

func (r *report) packageEvent(name string, p *runningPackage, e event) {
	if !ends(e.Action) {
		return
	}
	// If the process ends in the middle of its tests, they have no end of their own.
	for _, test := range slices.Backward(slices.Sorted(maps.Keys(p.since))) {
		if e.Action == "fail" {
			r.failed++
			p.failed++
			r.testFailed(name, p, test, "it did not end")
		}
	}
	delete(r.running, name)
	if p.tests > 0 || e.Action == "fail" {
		r.packages++
	}
	switch {
	case e.Action == "fail":
		r.printf("FAILED %s (%s)\n%s", name, e.took(), said(p.output[""]))
		if p.failed == 0 {
			// It fails outside of its tests: its build fails, or its process ends.
			r.failed++
			r.failures = append(r.failures, name)
		}
	case p.tests > 0:
		r.printf("passed %s (%s, %s)\n", name, e.took(), counts(p.tests, "test"))
	}
}

func ends(action string) bool { return action == "pass" || action == "fail" || action == "skip" }

func (r *report) testEvent(name string, p *runningPackage, e event) {
	switch e.Action {
	case "run", "cont":
		p.since[e.Test] = time.Now()
		return
	case "pause":
		delete(p.since, e.Test)
		return
	case "pass":
		r.passed++
	case "fail":
		r.failed++
		p.failed++
		r.testFailed(name, p, e.Test, e.took())
	case "skip":
		r.testSkipped(name, reason(p.output[e.Test]))
	default:
		return
	}
	p.tests++
	if counted(e.Test) {
		r.tests++
	}
	delete(p.since, e.Test)
	delete(p.output, e.Test)
}

func (r *report) testFailed(name string, p *runningPackage, test, how string) {
	full := name + " " + test
	output := said(p.output[test])
	inner := slices.ContainsFunc(r.failures, func(f string) bool { return strings.HasPrefix(f, full+"/") })
	if inner && output == "" {
		return // its subtest is listed
	}
	r.failures = append(r.failures, full)
	r.printf("FAILED %s (%s)\n%s", full, how, output)
}

// leftTo begins the reason of a test that another level runs, which is no failure in CI.
const leftTo = "left to "

func (r *report) testSkipped(name, why string) {
	if strings.HasPrefix(why, leftTo) {
		r.leftOver++
	} else {
		r.skipped++
	}
	if r.reasons[why] == nil {
		r.reasons[why] = map[string]int{}
	}
	r.reasons[why][name]++
}

var reasonBegins = regexp.MustCompile(`SKIPPED: (.*)|(left to make .*)`)

// reason returns the reason of a skipped test. A test in a namespace has it in the log of a
// process of its own.
func reason(lines []string) string {
	text := said(lines)
	if found := reasonBegins.FindStringSubmatch(text); found != nil {
		return found[1] + found[2]
	}
	// file_test.go:12: no moon tonight
	first, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	if _, words, found := strings.Cut(first, ": "); found {
		return words
	}
	return "without a reason"
}

// framing matches lines of the testing package without news.
var framing = regexp.MustCompile(`^\s*(=== (RUN|PAUSE|CONT|NAME) |--- (FAIL|PASS|SKIP): |(PASS|FAIL)$|(FAIL|ok)\s*\t|exit status \d+$|$)`)

// said returns the lines that a test wrote.
func said(lines []string) string {
	var out strings.Builder
	for _, line := range lines {
		if !framing.MatchString(strings.TrimRight(line, "\n")) {
			out.WriteString(line)
		}
	}
	return out.String()
}

// end prints the last lines, and returns the exit code.
func (r *report) end(ci bool) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	status := 0
	if len(r.failures) > 0 {
		status = 1
		r.printf("\nfailed:\n")
		for _, name := range r.failures {
			r.printf("  %s\n", name)
		}
	}
	if len(r.reasons) > 0 {
		r.printf("\nnot run:\n")
	}
	for _, why := range slices.Sorted(maps.Keys(r.reasons)) {
		total := 0
		var where []string
		for _, name := range slices.Sorted(maps.Keys(r.reasons[why])) {
			n := r.reasons[why][name]
			total += n
			where = append(where, fmt.Sprintf("%s %d", name, n))
		}
		r.printf("  %s: %s (%s)\n", counts(total, "test"), why, strings.Join(where, ", "))
	}
	if ci && r.skipped > 0 {
		status = 1
		r.printf("CI=true: %s not run as listed above: in CI that is a failure\n", counts(r.skipped, "test"))
	}
	left := ""
	if r.leftOver > 0 {
		left = fmt.Sprintf(", %s left to other levels", number(r.leftOver))
	}
	r.printf("%s passed, %d failed, %d skipped%s; %s in %s, %s of processor\n", number(r.passed), r.failed, r.skipped, left,
		counts(r.packages, "package"), duration(time.Since(r.began)), duration(r.processor))
	return status
}

func short(name string) string { return strings.TrimPrefix(name, module) }

func counts(n int, of string) string {
	if n == 1 {
		return "1 " + of
	}
	return number(n) + " " + of + "s"
}

// number writes 9692 as 9,692.
func number(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", number(n/1000), n%1000)
}

// duration writes tenths of a short time.
func duration(d time.Duration) string {
	if d < 10*time.Second {
		return fmt.Sprintf("%.1fs", d.Seconds())
	}
	return d.Round(time.Second).String()
}
