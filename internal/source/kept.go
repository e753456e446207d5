package source

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/rules"
)

// keptFormat is that of the files of a Shelf.
const keptFormat = 1

// A Shelf keeps on disk what sources said when they could be used last. Unlike a
// generation that was learned, that is an order of the operator's: it holds after a
// reboot too. The zero value keeps nothing.
type Shelf struct{ Dir string }

// A kept is what one source said.
type kept struct {
	Format     int              `json:"format"`
	Path       string           `json:"path"` // of its files
	Saved      time.Time        `json:"saved"`
	Generation rules.Generation `json:"generation"`
}

func (s Shelf) file(source string) string {
	return filepath.Join(s.Dir, "declared-"+source+".json")
}

// keep writes what a source said, so that who is killed meanwhile leaves the old file
// or the new one.
func (s Shelf) keep(source Source, said Declared) error {
	if s.Dir == "" {
		return nil
	}
	data, err := json.Marshal(kept{keptFormat, source.path(), time.Now(), said.Generation})
	if err == nil {
		err = private.Write(s.file(source.Name()), data)
	}
	if err != nil {
		return fmt.Errorf("keeping what the source %s says: %w", source.Name(), err)
	}
	return nil
}

// errNotKept: nothing of the source is on disk.
var errNotKept = errors.New("nothing is kept of this source")

// recall returns what a source said when it could be used last.
func (s Shelf) recall(source Source) (Declared, error) {
	if s.Dir == "" {
		return Declared{}, errNotKept
	}
	path := s.file(source.Name())
	data, err := private.Read(path, maxKept)
	if errors.Is(err, fs.ErrNotExist) {
		return Declared{}, errNotKept
	}
	if err != nil {
		return Declared{}, err
	}
	var k kept
	if err := json.Unmarshal(data, &k); err != nil {
		return Declared{}, fmt.Errorf("%s is corrupt: %w", path, err)
	}
	switch {
	case k.Format != keptFormat:
		return Declared{}, fmt.Errorf("%s: format %d is not known here", path, k.Format)
	case k.Path != source.path():
		return Declared{}, fmt.Errorf("%w: %s is of %s", errNotKept, path, k.Path)
	}
	if err := rules.Validate(k.Generation); err != nil {
		return Declared{}, fmt.Errorf("%s: %w", path, err)
	}
	return source.recall(k.Generation), nil
}

// maxKept bounds what is read from disk, as for generations that were learned.
const maxKept = 64 << 20

// keepAll keeps what is new.
func (w *Watcher) keepAll(ctx context.Context) {
	for _, s := range w.states {
		if !s.unkept {
			continue
		}
		err := w.Shelf.keep(s, s.good)
		s.unkept = err != nil
		if err != nil && !w.keptBadly {
			klog.FromContext(ctx).Error(err, "If a file is broken at the next start, its last good rules will not be known")
		}
		w.keptBadly = err != nil
	}
}
