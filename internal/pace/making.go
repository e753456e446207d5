package pace

import (
	"cmp"
	"errors"
	"time"

	"github.com/canaryd/canaryd/internal/here"
)

// A Making is what the loop knows of a table of canaryd's own that the kernel may refuse, such as
// the keeper's or the standby's: why there is none, and when it is tried again.
type Making struct {
	since   time.Time     // of the first try that failed; zero: none did
	wait    time.Duration // before the next try
	TryAt   time.Time     // of the next try; zero: none is due
	Trouble Trouble       // why there is none
}

const (
	// MakeAgain is when a refused table is tried again at the latest. What a kernel lacks it lacks
	// until a module is loaded, which the kernel does not announce.
	MakeAgain = 5 * time.Minute
	// takenFor is how long a taken name is not logged. The table of a canaryd that was killed goes
	// with its socket, which a child may hold open for as long (lingers).
	takenFor = here.Lingers
)

// Failed notes a try that failed, plans the next one, and reports whether the log is to have it.
// kernel is the error of a kernel that cannot have the table, taken that of a name that is taken.
func (m *Making) Failed(err, kernel, taken error) bool {
	now := time.Now()
	m.since = cmp.Or(m.since, now)
	if m.wait = min(max(2*m.wait, FirstTry), MakeAgain); errors.Is(err, kernel) {
		m.wait = MakeAgain
	}
	m.TryAt = now.Add(m.wait)
	return (!errors.Is(err, taken) || now.Sub(m.since) >= takenFor) && m.Trouble.Met(err, now)
}

// Stays notes that the table could not be deleted, and reports whether the log is to have it.
func (m *Making) Stays(err error) bool {
	m.TryAt = time.Now().Add(MakeAgain)
	return m.Trouble.Met(err, time.Now())
}

// Over returns what is known once the table is made, or not wanted any more.
func (m Making) Over() Making {
	m.Trouble.Over()
	return Making{Trouble: m.Trouble}
}
