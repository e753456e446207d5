package flushes

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/watch"
)

// AddCulprit adds a process to the record's culprits, unless it is among them. SettleCulprit
// sorts them afterwards.
func AddCulprit(r *api.Flush, c api.Culprit) {
	if !slices.ContainsFunc(r.Culprits, func(known api.Culprit) bool { return known.PID == c.PID }) {
		r.Culprits = append(r.Culprits, c)
	}
}

// Accuse adds processes to the record's culprits, and returns their pids, which a table's row
// lists in By.
func Accuse(r *api.Flush, by []watch.Writer) (pids []uint32) {
	for _, w := range by {
		AddCulprit(r, api.CulpritOf(w))
		if !slices.Contains(pids, w.PID) {
			pids = append(pids, w.PID)
		}
	}
	return pids
}

// SettleCulprit sorts the culprits and makes the first one the record's. It sorts by the number
// of removed rules, then of tables, and puts the last of equal ones first. On legacy these
// numbers are unknown, and the last holder of the lock is the likeliest culprit.
func SettleCulprit(r *api.Flush) {
	tables := func(pid uint32) (n int) {
		for _, t := range r.Lost.Tables {
			if slices.Contains(t.By, pid) {
				n++
			}
		}
		for _, t := range r.Native {
			if slices.Contains(t.By, pid) {
				n++
			}
		}
		return n
	}
	r.Culprit = api.Culprit{}
	r.Culprits = slices.Clone(r.Culprits)
	sorting.Stable(r.Culprits, func(a, b api.Culprit) int {
		return cmp.Or(cmp.Compare(b.Took, a.Took), cmp.Compare(tables(b.PID), tables(a.PID)), b.Time.Compare(a.Time))
	})
	if len(r.Culprits) > 0 {
		r.Culprit = r.Culprits[0]
	}
}

// CulpritsText names the culprits for the log, with command lines, at most api.CulpritsNamed; a
// drill is named in their place.
func CulpritsText(f api.Flush) string {
	if f.Drill != "" {
		return f.ByText()
	}
	list := f.Takers()
	var words []string
	for _, c := range list[:min(len(list), api.CulpritsNamed)] {
		words = append(words, CulpritText(c))
	}
	if len(words) == 0 {
		return "unknown"
	}
	text := strings.Join(words, ", ")
	if more := len(list) - len(words); more > 0 {
		text += fmt.Sprintf(" (+%d)", more)
	}
	if f.CulpritsMissed {
		text += ", unknown"
	}
	if f.CulpritsLikely {
		text = "likely " + text
	}
	return text
}

// CulpritText names one culprit for the log, with its command line, ancestors and place;
// "unknown" without a pid.
func CulpritText(c api.Culprit) string {
	if c.PID == 0 {
		return "unknown"
	}
	text := fmt.Sprintf("pid %d", c.PID) // no more if it ended before it could be looked up
	if what := cmp.Or(c.Command, c.Comm); what != "" {
		text += " (" + what + ")"
	}
	return text + c.Line()
}
