package daemon

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/severity"
)

// A process that flushes the same tables again and again would push all other flushes out of the
// history. So the first foldFrom such flushes have records, and those that follow are counted in
// the newest of these, for as long as no more than foldWithin passes between two.
const (
	foldFrom   = 10
	foldWithin = time.Minute
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

// foldsInto returns the record in which a flush is counted; nil: it has a record of its own, as one
// that lasted long always has. Records of an earlier run, of drills and of requests count nothing.
func (st *state) foldsInto(f api.Flush) *api.Flush {
	if f.Drill != "" || f.Requested() || len(f.Lost.Tables)+len(f.Native) == 0 || api.Seconds(f.AbsentSeconds) >= api.LastsLong {
		return nil
	}
	like, alike, into := likeness(f), 0, -1
	for i := range st.journal {
		r := &st.journal[i]
		if r.Earlier || r.Drill != "" || f.Time.Sub(r.Latest()) > foldWithin || likeness(*r) != like {
			continue
		}
		if alike++; into < 0 || r.Repeated != nil {
			into = i
		}
	}
	if into < 0 || alike < foldFrom && st.journal[into].Repeated == nil {
		return nil
	}
	return &st.journal[into]
}

// keepRecord keeps a finished record, unless it is counted in another one. open: the journal has it
// as an open one, which the next run would go on with.
func (d *Daemon) keepRecord(ctx context.Context, st *state, record api.Flush, open bool, write func()) {
	into := st.foldsInto(record)
	if open || into == nil || into.Outcome != record.Outcome {
		st.remember(record)
		write()
		return
	}
	if into.Repeated == nil {
		severity.Warnings(klog.FromContext(ctx)).Info("The same process flushes the same tables again and again; further flushes are counted in one record",
			"flush", into.ID, "by", culpritsText(record))
	}
	next := api.Repeated{Times: 1, Last: record.Time, MostAbsentSeconds: record.AbsentSeconds}
	if r := into.Repeated; r != nil {
		next.Times, next.MostAbsentSeconds = r.Times+1, max(r.MostAbsentSeconds, next.MostAbsentSeconds)
	}
	into.Repeated = &next
	if !slices.Contains(st.disk.folded, into.ID) {
		st.disk.folded = append(st.disk.folded, into.ID)
	}
}

// countsFlush returns the index of the record in which the flush of that ID is counted, or -1: the
// log has IDs of flushes that have no record of their own.
func countsFlush(list []api.Flush, id string) int {
	at, err := strconv.ParseInt(id, 16, 64)
	if err != nil || len(id) < flushIDLength {
		return -1
	}
	return slices.IndexFunc(list, func(f api.Flush) bool {
		return f.Repeated != nil && at > f.Time.UnixMicro() && at <= f.Repeated.Last.UnixMicro()
	})
}

// writeFolded writes the records in which flushes were counted since they were written.
func (d *Daemon) writeFolded(ctx context.Context, st *state) {
	for _, id := range st.disk.folded {
		if i := find(st.journal, id); i >= 0 {
			d.write(ctx, st.journal[i], nil)
		}
	}
	st.disk.folded = nil
}

// comingsLogged is how many lines a minute the log has of tables that come and go: a program may
// make and delete one 100 times a second.
const comingsLogged = 40

// comings counts these lines.
type comings struct {
	since time.Time
	lines int
}

// log returns the log for one more line.
func (c *comings) log(ctx context.Context) klog.Logger {
	log, now := klog.FromContext(ctx), time.Now()
	if now.Sub(c.since) > time.Minute {
		*c = comings{since: now}
	}
	switch c.lines++; {
	case c.lines == comingsLogged:
		log.Info("Native tables come and go too often for a line each; the others of this minute have theirs with -v=2")
		return log.V(2)
	case c.lines > comingsLogged:
		return log.V(2)
	}
	return log
}
