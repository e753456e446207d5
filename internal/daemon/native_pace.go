package daemon

import (
	"time"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A nativePace keeps reads of native tables within a tenth of a core. A read that a possible flush
// asks for does not wait for what owners made canaryd read: within half a second of a first read
// of 100 services a flush of the table was noticed after 150 to 700 ms (Linux 6.18).
//
// What owners do may look like a flush too. So such reads have a tenth of a core of their own,
// which the first one after a quiet time may overdraw: the next begins at once too.
type nativePace struct {
	ready time.Time // not before: reads of what owners changed
	// quiet is from when on reads for alarms have cost no more than a tenth of a core, and last
	// what the last one adds to it.
	quiet time.Time
	last  time.Duration
	again time.Time // not before: any read; the last one failed
}

// alarmAt returns when a read that a possible flush asks for may begin.
func (p *nativePace) alarmAt() time.Time { return p.quiet.Add(-p.last) }

// allows reports whether a changed table may be read now. Of one that is gone there is nothing to
// read.
func (p *nativePace) allows(t *nativeTable, now time.Time) bool {
	switch {
	case t.dirty.IsZero() || now.Before(p.again):
		return false
	case t.gone():
		return true
	}
	return t.urgent && !now.Before(p.alarmAt()) || !now.Before(p.ready)
}

// spend notes a read that showed no loss. alarm: a possible flush asked for it.
func (p *nativePace) spend(end time.Time, took time.Duration, alarm bool) {
	p.ready = end.Add(readShare * took)
	if alarm {
		p.last = readShare * took
		p.quiet = pace.Latest(p.quiet, end).Add(p.last)
	}
}

// interrupted has reads wait for a busy writer, but for those of tables that are gone.
func (p *nativePace) interrupted(now time.Time) {
	p.ready = now.Add(pace.FirstTry)
	p.quiet, p.last = pace.Latest(p.quiet, p.ready), 0
}

// alarmed reports whether a possible flush asks for a read of the wanted tables. Of tables that are
// gone nothing is read.
func (r *nativeRealm) alarmed(wanted func(tableid.TableID) bool) bool {
	for id, t := range r.tables {
		if t.urgent && !t.gone() && wanted(id) {
			return true
		}
	}
	return false
}
