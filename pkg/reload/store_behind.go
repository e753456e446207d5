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

// A Behind says that the state folder could not be written, and names newer rules that were in
// force. They are of iptables' tables or, in a note of its own, of native tables. It is kept in the
// folder of the control socket, on another disk.
type Behind struct {
	// Stored is the generation that the state names, or the digest of the file that names the
	// native tables; "" if there is none.
	Stored  string    `json:"stored"`
	Saved   time.Time `json:"saved,omitzero"` // when that was last written
	Changes int       `json:"changes"`        // how often the rules changed since then
	// Marks has the last marks of iptables' tables, Tables the native tables that were guarded.
	Marks  canary.Marks  `json:"marks,omitempty"`
	Tables []BehindTable `json:"tables,omitempty"`
	Reason string        `json:"reason"` // why the folder could not be written
}

// A BehindTable is a native table in such a note: the ID of the content that was in force, and the
// nonce of its witness.
type BehindTable struct {
	Name    string `json:"table"`
	ID      string `json:"id"`
	Witness string `json:"witness,omitempty"`
}

// Table returns the table of that name; false if the note has none.
func (b Behind) Table(name string) (BehindTable, bool) {
	for _, t := range b.Tables {
		if t.Name == name {
			return t, true
		}
	}
	return BehindTable{}, false
}

// A note is the file for both kinds of tables. For a nil part, the folder is up to date.
type note struct {
	Format   int      `json:"format"`
	Identity Identity `json:"identity"`
	*Behind
	Native *Behind `json:"native,omitempty"`
	Sum    string  `json:"sum,omitempty"`
}

// KeepAside makes SaveBehind and SaveNativeBehind write to that folder. It also reads the note that
// is there, if it is of this boot and network namespace.
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
	if n.Identity.BootID == s.identity.BootID && n.Identity.NetNS == s.identity.NetNS { // native tables have no backend
		s.note.Native = n.Native
	}
}

func (s *Store) behindPath() string { return filepath.Join(s.aside, "behind.json") }

// SaveBehind notes that the state on disk is behind, or with nil that it is not. It sets
// b.Stored. The next start then knows that newer rules were in force.
func (s *Store) SaveBehind(b *Behind) error {
	if s.note.Behind = b; b != nil {
		b.Stored = s.stateID
	}
	return s.saveNote()
}

// SaveNativeBehind is SaveBehind for native tables; its caller sets Stored.
func (s *Store) SaveNativeBehind(b *Behind) error {
	s.note.Native = b
	return s.saveNote()
}

// saveNote writes the note to the folder of KeepAside, or removes it if the state of both kinds
// of tables is up to date. Without that folder it does nothing.
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
// there is none, or if it is of another boot, network namespace, backend or state. Else it names
// the broken part.
func (s *Store) LoadBehind(state string) (Behind, error) { return s.loadNote(&s.note.Behind, state) }

// LoadNativeBehind is LoadBehind for the native tables that a file with that digest names.
func (s *Store) LoadNativeBehind(stored string) (Behind, error) {
	return s.loadNote(&s.note.Native, stored)
}

// loadNote returns the note in *of, if it is about the stored state with this ID or digest.
// Otherwise it forgets the note. The error is ErrNothingStored, or why the file could not be
// read.
func (s *Store) loadNote(of **Behind, stored string) (Behind, error) {
	if b := *of; s.noteErr == nil && b != nil && b.Stored == stored {
		return *b, nil
	}
	*of = nil
	return Behind{}, cmp.Or(s.noteErr, ErrNothingStored)
}
