package daemon

import (
	"time"

	"github.com/canaryd/canaryd/internal/pace"
)

// A gate is what the loop knows of the gate of one copy of the standby's.
type gate struct {
	opened time.Time // zero: the gate is shut
	flush  string    // for which it was opened or tried last
	until  time.Time // until when it may be open for that one; zero: it could not be opened
	// total is how long it was open for that flush, as often as it was shut.
	total time.Duration
	// barred are the hooks of which the log has why they stay shut in that flush.
	barred map[string]bool
	// waits: it was open and had to be shut for what another owner wrote in that flush. It may
	// open again when a process writes to nat.
	waits bool
	ajar  pace.Trouble // why the gate could not be moved
}

// isOpen reports whether the gate is open.
func (g *gate) isOpen() bool { return !g.opened.IsZero() }

// mayOpen reports whether the gate was not tried yet for that flush, or was not open for too long
// and does not wait for a write.
func (g *gate) mayOpen(flush string) bool {
	return g.flush != flush || !g.waits && time.Now().Before(g.until)
}

// spent reports whether the gate was open for that flush for as long as it may be.
func (g *gate) spent(flush string) bool {
	return g.flush == flush && !g.until.IsZero() && !time.Now().Before(g.until)
}

// try notes that the gate is being opened for a flush.
func (g *gate) try(flush string) {
	if g.flush != flush {
		g.flush, g.until, g.total, g.barred, g.waits = flush, time.Time{}, 0, nil, false
	}
}

// open notes that the gate is open now.
func (g *gate) open(now time.Time) {
	g.opened, g.waits = now, false
	if g.until.IsZero() {
		g.until = now.Add(standbyMost)
	}
}

// dueShut returns when an open gate is shut: as soon as it is not wanted open any more. made is a
// time that has passed.
func (g *gate) dueShut(wanted bool, made time.Time) time.Time {
	if !g.isOpen() {
		return time.Time{}
	}
	if !wanted {
		return made
	}
	return g.until
}

// bars notes that a hook stays shut in the flush, and reports whether the log is to have it.
func (g *gate) bars(hook string) bool {
	if g.barred[hook] {
		return false
	}
	if g.barred == nil {
		g.barred = map[string]bool{}
	}
	g.barred[hook] = true
	return true
}

// shut notes that the gate is shut since at, and returns for how long it was open.
func (g *gate) shut(at time.Time) (open time.Duration) {
	g.ajar.Over()
	open = at.Sub(g.opened)
	g.opened, g.total = time.Time{}, g.total+open
	return open
}
