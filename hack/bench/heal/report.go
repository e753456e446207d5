package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"github.com/canaryd/canaryd/hack/bench/internal/measure"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// A title describes a measurement.
type title struct {
	what  string
	text  string
	short string // its text in the tables of docs/measured.md that also cover native tables
	tool  bool   // it belongs to no backend, like those of generation
	costs bool   // docs/measured.md has its processor time and memory
}

func titles() []title {
	return []title{
		{what: healRun, text: "heal: flush's end to proof, without the settle time", costs: true},
		{what: inForceRun, text: "flush's end to rules in force, with the settle time"},
		{what: kernelRun, text: "the kernel, for canaryd's transactions", short: "the kernel, for the same transactions"},
		{what: proofRun, text: "the proof"},
		{what: noticeRun, text: "flush's end to loss noticed"},
		{what: replayRun, text: "replay: guarded read, write, proof"},
		{what: busyHealRun, text: "heal right after 60 changes in 3 s"},
		{what: bareRun, text: "iptables-restore --noflush by hand", short: "iptables-restore --noflush, or nft -f, by hand", costs: true},
		{what: replaceRun, text: "iptables-restore by hand, others' rules lost"},
		{what: pollRun, text: "poll every 30 s, then iptables-restore --noflush"},
		{what: restingRun, text: "canaryd at rest for 1 s", costs: true},
		{what: firstRead, text: "first capture"},
		{what: fullRead, text: "capture after everything was rewritten"},
		{what: oneRead, text: "capture after one endpoint was replaced"},
		{what: learnedRun, text: "endpoint replaced to known to the daemon"},
		{what: rushRun, text: "longest without a new generation, at 20 commits a second"},
		{what: fullExamine, text: "examination after everything was rewritten"},
		{what: oneExamine, text: "examination after one endpoint was replaced"},
		{what: decodeRun, text: "manifest: YAML to objects", tool: true},
		{what: generateRun, text: "manifest: objects to rules", tool: true},
		{what: declareRun, text: "manifest: one endpoint changed to declared", tool: true},
	}
}

// inBrief is the title's text in the tables of docs/measured.md.
func (t title) inBrief() string { return cmp.Or(t.short, t.text) }

// A report has all measurements, in the form of its JSON.
type report struct {
	Machine     string   `json:"machine"`
	Repetitions int      `json:"repetitions"`
	Series      []series `json:"series"`
	Targets     []target `json:"targets"`

	sizes    []int
	backends []iptables.Backend
	uses     map[key][]measure.Use
}

// A key names a series of measurements. backend is empty if they belong to no backend.
type key struct {
	backend  string
	services int
	what     string
}

// A series has all measurements of one title.
type series struct {
	Backend       string          `json:"backend,omitempty"`
	Services      int             `json:"services"`
	Name          string          `json:"name"`
	What          string          `json:"what"`
	Seconds       measure.Summary `json:"seconds"`
	UserSeconds   measure.Summary `json:"userSeconds"`
	SystemSeconds measure.Summary `json:"systemSeconds"`
	MiB           measure.Summary `json:"mebibytes"`
	Exponent      float64         `json:"exponent,omitempty"` // growth from 1,000 to 5,000 services
}

func newReport(c config) *report {
	return &report{Repetitions: c.repetitions, sizes: c.sizes, backends: c.backends, uses: map[key][]measure.Use{}}
}

// add adds one repetition's measurements, and computes the summaries again.
func (r *report) add(backend string, services int, uses Uses) {
	for what, use := range uses {
		k := key{backend, services, what}
		r.uses[k] = append(r.uses[k], use)
	}
	r.Series = nil
	for _, b := range append([]iptables.Backend{""}, r.backends...) {
		for _, t := range titles() {
			for _, n := range r.sizes {
				if all := r.uses[key{string(b), n, t.what}]; len(all) > 0 {
					r.Series = append(r.Series, r.series(string(b), n, t))
				}
			}
		}
	}
	r.Targets = r.targets()
}

func (r *report) series(backend string, services int, t title) series {
	k := key{backend, services, t.what}
	s := series{
		Backend: backend, Services: services, Name: t.what, What: t.textOf(backend),
		Seconds:       r.of(k, seconds),
		UserSeconds:   r.of(k, func(u measure.Use) float64 { return u.UserSeconds }),
		SystemSeconds: r.of(k, func(u measure.Use) float64 { return u.SystemSeconds }),
		MiB:           r.of(k, func(u measure.Use) float64 { return u.MiB }),
	}
	if e := r.exponent(backend, t.what); services == 5000 && !math.IsNaN(e) {
		s.Exponent = e
	}
	return s
}

func (r *report) of(k key, pick func(measure.Use) float64) measure.Summary {
	var values []float64
	for _, u := range r.uses[k] {
		values = append(values, pick(u))
	}
	return measure.Summarize(values...)
}

func (r *report) seconds(backend string, services int, what string) measure.Summary {
	return r.of(key{backend, services, what}, seconds)
}

func (r *report) exponent(backend, what string) float64 {
	return measure.Exponent(r.seconds(backend, 1000, what), r.seconds(backend, 5000, what), 5)
}

// write writes the report for people: tables in Markdown, and the targets. The first three
// tables are those of docs/measured.md.
func (r *report) write(w io.Writer) error {
	if err := r.brief(w); err != nil {
		return err
	}
	head := []string{"backend", "what"}
	for _, n := range r.sizes {
		head = append(head, fmt.Sprintf("%d services", n))
	}
	largest := r.sizes[len(r.sizes)-1]
	table := measure.NewTable(append(head, "growth", fmt.Sprintf("CPU s at %d: user + system", largest), "MiB")...)
	for _, b := range append(r.backends, "") {
		for _, t := range titles() {
			if t.tool != (b == "") || b == ofNative && nativeTitles()[t.what] == "" {
				continue
			}
			row := []string{strings.TrimSpace(string(b)), t.textOf(string(b))}
			for _, n := range r.sizes {
				row = append(row, r.seconds(string(b), n, t.what).Spread())
			}
			growth := "-"
			if e := r.exponent(string(b), t.what); !math.IsNaN(e) && t.what != restingRun && t.what != pollRun {
				growth = fmt.Sprintf("%.2f", e)
			}
			s := r.series(string(b), largest, t)
			table.Row(append(row, growth, s.processor(), s.memory())...)
		}
	}
	if _, err := table.WriteTo(w); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\n%s; %d repetitions; medians (least - most). Growth: k when what takes t at 1,000 services takes t × 5^k at 5,000.\n\n",
		r.Machine, r.Repetitions)
	if err != nil {
		return err
	}
	for _, t := range r.Targets {
		if _, err := fmt.Fprintln(w, t); err != nil {
			return err
		}
	}
	return nil
}

// brief writes the tables of docs/measured.md. One has medians of times with a column for each
// backend and size. The second has the same for titles without a backend, and the third has
// some costs at the largest size.
func (r *report) brief(w io.Writer) error {
	largest := r.sizes[len(r.sizes)-1]
	head, toolHead, costHead := []string{"ms, of services"}, []string{"ms, of services"}, []string{fmt.Sprintf("at %d services", largest)}
	for _, b := range r.backends {
		for _, n := range r.sizes {
			head = append(head, fmt.Sprintf("%s, %d", b, n))
		}
		costHead = append(costHead, fmt.Sprintf("%s: CPU s", b), "MiB")
	}
	for _, n := range r.sizes {
		toolHead = append(toolHead, strconv.Itoa(n))
	}
	times, tools, costs := measure.NewTable(head...), measure.NewTable(toolHead...), measure.NewTable(costHead...)
	for _, t := range titles() {
		row, cost := []string{t.inBrief()}, []string{t.inBrief()}
		backends := r.backends
		if t.tool {
			backends = []iptables.Backend{""}
		}
		for _, b := range backends {
			for _, n := range r.sizes {
				row = append(row, milliseconds(r.seconds(string(b), n, t.what)))
			}
			s := r.series(string(b), largest, t)
			cost = append(cost, s.allProcessor(), s.memory())
		}
		switch {
		case t.tool:
			tools.Row(row...)
		case t.what != restingRun: // that takes a second
			times.Row(row...)
		}
		if t.costs {
			costs.Row(cost...)
		}
	}
	for _, table := range []*measure.Table{times, tools, costs} {
		if _, err := table.WriteTo(w); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(w); err != nil {
			return err
		}
	}
	return nil
}

// milliseconds returns a median with three digits.
func milliseconds(s measure.Summary) string {
	switch ms := 1000 * s.Median; {
	case s.Count == 0:
		return "-"
	case ms == 0:
		return "0"
	case ms < 1000:
		return fmt.Sprintf("%.3g", ms)
	default:
		unit := math.Pow10(int(math.Log10(ms)) - 2)
		return fmt.Sprintf("%.0f", math.Round(ms/unit)*unit)
	}
}

func (s series) processor() string {
	if s.UserSeconds.Median+s.SystemSeconds.Median <= 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f + %.2f", s.UserSeconds.Median, s.SystemSeconds.Median)
}

func (s series) allProcessor() string {
	if s.UserSeconds.Median+s.SystemSeconds.Median <= 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", s.UserSeconds.Median+s.SystemSeconds.Median)
}

func (s series) memory() string {
	if s.MiB.Median <= 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f", s.MiB.Median)
}
