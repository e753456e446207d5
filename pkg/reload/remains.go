package reload

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Remains are what an earlier run in this boot and network namespace left on disk, of any backend
// and iptables version. They are evidence of what was in force. LoadState decides what may be
// replayed.
type Remains struct {
	Identity Identity // what the generation is bound to
	// Marks are the last marks; nil if the state cannot be read.
	Marks canary.Marks
	// Uptime is the machine's uptime when the generation was last seen in force; 0 if unknown.
	Uptime time.Duration
	ID     string // of the generation
	// Generation is what was in force, so it lacks the quarantined rules.
	Generation rules.Generation
}

// Remains returns what an earlier run left. It returns false if nothing on disk is of this boot and
// network namespace: then no table can have lost anything since. If the state cannot be read, the
// newest generation of this boot shows that marks were planted. After a cleanup there is no state,
// and a generation alone is no evidence.
func (s *Store) Remains() (Remains, bool) {
	var state State
	err := s.read(s.statePath(), &state)
	switch {
	case errors.Is(err, ErrNothingStored), err == nil && !s.identity.sameNode(state.Identity):
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
		// The marks are where the state was written, even if the generation is of another backend.
		r.Identity = state.Identity
		for id, list := range state.Quarantine {
			r.Generation = r.Generation.With(id, without(r.Generation[id], list))
		}
	}
	return r, true
}

// newestHere returns the generation with that ID or, if it cannot be read, the newest one of this
// boot and network namespace.
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

// LoadHere returns the generation with that ID if it is of this boot and network namespace, of any
// backend and iptables version.
func (s *Store) LoadHere(id string) (Stored, error) {
	stored, _, err := s.loadIf(id, s.sameNode)
	return stored, err
}

// sameNode returns ErrForeign unless o is of this boot and network namespace.
func (s *Store) sameNode(o Identity) error {
	o.Backend, o.Version = s.identity.Backend, s.identity.Version
	return s.checkIdentity(o)
}

// sameNode reports whether both identities are of the same boot and network namespace.
func (i Identity) sameNode(o Identity) bool { return i.BootID == o.BootID && i.NetNS == o.NetNS }

// LastBackend returns the backend that the last run guarded. It is "" if that run was of another
// boot or network namespace, or if its state cannot be read. The folder need not exist.
func LastBackend(dir string, here Identity) string {
	text, err := private.Read(filepath.Join(dir, stateFile), maxStored)
	if err != nil {
		return ""
	}
	// Only the identity is decoded, because it is the same in every format.
	var about struct {
		Identity Identity `json:"identity"`
	}
	if err := json.Unmarshal(text, &about); err != nil || !here.sameNode(about.Identity) {
		return ""
	}
	return about.Identity.Backend
}

// A Pending is the file of a loss that waits for an operator's decision.
type Pending struct {
	Format   int      `json:"format"`
	Identity Identity `json:"identity"` // of the backend and version that wrote the generation
	ID       string   `json:"id"`       // the generation that was lost
	Reason   string   `json:"reason"`   // why it was not replayed
	// Record is the flush record in the caller's encoding.
	Record json.RawMessage `json:"record"`
}

func (s *Store) pendingPath() string { return filepath.Join(s.dir, "pending.json") }

// SavePending saves a loss that waits, and keeps its generation until ForgetPending. The caller
// must save it before it overwrites the state, because the marks in the old state show the loss.
func (s *Store) SavePending(p Pending) error {
	p.Format = format
	if err := s.write(s.pendingPath(), p); err != nil {
		return fmt.Errorf("saving the loss that waits for a decision: %w", err)
	}
	s.pinned = p.ID
	return nil
}

// LoadPending returns the loss that waits. The error is ErrNothingStored, is ErrForeign if the loss
// is of another boot or network namespace, or says what is broken.
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

// ForgetPending removes the loss that waits, after the operator has decided.
func (s *Store) ForgetPending() error {
	s.pinned = ""
	return removeFile(s.pendingPath(), "the loss that waits for a decision")
}
