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
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/rules"
)

// keptFormat is the format of the files of a Cache.
const keptFormat = 1

// A Cache keeps on disk the last good declaration of each source. A learned generation holds
// for one boot only, but an operator's declaration is also valid after a reboot. The zero value
// keeps nothing.
type Cache struct{ Dir string }

// A kept is the stored declaration of one source.
type kept struct {
	Format     int              `json:"format"`
	Path       string           `json:"path"` // of its files
	Saved      time.Time        `json:"saved"`
	Generation rules.Generation `json:"generation"`
}

func (s Cache) file(source string) string {
	return filepath.Join(s.Dir, "declared-"+source+".json")
}

// keep writes a source's declaration for recall at a later start; without a folder it does
// nothing. A process that is killed meanwhile leaves the old file or the new one.
func (s Cache) keep(source Source, said Declared) error {
	if s.Dir == "" {
		return nil
	}
	data, err := json.Marshal(kept{keptFormat, source.files().path, time.Now(), said.Generation})
	if err == nil {
		err = private.Write(s.file(source.Name()), data)
	}
	if err != nil {
		return fmt.Errorf("storing the rules of source %s: %w", source.Name(), err)
	}
	return nil
}

// errNotKept means that the disk has nothing of the source.
var errNotKept = errors.New("this source has no stored rules")

// recall returns a source's last good declaration from disk, for a start with broken files. The
// error is errNotKept if there is none for these files.
func (s Cache) recall(source Source) (Declared, error) {
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
		return Declared{}, fmt.Errorf("%s has format %d, and this canaryd reads %d", path, k.Format, keptFormat)
	case k.Path != source.files().path:
		return Declared{}, fmt.Errorf("%w: %s was made from %s", errNotKept, path, k.Path)
	}
	if err := rules.Validate(k.Generation); err != nil {
		return Declared{}, fmt.Errorf("%s: %w", path, err)
	}
	return source.recall(k.Generation), nil
}

// maxKept bounds the size of a file that is read, as for learned generations.
const maxKept = 64 << 20

// keepAll stores the declarations that changed. A failure is logged once, and the next call
// tries again.
func (w *Watcher) keepAll(ctx context.Context) {
	for _, s := range w.states {
		if !s.unkept {
			continue
		}
		err := w.Cache.keep(s, s.good)
		s.unkept = err != nil
		if err != nil && !w.keptBadly {
			severity.Warnings(klog.FromContext(ctx)).Error(err, "Could not store declared rules; if a file is broken at the next start, its last good rules will be unknown")
		}
		w.keptBadly = err != nil
	}
}
