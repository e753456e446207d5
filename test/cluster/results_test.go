//go:build cluster

package cluster

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
)

const page = "../../docs/measured.md"

// Results has the results of one run.
type results struct {
	versions []string
	steps    []string // with durations
	accepted int      // manifests
	rules    int      // rules that canaryd protects
	rows     []row
}

// A row has the observations of one flush.
type row struct {
	flush   string
	seen    seen
	records []scenario.Record
}

// step notes the duration of a step.
func (r *results) step(what string, took time.Duration) {
	r.steps = append(r.steps, fmt.Sprintf("%s %s", what, took.Round(100*time.Millisecond)))
}

// publish prints the results, and with -update writes them into the document.
func (n *node) publish() {
	n.Helper()
	text := n.results.text()
	n.Logf("on iptables-%s:\n%s", n.backend, text)
	if !golden.Update() {
		return
	}
	old, err := os.ReadFile(page)
	n.must(err)
	begin := fmt.Sprintf("<!-- %s: make cluster writes it -->\n", n.backend)
	end := fmt.Sprintf("<!-- end of %s -->\n", n.backend)
	head, rest, found := strings.Cut(string(old), begin)
	_, tail, foundEnd := strings.Cut(rest, end)
	if !found || !foundEnd {
		n.Fatalf("%s has no place for the results", page)
	}
	n.must(os.WriteFile(page, []byte(head+begin+text+end+tail), 0o644))
}

func (r *results) text() string {
	var b strings.Builder
	b.WriteString(wrapped(fmt.Sprintf("%s. canaryd protects %d rules. The API server accepted %d sets of manifests.",
		strings.Join(r.versions, ", "), r.rules, r.accepted)))
	b.WriteString("\n\n" + wrapped("Took: "+strings.Join(r.steps, "; ")+".") + "\n\n")
	b.WriteString("| flush | records | absent, s | longest gap, s | failed |\n|---|---|---|---|---|\n")
	var records []scenario.Record
	var resets []string
	for _, row := range r.rows {
		b.WriteString(row.text())
		records = append(records, row.records...)
		if len(row.seen.reset) > 0 {
			resets = append(resets, fmt.Sprintf("`%s` %s", row.flush, strings.Join(row.seen.reset, ", ")))
		}
	}
	if len(resets) == 0 {
		resets = []string{"none"}
	}
	b.WriteString("\n" + wrapped(fmt.Sprintf("Flushers that the records name: %s. Connections that a flush reset: %s.",
		named(records), strings.Join(resets, "; "))) + "\n")
	return b.String()
}

func (r row) text() string {
	var absent float64
	for _, record := range r.records {
		absent += record.AbsentSeconds
	}
	var longest time.Duration
	for _, gap := range r.seen.gaps {
		longest = max(longest, gap)
	}
	return fmt.Sprintf("| `%s` | %s | %.2f | %s | %d/%d |\n", r.flush, countText(r.records), absent,
		span(longest), r.seen.failed, r.seen.asked)
}

func span(gap time.Duration) string {
	if gap == 0 {
		return "none"
	}
	return fmt.Sprintf("%.2f", gap.Seconds())
}

// wrapped breaks a paragraph into lines of at most 100 columns.
func wrapped(text string) string {
	var b strings.Builder
	column := 0
	for i, word := range strings.Fields(text) {
		switch {
		case i > 0 && column+1+len(word) > 100:
			b.WriteString("\n")
			column = 0
		case i > 0:
			b.WriteString(" ")
			column++
		}
		b.WriteString(word)
		column += len(word)
	}
	return b.String()
}

// countText returns the number of records, and the number of raced ones. Raced means that
// another process wrote during the replay, which is proved anyway.
func countText(records []scenario.Record) string {
	raced := 0
	for _, r := range records {
		if r.Outcome == "raced" {
			raced++
		}
	}
	if raced == 0 {
		return fmt.Sprint(len(records))
	}
	return fmt.Sprintf("%d, %d raced", len(records), raced)
}
