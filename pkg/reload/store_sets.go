package reload

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/canaryd/canaryd/pkg/iptables"
)

// storedSets is the file of the ipsets that protected rules name.
type storedSets struct {
	Format   int                     `json:"format"`
	Identity Identity                `json:"identity"`
	Sets     map[string]iptables.Set `json:"sets"`
}

func (s *Store) setsPath() string { return filepath.Join(s.dir, "sets.json") }

// SaveSets writes the ipsets that the generation's rules name, so that a replay after a restart
// can create lost ones.
func (s *Store) SaveSets(sets map[string]iptables.Set) error {
	if err := s.write(s.setsPath(), storedSets{everywhere, s.identity, sets}); err != nil {
		return fmt.Errorf("saving the ipsets: %w", err)
	}
	return nil
}

// LoadSets returns the ipsets that were written last; none if there never were any. A replay
// creates lost ones from these. The error is ErrForeign, or names the broken part.
func (s *Store) LoadSets() (map[string]iptables.Set, error) {
	var stored storedSets
	if err := s.read(s.setsPath(), &stored); err != nil {
		if errors.Is(err, ErrNothingStored) {
			return nil, nil
		}
		return nil, err
	}
	if err := s.checkIdentity(stored.Identity); err != nil {
		return nil, err
	}
	for name, set := range stored.Sets {
		if err := set.Validate(); err != nil {
			return nil, fmt.Errorf("%s is corrupt: %w", s.setsPath(), err)
		}
		if set.Name != name {
			return nil, fmt.Errorf("%s is corrupt: ipset %s is stored under the name %s", s.setsPath(), set.Name, name)
		}
	}
	return stored.Sets, nil
}
