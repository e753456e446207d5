package reload

import (
	"encoding/json"
	"path/filepath"
	"time"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/canary"
)

// A Behind says that the state folder could not be written, and what was in force beyond what it
// has. It is kept in another folder, on another disk: that of the control socket.
type Behind struct {
	Format   int       `json:"format"`
	Identity Identity  `json:"identity"`
	Stored   string    `json:"stored"`         // the generation that the state names; "" if there is no state
	Saved    time.Time `json:"saved,omitzero"` // when the state was last written
	// Changes is how often the generation changed since then, and Marks are those of the last one.
	Changes int          `json:"changes"`
	Marks   canary.Marks `json:"marks"`
	Reason  string       `json:"reason"` // why the state could not be written
	Sum     string       `json:"sum,omitempty"`
}

// KeepAside has SaveBehind write to that folder.
func (s *Store) KeepAside(folder string) { s.aside = folder }

func (s *Store) behindPath() string { return filepath.Join(s.aside, "behind.json") }

// SaveBehind notes that the state on disk is behind.
func (s *Store) SaveBehind(b Behind) error {
	if s.aside == "" {
		return nil
	}
	b.Format, b.Identity, b.Stored, b.Sum = format, s.identity, s.stateID, ""
	text, err := json.Marshal(b)
	if err == nil {
		err = private.Folder(s.aside)
	}
	if err == nil {
		err = private.Write(s.behindPath(), private.Summed(text))
	}
	return err
}

// LoadBehind returns the note that the state on disk is behind. The error is ErrNothingStored if
// there is none, or it is of another boot, network namespace, backend or state; else it says what
// is broken.
func (s *Store) LoadBehind(state string) (Behind, error) {
	if s.aside == "" {
		return Behind{}, ErrNothingStored
	}
	var b Behind
	if err := s.read(s.behindPath(), &b); err != nil {
		return Behind{}, err
	}
	if s.checkIdentity(b.Identity) != nil || b.Stored != state {
		return Behind{}, ErrNothingStored
	}
	return b, nil
}

// ForgetBehind removes the note: the state is on disk.
func (s *Store) ForgetBehind() error {
	if s.aside == "" {
		return nil
	}
	return removeFile(s.behindPath(), "the note that the state was behind")
}
