package copies

import (
	"time"

	"github.com/canaryd/canaryd/internal/pace"
)

// A Gate is what the loop knows of the gate of one copy of the standby's.
type Gate struct {
	Opened time.Time // zero: the gate is shut
	Flush  string    // for which it was opened or tried last
	Until  time.Time // until when it may be open for that one; zero: it could not be opened
	// Total is how long it was open for that flush, as often as it was shut.
	Total time.Duration
	// barred are the hooks of which the log has why they stay shut in that flush.
	barred map[string]bool
	// waits: it was open and had to be shut for what another owner wrote in that flush. It may
	// open again when a process writes to nat.
	Waits   bool
	Trouble pace.Trouble // why the gate could not be moved
}

// IsOpen reports whether the gate is open.
func (g *Gate) IsOpen() bool { return !g.Opened.IsZero() }

// MayOpen reports whether the gate was not tried yet for that flush, or was not open for too long
// and does not wait for a write.
func (g *Gate) MayOpen(flush string) bool {
	return g.Flush != flush || !g.Waits && time.Now().Before(g.Until)
}

// Spent reports whether the gate was open for that flush for as long as it may be.
func (g *Gate) Spent(flush string) bool {
	return g.Flush == flush && !g.Until.IsZero() && !time.Now().Before(g.Until)
}

// Try notes that the gate is being opened for a flush.
func (g *Gate) Try(flush string) {
	if g.Flush != flush {
		g.Flush, g.Until, g.Total, g.barred, g.Waits = flush, time.Time{}, 0, nil, false
	}
}

// Open notes that the gate is open now.
func (g *Gate) Open(now time.Time) {
	g.Opened, g.Waits = now, false
	if g.Until.IsZero() {
		g.Until = now.Add(Most)
	}
}

// DueShut returns when an open gate is shut: as soon as it is not wanted open any more. made is a
// time that has passed.
func (g *Gate) DueShut(wanted bool, made time.Time) time.Time {
	if !g.IsOpen() {
		return time.Time{}
	}
	if !wanted {
		return made
	}
	return g.Until
}

// Bars notes that a hook stays shut in the flush, and reports whether the log is to have it.
func (g *Gate) Bars(hook string) bool {
	if g.barred[hook] {
		return false
	}
	if g.barred == nil {
		g.barred = map[string]bool{}
	}
	g.barred[hook] = true
	return true
}

// Shut notes that the gate is shut since at, and returns for how long it was open.
func (g *Gate) Shut(at time.Time) (open time.Duration) {
	g.Trouble.Over()
	open = at.Sub(g.Opened)
	g.Opened, g.Total = time.Time{}, g.Total+open
	return open
}
