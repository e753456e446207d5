package daemon

import "time"

// A trouble is something that lasts, is met again and again, and that the log tells
// once. Of one that comes and goes, or is told in other words each time, the log
// has a line in complainEvery.
type trouble struct {
	what string    // empty: there is none
	told string    // what the log has of it; empty: nothing
	at   time.Time // when the log had something of it last
}

// there reports whether there is trouble now.
func (t *trouble) there() bool { return t.what != "" }

// met notes the trouble, and reports whether the log is to have it.
func (t *trouble) met(err error, now time.Time) bool {
	t.what = err.Error()
	if t.what == t.told || !t.at.IsZero() && now.Sub(t.at) < complainEvery {
		return false
	}
	t.told, t.at = t.what, now
	return true
}

// over notes that there is none any more, and reports whether the log is to have
// that: it is, if it has that there was.
func (t *trouble) over() bool {
	tell := t.told != ""
	t.what, t.told = "", ""
	return tell
}
