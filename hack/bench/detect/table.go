package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/hack/bench/internal/measure"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// A Result is one row: one backend with one number of rules.
type Result struct {
	Backend iptables.Backend `json:"backend"`
	Rules   int              `json:"rules"` // protected, jumps included
	Chains  int              `json:"chains"`
	Looks   Looks            `json:"looks"`
	// Verdicts has one element for nft, and two for legacy: with the lock and without.
	Verdicts []Verdict `json:"verdicts"`
	Idle     Idle      `json:"idle"`
	// After is the daemon's memory some time after all flushes.
	After Memory `json:"after"`
}

// Ratio returns how many times cheaper a look is than executing iptables. It is the smaller one
// of the ratios of median CPU time and median wall time.
func (l Looks) Ratio(look Cost) float64 {
	return min(l.Exec.CPU.Median/look.CPU.Median, l.Exec.Wall.Median/look.Wall.Median)
}

// table returns the results as a table.
func table(all []Result) string {
	row := func(name string, cell func(Result) string) []string {
		cells := []string{name}
		for _, r := range all {
			cells = append(cells, cell(r))
		}
		return cells
	}
	w := measure.NewTable(row("", func(r Result) string { return fmt.Sprintf("%s, %d rules", r.Backend, r.Rules) })...)
	line := func(name string, cell func(Result) string) { w.Row(row(name, cell)...) }
	for _, look := range []struct {
		name string
		of   func(Looks) Cost
	}{
		{"a look at the tick", func(l Looks) Cost { return l.Tick }},
		{"a look after a hint", func(l Looks) Cost { return l.Hint }},
		{"the exec probe", func(l Looks) Cost { return l.Exec }},
	} {
		line(look.name+": wall", func(r Result) string { return look.of(r.Looks).Wall.around() })
		line(look.name+": CPU", func(r Result) string { return look.of(r.Looks).CPU.around() })
	}
	line("exec probe : look at the tick", func(r Result) string { return fmt.Sprintf("%.0f", r.Looks.Ratio(r.Looks.Tick)) })
	line("exec probe : look after a hint", func(r Result) string { return fmt.Sprintf("%.1f", r.Looks.Ratio(r.Looks.Hint)) })
	for _, from := range []string{fromCommit, fromRelease, fromProgram} {
		verdict := func(name string, of func(Verdict) float64) {
			line("verdict after "+from+": "+name, func(r Result) string {
				i := slices.IndexFunc(r.Verdicts, func(v Verdict) bool { return v.Counted == from })
				if i < 0 {
					return "-"
				}
				return fmt.Sprintf("%s of %d", duration(of(r.Verdicts[i])), r.Verdicts[i].Delay.N)
			})
		}
		verdict("p50", func(v Verdict) float64 { return v.Delay.Median })
		verdict("p99", func(v Verdict) float64 { return v.Delay.P99 })
		verdict("max", func(v Verdict) float64 { return v.Delay.Max })
		if from == fromCommit {
			verdict("p50, with the flush's own time", func(v Verdict) float64 { return v.WithFlush.Median })
			verdict("p99, with the flush's own time", func(v Verdict) float64 { return v.WithFlush.P99 })
		}
	}
	line("idle: CPU of a core", func(r Result) string { return fmt.Sprintf("%.3f %% in %.0f s", r.Idle.CPUPercent, r.Idle.Seconds) })
	line("idle: system calls a minute", func(r Result) string { return r.Idle.traced(r.Idle.SyscallsPerMinute) })
	line("idle: processes a minute", func(r Result) string { return r.Idle.traced(r.Idle.ProcessesPerMinute) })
	line("idle: children's page faults", func(r Result) string { return fmt.Sprint(r.Idle.ChildFaults) })
	line("resident memory", func(r Result) string { return fmt.Sprintf("%.1f MiB", r.Idle.RSS) })
	line("of it anonymous", func(r Result) string { return fmt.Sprintf("%.1f MiB", r.Idle.Anon) })
	line("its peak so far", func(r Result) string { return fmt.Sprintf("%.1f MiB", r.Idle.Peak) })
	line("resident a while after the flushes", func(r Result) string { return fmt.Sprintf("%.1f MiB", r.After.RSS) })
	line("its peak by then", func(r Result) string { return fmt.Sprintf("%.1f MiB", r.After.Peak) })
	line("flush records too many", func(r Result) string {
		extra := 0
		for _, v := range r.Verdicts {
			extra += v.Extra
		}
		return fmt.Sprint(extra)
	})
	var b strings.Builder
	_, _ = w.WriteTo(&b) // a strings.Builder takes everything
	return b.String()
}

// around returns the median, and the 10th and 90th percentiles.
func (s Spread) around() string {
	return fmt.Sprintf("%s (%s - %s)", duration(s.Median), duration(s.P10), duration(s.P90))
}

func duration(us float64) string { return measure.Duration(us / 1e6) }

func (i Idle) traced(rate float64) string {
	if i.Traced == 0 {
		return "no strace"
	}
	return fmt.Sprintf("%.0f", rate)
}
