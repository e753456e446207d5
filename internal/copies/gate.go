package copies

import (
	"time"

	"github.com/canaryd/canaryd/internal/pace"
)

// A Gate is the loop's knowledge about the gate of one copy.
type Gate struct {
	Opened time.Time // zero: the gate is shut
	Flush  string    // the flush for which it was last opened or tried
	Until  time.Time // the end of the time for that flush; zero: it could not be opened
	// Total is how long it was open for that flush in all.
	Total time.Duration
	// keptShut are the hooks whose reason for staying shut in that flush is in the log.
	keptShut map[string]bool
	// Waits means that the gate was open and had to be shut, because of a write of another
	// owner in that flush. It may open again after a process writes to nat.
	Waits   bool
	Trouble pace.Trouble // why the gate could not be moved
}

// IsOpen reports whether the gate is open.
func (g *Gate) IsOpen() bool { return !g.Opened.IsZero() }

// MayOpen reports whether the gate may open for a flush. It may if it was not tried yet for
// that flush, or if time is left and it does not wait for a write.
func (g *Gate) MayOpen(flush string) bool {
	return g.Flush != flush || !g.Waits && time.Now().Before(g.Until)
}

// Spent reports whether the gate has used up its time for that flush.
func (g *Gate) Spent(flush string) bool {
	return g.Flush == flush && !g.Until.IsZero() && !time.Now().Before(g.Until)
}

// Try notes that the gate is being opened for the flush of that ID. For another flush the
// limit, the total and the remarks begin again.
func (g *Gate) Try(flush string) {
	if g.Flush != flush {
		g.Flush, g.Until, g.Total, g.keptShut, g.Waits = flush, time.Time{}, 0, nil, false
	}
}

// Open notes that the gate is open now. Until, the limit of the flush, begins with its first
// opening.
func (g *Gate) Open(now time.Time) {
	g.Opened, g.Waits = now, false
	if g.Until.IsZero() {
		g.Until = now.Add(Most)
	}
}

// DueShut returns when an open gate must be shut; zero if it is shut. If it is no longer
// wanted, that is at once: made is a time in the past.
func (g *Gate) DueShut(wanted bool, made time.Time) time.Time {
	if !g.IsOpen() {
		return time.Time{}
	}
	if !wanted {
		return made
	}
	return g.Until
}

// KeepsShut notes that a hook stays shut in the flush, and reports whether to log that: once in
// each flush. "" is all hooks.
func (g *Gate) KeepsShut(hook string) bool {
	if g.keptShut[hook] {
		return false
	}
	if g.keptShut == nil {
		g.keptShut = map[string]bool{}
	}
	g.keptShut[hook] = true
	return true
}

// Shut notes that the gate has been shut since at, and returns how long it was open. Total has
// the sum of the flush.
func (g *Gate) Shut(at time.Time) (open time.Duration) {
	g.Trouble.Over()
	open = at.Sub(g.Opened)
	g.Opened, g.Total = time.Time{}, g.Total+open
	return open
}
