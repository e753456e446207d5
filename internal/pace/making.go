package pace

import (
	"cmp"
	"errors"
	"time"

	"github.com/canaryd/canaryd/internal/here"
)

// A Making is the loop's knowledge about a table of canaryd's own that the kernel may refuse,
// such as the keeper's or the standby's. It has the reason and the time of the next try.
type Making struct {
	since   time.Time     // the first failed try; zero: none
	wait    time.Duration // before the next try
	TryAt   time.Time     // of the next try; zero: none is due
	Trouble Trouble       // why there is none
}

const (
	// MakeAgain is the longest wait before a refused table is tried again. A kernel lacks a
	// feature until a module is loaded, which the kernel does not announce.
	MakeAgain = 5 * time.Minute
	// takenFor is how long a taken name is not logged. The table of a killed canaryd is deleted
	// with its socket, which a child may hold open for here.Lingers.
	takenFor = here.Lingers
)

// Failed notes a failed try, plans the next one, and reports whether to log it. kernel is the
// error of a kernel that cannot have the table: then the next try is MakeAgain away. taken is
// that of a taken name, which is logged only if it lasts.
func (m *Making) Failed(err, kernel, taken error) bool {
	now := time.Now()
	m.since = cmp.Or(m.since, now)
	if m.wait = min(max(2*m.wait, FirstTry), MakeAgain); errors.Is(err, kernel) {
		m.wait = MakeAgain
	}
	m.TryAt = now.Add(m.wait)
	return (!errors.Is(err, taken) || now.Sub(m.since) >= takenFor) && m.Trouble.Met(err, now)
}

// Stays notes that the table could not be deleted, and reports whether to log it.
func (m *Making) Stays(err error) bool {
	m.TryAt = time.Now().Add(MakeAgain)
	return m.Trouble.Met(err, time.Now())
}

// Over returns the Making once the table exists, or is no longer wanted.
func (m Making) Over() Making {
	m.Trouble.Over()
	return Making{Trouble: m.Trouble}
}
