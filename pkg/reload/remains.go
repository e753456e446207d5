package reload

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Remains are what an earlier run of this boot and network namespace left on disk,
// whichever backend and version of iptables they are of. They are evidence of what
// was in force. What may be replayed unasked is for LoadState to say.
type Remains struct {
	Identity Identity // that the generation is bound to
	// Marks are those that stood last; nil if the state cannot be read.
	Marks canary.Marks
	// Uptime is that of the machine when the generation was last seen in force; 0 if
	// that is not known.
	Uptime time.Duration
	ID     string // of the generation
	// Generation is what was in force, without the rules that were held back.
	Generation rules.Generation
}

// Remains returns what an earlier run left, false if there is nothing of this boot
// and network namespace: then no table can have lost anything since. Where the state
// cannot be read, the newest generation of this boot shows that marks were planted.
// After a cleanup there is no state at all, and generations are no evidence.
func (s *Store) Remains() (Remains, bool) {
	var state State
	err := s.read(s.statePath(), &state)
	switch {
	case errors.Is(err, ErrNothingStored):
		return Remains{}, false
	case err == nil && !s.identity.sameNode(state.Identity):
		return Remains{}, false
	case err != nil:
		state = State{}
	}
	stored, ok := s.newestHere(state.ID)
	if !ok {
		return Remains{}, false
	}
	r := Remains{Identity: stored.Identity, ID: stored.ID, Generation: stored.Generation}
	if err == nil {
		r.Marks, r.Uptime = state.Marks, state.Uptime
		// The marks stand where the state was written, whatever its generation is.
		r.Identity = state.Identity
		for id, list := range state.Quarantine {
			r.Generation = r.Generation.With(id, without(r.Generation[id], list))
		}
	}
	return r, true
}

// newestHere returns the generation of that ID or, if it cannot be read, the newest
// one of this boot and network namespace.
func (s *Store) newestHere(id string) (Stored, bool) {
	if stored, err := s.LoadHere(id); err == nil {
		return stored, true
	}
	for _, k := range s.List() {
		if stored, err := s.LoadHere(k.ID); err == nil {
			return stored, true
		}
	}
	return Stored{}, false
}

// LoadHere returns the generation of that ID if it is of this boot and network
// namespace, whichever backend and version of iptables it is of.
func (s *Store) LoadHere(id string) (Stored, error) {
	stored, _, err := s.loadIf(id, s.sameNode)
	return stored, err
}

// sameNode returns ErrForeign unless what is stored is of this boot and network
// namespace.
func (s *Store) sameNode(o Identity) error {
	o.Backend, o.Version = s.identity.Backend, s.identity.Version
	return s.checkIdentity(o)
}

// sameNode reports whether both are of the same boot and network namespace.
func (i Identity) sameNode(o Identity) bool { return i.BootID == o.BootID && i.NetNS == o.NetNS }

// LastBackend returns the backend that the last run guarded, "" if it was of another
// boot or network namespace, or if that cannot be read. The folder need not exist.
func LastBackend(dir string, here Identity) string {
	text, err := private.Read(filepath.Join(dir, stateFile), maxStored)
	if err != nil {
		return ""
	}
	// Nothing but the identity is asked for, and that is the same in every format.
	var about struct {
		Identity Identity `json:"identity"`
	}
	if err := json.Unmarshal(text, &about); err != nil || !here.sameNode(about.Identity) {
		return ""
	}
	return about.Identity.Backend
}

// A Pending is a loss of stored rules that waits for a decision, on disk.
type Pending struct {
	Format   int      `json:"format"`
	Identity Identity `json:"identity"` // that the generation is bound to
	ID       string   `json:"id"`       // of the generation that was lost
	Reason   string   `json:"reason"`   // why it was not replayed
	// Record is the flush record, in the words of who writes it.
	Record json.RawMessage `json:"record"`
}

func (s *Store) pendingPath() string { return filepath.Join(s.dir, "pending.json") }

// SavePending keeps a loss that waits, and from then on its generation, until the
// loss is forgotten. It must be on disk before the state is overwritten: the marks
// in the old state are what shows the loss.
func (s *Store) SavePending(p Pending) error {
	p.Format = format
	if err := s.write(s.pendingPath(), p); err != nil {
		return fmt.Errorf("keeping the loss that waits for a decision: %w", err)
	}
	s.pinned = p.ID
	return nil
}

// LoadPending returns the loss that waits. The error is ErrNothingStored, ErrForeign
// if it is of another boot or network namespace, or says what is broken.
func (s *Store) LoadPending() (Pending, error) {
	var p Pending
	if err := s.read(s.pendingPath(), &p); err != nil {
		return Pending{}, err
	}
	if err := s.sameNode(p.Identity); err != nil {
		return Pending{}, err
	}
	s.pinned = p.ID
	return p, nil
}

// ForgetPending removes the loss that waits: a decision was made.
func (s *Store) ForgetPending() error {
	s.pinned = ""
	if err := os.Remove(s.pendingPath()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forgetting the loss that waits for a decision: %w", err)
	}
	return nil
}
