package flushes

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
)

// A process that flushes the same tables again and again would push all other flushes out of the
// history. So the first FoldFrom such flushes have records, and those that follow are counted in
// the newest of these, for as long as no more than FoldWithin passes between two.
const (
	FoldFrom   = 10
	FoldWithin = time.Minute
)

// fewChains is of how many chains at most the names count in a likeness. Of a whole table they
// change with each service.
const fewChains = 3

// likeness names the flushes that fold: those of the same tables, kinds and process, and of the
// same chains where a table lost few. A process that is executed for each flush has another pid
// each time.
func likeness(f api.Flush) string {
	var b strings.Builder
	for _, t := range f.TablesHit() {
		fmt.Fprintf(&b, "%s %s %s\n", t.Family, t.Table, t.Kind)
		if len(t.PerChain) <= fewChains {
			var names []string
			for _, c := range t.PerChain {
				names = append(names, c.Chain)
			}
			fmt.Fprintln(&b, slices.Sorted(slices.Values(names)))
		}
	}
	for _, l := range f.Native {
		fmt.Fprintf(&b, "%s %s\n", l.Table, l.Kind)
	}
	fmt.Fprintf(&b, "%q %q %q", f.Culprit.Comm, f.Culprit.Unit, f.Culprit.ContainerID)
	return b.String()
}

// FoldsInto returns the record in which a flush is counted; nil: it has a record of its own, as one
// that lasted long always has. Records of an earlier run, of drills and of requests count nothing.
func (h History) FoldsInto(f api.Flush) *api.Flush {
	if f.Drill != "" || f.Requested() || len(f.Lost.Tables)+len(f.Native) == 0 || api.Seconds(f.AbsentSeconds) >= api.LastsLong {
		return nil
	}
	like, alike, into := likeness(f), 0, -1
	for i := range h {
		r := &h[i]
		if r.Earlier || r.Drill != "" || f.Time.Sub(r.Latest()) > FoldWithin || likeness(*r) != like {
			continue
		}
		if alike++; into < 0 || r.Repeated != nil {
			into = i
		}
	}
	if into < 0 || alike < FoldFrom && h[into].Repeated == nil {
		return nil
	}
	return &h[into]
}

// Counting returns the index of the record in which the flush of that ID is counted, or -1: the log
// has IDs of flushes that have no record of their own.
func (h History) Counting(id string) int {
	at, err := strconv.ParseInt(id, 16, 64)
	if err != nil || len(id) < flushIDLength {
		return -1
	}
	return slices.IndexFunc(h, func(f api.Flush) bool {
		return f.Repeated != nil && at > f.Time.UnixMicro() && at <= f.Repeated.Last.UnixMicro()
	})
}
