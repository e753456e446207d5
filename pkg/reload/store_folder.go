package reload

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/canaryd/canaryd/internal/private"
)

// diskFails reports whether an error is the disk's: it is full, read-only or broken. Then
// OpenStore opens the store anyway. Any other error of the folder concerns its owner or
// permissions, and canaryd then reads and writes nothing there.
func diskFails(err error) bool {
	for _, errno := range []error{syscall.EROFS, syscall.ENOSPC, syscall.EDQUOT, syscall.EIO} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// prepare makes the folder if it is missing, and checks that it is safe and can be written.
func (s *Store) prepare() error {
	s.unwritable = s.tryFolder()
	return s.unwritable
}

// tryFolder makes the state folder and its folder of generations, for prepare. It writes a
// probe, and removes files that a killed process left unfinished. Its error becomes Unwritable.
func (s *Store) tryFolder() error {
	for _, folder := range []string{s.dir, s.folder()} {
		if err := private.Folder(folder); err != nil {
			return fmt.Errorf("state folder %s: %w", s.dir, err)
		}
	}
	probe, err := os.CreateTemp(s.folder(), ".probe-*")
	if err != nil {
		return fmt.Errorf("state folder %s is not writable: %w", s.dir, private.Lasting(err, s.folder()))
	}
	if err := errors.Join(probe.Close(), os.Remove(probe.Name())); err != nil {
		return fmt.Errorf("state folder %s: %w", s.dir, err)
	}
	for _, folder := range []string{s.dir, s.folder()} {
		entries, err := os.ReadDir(folder)
		if err != nil {
			return fmt.Errorf("state folder %s is not readable: %w", folder, err)
		}
		for _, e := range entries {
			if folder == s.folder() && strings.HasPrefix(e.Name(), ".") || strings.HasSuffix(e.Name(), private.Unfinished) {
				_ = os.Remove(filepath.Join(folder, e.Name())) // a killed process left it; it does no harm
			}
		}
	}
	return nil
}

// onDisk runs a write. If the last write to the folder failed, or the folder is gone, onDisk
// prepares the folder first. A folder that was made meanwhile may be another user's.
func (s *Store) onDisk(write func() error) error {
	if s.unwritable != nil {
		if err := s.prepare(); err != nil {
			return err
		}
	}
	err := write()
	if errors.Is(err, fs.ErrNotExist) {
		s.base = nil
		if err = s.prepare(); err == nil {
			s.remade++
			err = write()
		}
	}
	return err
}

// complete reports whether the files of a written generation exist. If not, Save writes them
// again. A file that cannot be checked counts as existing.
func (s *Store) complete(id string) bool {
	_, err := os.Stat(s.path(id))
	if err == nil && s.rests != "" {
		_, err = os.Stat(s.basePath(s.rests))
	}
	return err == nil || !errors.Is(err, fs.ErrNotExist)
}
