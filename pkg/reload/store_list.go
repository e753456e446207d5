package reload

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/internal/sorting"
)

// Made is the origin of a stored generation.
type Made string

// The origins of generations; "" is unknown, in files of an older canaryd.
const (
	MadeAtStart  Made = "start"    // the rules in force when canaryd began to learn
	MadeByOwners Made = "owners"   // owners changed their rules, and canaryd learned them
	MadeDeclared Made = "declared" // the declared sources
	MadeRestored Made = "restored" // `canaryd restore --generation`
)

// Kept is a generation on disk, as a list shows it.
type Kept struct {
	ID       string
	Saved    time.Time
	Captured time.Time
	Source   string
	Made     Made
	// Rules includes jumps. Counted is false for a file of an older canaryd, which has no counts.
	Counted       bool
	Rules, Chains int
	// Sparse means that it has less than a tenth of the rules of the largest generation here. A
	// flush that was learned as an owner's decision leaves such a generation.
	Sparse bool
	// Foreign is why it must not be restored here; "" if it may be.
	Foreign string
}

// sparseShare is how many times as many rules the largest generation has as a Sparse one.
const sparseShare = 10

// A header is the part of a generation's file before its rules.
type header struct {
	modified time.Time
	size     int64
	stored   storedFile
	err      error
}

// List returns the generations on disk, newest first. It returns none if the folder cannot be read.
func (s *Store) List() []Kept {
	list, _ := s.list()
	return list
}

// list is List with the error of the folder. It reads a file's header only if the file has
// changed since the last list. A file that cannot be read is in the list, with the reason in
// Foreign.
func (s *Store) list() ([]Kept, error) {
	entries, err := os.ReadDir(s.folder())
	if err != nil {
		return nil, err
	}
	var list []Kept
	headers := map[string]header{}
	for _, e := range entries {
		id, ok := strings.CutSuffix(e.Name(), ".json")
		info, err := e.Info()
		if !ok || err != nil {
			continue
		}
		h, known := s.headers[id]
		if !known || !h.modified.Equal(info.ModTime()) || h.size != info.Size() {
			h = header{modified: info.ModTime(), size: info.Size()}
			h.stored, h.err = s.readHeader(id)
		}
		headers[id] = h
		list = append(list, s.keptOf(id, h))
	}
	s.headers = headers
	sorting.Stable(list, func(a, b Kept) int {
		for _, first := range []string{s.written, s.named} {
			if a.ID == first {
				return -1 // its time says nothing if the clock was set back
			}
			if b.ID == first {
				return 1
			}
		}
		if order := b.Saved.Compare(a.Saved); order != 0 {
			return order
		}
		return s.until[b.ID].Compare(s.until[a.ID]) // the clock of a file system may be coarse
	})
	markSparse(list)
	return list, nil
}

// keptOf returns the list's entry for a file. Foreign says why it must not be restored here: it
// is unreadable, of another identity, or its base is missing.
func (s *Store) keptOf(id string, h header) Kept {
	k := Kept{ID: id, Saved: h.modified}
	if h.err != nil {
		k.Foreign = h.err.Error()
		return k
	}
	k.Captured, k.Source, k.Made = h.stored.Captured, h.stored.Source, h.stored.Made
	if k.Counted = h.stored.Format >= countedFrom; k.Counted {
		k.Rules, k.Chains = h.stored.Rules, h.stored.Chains
	}
	if err := s.checkIdentity(h.stored.Identity); err != nil {
		k.Foreign = err.Error()
	} else if base := h.stored.Base; base != "" {
		if _, err := os.Stat(s.basePath(base)); err != nil {
			k.Foreign = fmt.Sprintf("%v: %s%s", errNoBase, base, baseSuffix)
		}
	}
	return k
}

// markSparse sets Sparse of the generations that are nearly empty. Offered lists these behind
// the others, and Offer warns of them.
func markSparse(list []Kept) {
	most := 0
	for _, k := range list {
		if k.Foreign == "" {
			most = max(most, k.Rules)
		}
	}
	for i, k := range list {
		list[i].Sparse = k.Counted && k.Rules*sparseShare < most
	}
}

// Offered sorts a list for an operator who has to choose. Usable generations are first, then sparse
// ones, then generations that must not be restored here. Within each group the newest is first.
func Offered(list []Kept) []Kept {
	rank := func(k Kept) int {
		switch {
		case k.Foreign != "":
			return 2
		case k.Sparse:
			return 1
		default:
			return 0
		}
	}
	list = slices.Clone(list)
	sorting.Stable(list, func(a, b Kept) int { return rank(a) - rank(b) })
	return list
}

// readHeader reads a generation's file up to its rules, which may take 10 MB. list calls it for
// each new file. With an error, the fields before the damage are set.
func (s *Store) readHeader(id string) (storedFile, error) {
	var h storedFile
	file, err := private.Open(s.path(id), os.O_RDONLY)
	if err != nil {
		return h, err
	}
	defer func() { _ = file.Close() }() // read only
	fields := map[string]any{
		"format": &h.Format, "identity": &h.Identity, "id": &h.ID, "source": &h.Source, "captured": &h.Captured,
		"made": &h.Made, "rules": &h.Rules, "chains": &h.Chains, "base": &h.Base,
	}
	decoder := json.NewDecoder(file)
	if _, err := decoder.Token(); err != nil {
		return h, fmt.Errorf("stored generation %s is corrupt: %w", id, err)
	}
	for decoder.More() {
		name, err := decoder.Token()
		if err != nil {
			return h, fmt.Errorf("stored generation %s is corrupt: %w", id, err)
		}
		if h.Format > format {
			return h, fmt.Errorf("stored generation %s: %w (format %d, here %d)", id, ErrNewer, h.Format, format)
		}
		field, _ := name.(string)
		if field == "generation" || field == "difference" {
			break
		}
		target, ok := fields[field]
		if !ok {
			return h, fmt.Errorf("stored generation %s is corrupt: unknown field %q", id, field)
		}
		if err := decoder.Decode(target); err != nil {
			return h, fmt.Errorf("stored generation %s is corrupt: %w", id, err)
		}
	}
	return h, nil
}

// Offer names the generations that may be restored here, for the error about a missing
// generation: the operator can choose one.
func (s *Store) Offer() string {
	var ids []string
	for _, k := range Offered(s.List()) {
		switch {
		case k.Foreign != "":
		case k.Sparse:
			ids = append(ids, fmt.Sprintf("%s (nearly empty)", k.ID))
		default:
			ids = append(ids, k.ID)
		}
	}
	if len(ids) == 0 {
		return "there is none"
	}
	return "there are " + strings.Join(ids, ", ")
}

// Show returns the generation with that ID, to be printed or to become the baseline. If it must
// not be restored here, note says why. Any goroutine may call it.
func (s *Store) Show(id string) (stored Stored, note string, err error) {
	stored, _, err = s.load(id, func(made Identity) error {
		if err := s.checkIdentity(made); err != nil {
			note = err.Error()
		}
		return nil
	})
	if err != nil {
		note = ""
	}
	return stored, note, err
}
