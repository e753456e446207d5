package daemon

import (
	"time"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A nativePace keeps reads of native tables within a tenth of a core. A read after a possible
// flush does not wait because of reads after owners' changes. With that wait, a flush within
// half a second of a table's first read was noticed after 150 to 700 ms (100 services, Linux
// 6.18).
//
// An owner's change may look like a flush, too. So reads after possible flushes have a tenth of
// a core of their own. The first one after a quiet time may overdraw it: the next begins at
// once, too.
type nativePace struct {
	ready time.Time // not before: reads after owners' changes
	// quiet is from when on reads after possible flushes have cost no more than a tenth of a
	// core. last is the part of it that the last such read added.
	quiet time.Time
	last  time.Duration
	again time.Time // not before: any read; the last one failed
}

// alarmAt returns when a read after a possible flush may begin.
func (p *nativePace) alarmAt() time.Time { return p.quiet.Add(-p.last) }

// allows reports whether readNative may read a changed table now. A table that is gone needs no
// read.
func (p *nativePace) allows(t *nativeTable, now time.Time) bool {
	switch {
	case !t.due() || now.Before(p.again):
		return false
	case t.gone():
		return true
	case t.out != nil:
		return !now.Before(t.countAt()) && !now.Before(p.ready)
	}
	return t.urgent && !now.Before(p.alarmAt()) || !now.Before(p.ready)
}

// spend notes a read that showed no loss, and its pause. alarm: a possible flush caused the read.
func (p *nativePace) spend(end time.Time, pause time.Duration, alarm bool) {
	p.ready = end.Add(pause)
	if alarm {
		p.last = pause
		p.quiet = pace.Latest(p.quiet, end).Add(p.last)
	}
}

// interrupted makes reads wait for a busy writer, except for tables that are gone.
func (p *nativePace) interrupted(now time.Time) {
	p.ready = now.Add(pace.FirstTry)
	p.quiet, p.last = pace.Latest(p.quiet, p.ready), 0
}

// alarmed reports whether a possible flush makes a read of the wanted tables necessary: the
// pace counts it apart. Tables that are gone need no read.
func (r *nativeRealm) alarmed(wanted func(tableid.TableID) bool) bool {
	for id, t := range r.tables {
		if t.urgent && t.out == nil && !t.gone() && wanted(id) {
			return true
		}
	}
	return false
}
