package reload

import (
	"cmp"
	"encoding/json"
	"errors"
	"path/filepath"
	"time"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/canary"
)

// A Behind says that the state folder could not be written, and what was in force beyond what it
// has. It is kept in another folder, on another disk: that of the control socket.
type Behind struct {
	Stored string    `json:"stored"`         // the generation that the state names; "" if there is no state
	Saved  time.Time `json:"saved,omitzero"` // when the state was last written
	// Changes is how often the generation changed since then, and Marks are those of the last one.
	Changes int          `json:"changes"`
	Marks   canary.Marks `json:"marks"`
	Reason  string       `json:"reason"` // why the state could not be written
}

// A BehindNative says the same of native tables.
type BehindNative struct {
	Stored  string    `json:"stored"` // the digest of the file that names the tables; "" if there is none
	Saved   time.Time `json:"saved,omitzero"`
	Changes int       `json:"changes"`
	// Tables are all that were guarded last.
	Tables []BehindTable `json:"tables"`
	Reason string        `json:"reason"`
}

// A BehindTable is a native table in such a note: the ID of the content that was in force, and the
// nonce of its witness.
type BehindTable struct {
	Name    string `json:"table"`
	ID      string `json:"id"`
	Witness string `json:"witness,omitempty"`
}

// Table returns the table of that name.
func (b BehindNative) Table(name string) (BehindTable, bool) {
	for _, t := range b.Tables {
		if t.Name == name {
			return t, true
		}
	}
	return BehindTable{}, false
}

// A note is the file that has both. What is nil is not behind.
type note struct {
	Format   int      `json:"format"`
	Identity Identity `json:"identity"`
	*Behind
	Native *BehindNative `json:"native,omitempty"`
	Sum    string        `json:"sum,omitempty"`
}

// KeepAside has SaveBehind and SaveNativeBehind write to that folder, and reads what is there of
// this boot and network namespace.
func (s *Store) KeepAside(folder string) {
	s.aside = folder
	var n note
	if s.noteErr = s.read(s.behindPath(), &n); s.noteErr != nil {
		if errors.Is(s.noteErr, ErrNothingStored) {
			s.noteErr = nil
		}
		return
	}
	if s.checkIdentity(n.Identity) == nil {
		s.note.Behind = n.Behind
	}
	if n.Identity.BootID == s.identity.BootID && n.Identity.NetNS == s.identity.NetNS { // they have no backend
		s.note.Native = n.Native
	}
}

func (s *Store) behindPath() string { return filepath.Join(s.aside, "behind.json") }

// SaveBehind notes that the state on disk is behind.
func (s *Store) SaveBehind(b Behind) error {
	b.Stored, s.note.Behind = s.stateID, &b
	return s.saveNote()
}

// SaveNativeBehind notes that the native tables on disk are behind.
func (s *Store) SaveNativeBehind(b BehindNative) error {
	s.note.Native = &b
	return s.saveNote()
}

func (s *Store) saveNote() error {
	if s.aside == "" {
		return nil
	}
	if s.note.Behind == nil && s.note.Native == nil {
		return removeFile(s.behindPath(), "the note that the state was behind")
	}
	s.note.Format, s.note.Identity, s.note.Sum = everywhere, s.identity, ""
	if s.note.Behind != nil {
		s.note.Format = formatOf(s.note.Behind.Marks)
	}
	text, err := json.Marshal(s.note)
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
	if b := s.note.Behind; s.noteErr == nil && b != nil && b.Stored == state {
		return *b, nil
	}
	s.note.Behind = nil
	return Behind{}, cmp.Or(s.noteErr, ErrNothingStored)
}

// LoadNativeBehind is LoadBehind for the native tables that a file with that digest names.
func (s *Store) LoadNativeBehind(stored string) (BehindNative, error) {
	if b := s.note.Native; s.noteErr == nil && b != nil && b.Stored == stored {
		return *b, nil
	}
	s.note.Native = nil
	return BehindNative{}, cmp.Or(s.noteErr, ErrNothingStored)
}

// ForgetBehind removes the note: the state is on disk.
func (s *Store) ForgetBehind() error {
	s.note.Behind = nil
	return s.saveNote()
}

// ForgetNativeBehind removes the note of native tables.
func (s *Store) ForgetNativeBehind() error {
	s.note.Native = nil
	return s.saveNote()
}
