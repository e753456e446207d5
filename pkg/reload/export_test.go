package reload

import (
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// saveGeneration saves a generation with its source, and no other facts about its origin.
func (s *Store) saveGeneration(g rules.Generation, source string, captured time.Time) error {
	return s.Save(Stored{Source: source, Captured: captured, Generation: g})
}

// agreement returns the agreement to exactly these changes.
func (c Changes) agreement() Agreement {
	a := Agreement{}
	for id, change := range c {
		if !change.Removed.Empty() {
			a[id] = change.Removed.Digest()
		}
	}
	return a
}

// names returns the names of the lost chains.
func (l Lost) names() []string {
	var list []string
	for _, c := range l.Chains {
		list = append(list, c.Name)
	}
	return list
}
