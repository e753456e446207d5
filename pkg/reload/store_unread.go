package reload

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// An Unread is a stored file that cannot be read. So canaryd cannot know whether all rules that
// were in force still are.
type Unread struct {
	File   string    `json:"file"`
	Reason string    `json:"reason"`
	Since  time.Time `json:"since"` // when it was found
	Native bool      `json:"native,omitempty"`
	// Table is the native table of the file, if that is known.
	Table string `json:"table,omitempty"`
	// IDs are of the generations that show, if all of them are in force again, that nothing is
	// missing; none if they are not known.
	IDs []string `json:"ids,omitempty"`
	// Older is the newest generation that can be read; "" if there is none.
	Older string `json:"older,omitempty"`
}

// storedUnread is the file of a list of Unread.
type storedUnread struct {
	Format   int      `json:"format"`
	Identity Identity `json:"identity"`
	Unread   []Unread `json:"unread"`
}

func (s *Store) unreadPath() string { return filepath.Join(s.dir, "unread.json") }

// SaveUnread saves the list of files that could not be read. It must be on disk before these files
// are written again. An empty list removes the file.
func (s *Store) SaveUnread(list []Unread) error {
	if len(list) == 0 {
		return removeFile(s.unreadPath(), "what could not be read")
	}
	if err := s.write(s.unreadPath(), storedUnread{everywhere, s.identity, list}); err != nil {
		return fmt.Errorf("saving the list of unreadable files: %w", err)
	}
	return nil
}

// LoadUnread returns the files that an earlier run of this boot and network namespace could not
// read, and that no operator has decided about. If the list itself cannot be read, its file is the
// only entry.
func (s *Store) LoadUnread(booted time.Time) []Unread {
	var stored storedUnread
	err := s.read(s.unreadPath(), &stored)
	switch {
	case errors.Is(err, ErrNothingStored):
		return nil
	case err != nil && OfThisBoot(s.unreadPath(), booted):
		return []Unread{{File: s.unreadPath(), Reason: err.Error(), Since: time.Now()}}
	case err != nil, !s.identity.sameNode(stored.Identity):
		return nil
	}
	return stored.Unread
}

// OfThisBoot reports whether a file may have been written since the machine was booted. A machine
// that lost its power leaves files that are cut off, and its rules are lost, too.
func OfThisBoot(path string, booted time.Time) bool {
	info, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) && (err != nil || !info.ModTime().Before(booted))
}

// perhapsHere reports whether a state that cannot be read may be of this boot and network
// namespace. Then Remains reports rules that may be lost. The state names a generation, which
// is never removed before the state.
func (s *Store) perhapsHere(booted time.Time) bool {
	if !OfThisBoot(s.statePath(), booted) {
		return false
	}
	list := s.List()
	for _, k := range list {
		if h := s.headers[k.ID]; h.err != nil || s.identity.sameNode(h.stored.Identity) {
			return true
		}
	}
	return len(list) == 0
}
