package daemon

import (
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
)

// keepRecord keeps a finished record, unless it is counted in another one. open: the journal has it
// as an open one, which the next run would go on with.
func (d *Daemon) keepRecord(ctx context.Context, st *state, record api.Flush, open bool, write func()) {
	into := st.journal.FoldsInto(record)
	if open || into == nil || into.Outcome != record.Outcome {
		st.journal.Remember(record)
		write()
		return
	}
	if into.Repeated == nil {
		severity.Warnings(klog.FromContext(ctx)).Info("The same process flushes the same tables again and again; further flushes are counted in one record",
			"flush", into.ID, "by", flushes.CulpritsText(record))
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

// writeFolded writes the records in which flushes were counted since they were written.
func (d *Daemon) writeFolded(ctx context.Context, st *state) {
	for _, id := range st.disk.folded {
		if i := st.journal.Find(id); i >= 0 {
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
