package api

import (
	"fmt"
	"strings"
)

// summaryTables is how many tables a Summary names.
const summaryTables = 10

// Summary says in one line how the flush ended, which tables it hit, and by whom: "proved: ipv4 nat
// emptied, ip kube-proxy table_deleted; by nft (pid 3)". It has no rule and no command line: all
// users of a cluster may read it as an event.
func (f Flush) Summary() string {
	var hit []string
	for _, t := range f.Lost.Tables {
		hit = append(hit, fmt.Sprintf("%s %s %s", t.Family, t.Table, t.Kind))
	}
	for _, l := range f.Native {
		hit = append(hit, fmt.Sprintf("%s %s", l.Table, l.Kind))
	}
	more := ""
	if left := len(hit) - summaryTables; left > 0 {
		hit, more = hit[:summaryTables], fmt.Sprintf(" and %d more", left)
	}
	return fmt.Sprintf("%s: %s%s; by %s", f.Outcome, strings.Join(hit, ", "), more, f.ByText())
}
