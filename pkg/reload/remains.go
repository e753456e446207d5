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

// Remains are the files of an earlier run in this boot and network namespace, of any backend and
// iptables version. They are evidence of the rules that were in force. LoadState decides whether
// they may be replayed.
type Remains struct {
	Identity Identity // the environment of the generation
	// Marks are the last marks; nil if the state cannot be read.
	Marks canary.Marks
	// Uptime is the machine's uptime when the generation was last seen in force; 0 if unknown.
	Uptime time.Duration
	ID     string // of the generation
	// Generation has the rules that were in force, so it lacks the quarantined rules.
	Generation rules.Generation
	// Unread is set if the last generation cannot be read; Generation is an older one then, or
	// none.
	Unread *Unread
}

// Remains returns the files of an earlier run. It returns false if nothing on disk is of this
// network namespace and this boot, which began at booted. Then no table can have lost anything
// since. If the state cannot be read, the newest generation of this boot shows that marks were
// planted. After a cleanup there is no state, and a generation alone is no evidence.
func (s *Store) Remains(booted time.Time) (Remains, bool) {
	var state State
	err := s.read(s.statePath(), &state)
	switch {
	case errors.Is(err, ErrNothingStored), err == nil && !s.identity.sameNode(state.Identity):
		return Remains{}, false
	case err != nil && !s.perhapsHere(booted):
		return Remains{}, false
	case err != nil:
		state = State{}
	}
	stored, unread := s.newestHere(state.ID)
	r := Remains{Identity: stored.Identity, ID: stored.ID, Generation: stored.Generation}
	if unread != nil {
		r.Unread = &Unread{File: s.path(state.ID), Reason: unread.Error(), Since: time.Now(), Older: stored.ID}
		if state.ID != "" {
			r.Unread.IDs = []string{state.ID}
		} else {
			r.Unread.File, r.Unread.Reason = s.statePath(), err.Error()
		}
	}
	if err == nil {
		r.Marks, r.Uptime = state.Marks, state.Uptime
		// The marks are where the state was written, even if the generation is of another backend.
		r.Identity = state.Identity
		for id, list := range state.Quarantine {
			r.Generation = r.Generation.With(id, without(r.Generation[id], list))
		}
	} else if stored.ID == "" {
		r.Identity = s.identity
	}
	return r, true
}

// errNoGeneration: neither the state nor a generation of this boot can be read.
var errNoGeneration = errors.New("no generation of this boot can be read")

// newestHere returns the generation with that ID or, if that is unreadable, the newest readable
// one of this boot and network namespace. The error is why other rules may have been in force.
// Remains shows it as Unread.
func (s *Store) newestHere(id string) (Stored, error) {
	var unread error
	if id != "" {
		stored, err := s.LoadHere(id)
		if err == nil {
			return stored, nil
		}
		unread = err
	}
	for _, k := range s.List() {
		stored, err := s.LoadHere(k.ID)
		if err == nil {
			return stored, unread
		}
		if unread == nil && !errors.Is(err, ErrForeign) {
			unread = err
		}
	}
	if unread == nil {
		unread = errNoGeneration
	}
	return Stored{}, unread
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

// LastBackend returns the backend that the last run guarded, for the choice of the backend at
// the start. It is "" if that run was of another boot or network namespace, or if its state
// cannot be read. The folder need not exist.
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

// PendingPath is the file of the loss that waits.
func (s *Store) PendingPath() string { return filepath.Join(s.dir, "pending.json") }

// SavePending saves a loss that waits, and keeps its generation until ForgetPending. The caller
// must save it before it overwrites the state, because the marks in the old state show the loss.
func (s *Store) SavePending(p Pending) error {
	p.Format = everywhere
	if err := s.write(s.PendingPath(), p); err != nil {
		return fmt.Errorf("saving the loss that waits for a decision: %w", err)
	}
	s.pinned = p.ID
	return nil
}

// LoadPending returns the loss that waits, and keeps its generation until ForgetPending. The
// error is ErrNothingStored, is ErrForeign if the loss is of another boot or network namespace,
// or names the broken part.
func (s *Store) LoadPending() (Pending, error) {
	var p Pending
	if err := s.read(s.PendingPath(), &p); err != nil {
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
	return removeFile(s.PendingPath(), "the loss that waits for a decision")
}
