package reload

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A storedFile is the file of a generation: complete, or as a difference from a base.
type storedFile struct {
	Stored
	Base       string     `json:"base,omitempty"`
	Difference difference `json:"difference,omitempty"`
}

const (
	// wholeBelow is the size below which a generation is always written complete: a node with 400
	// rules needs no second file.
	wholeBelow = 64 << 10
	// differenceShare is the share of the complete generation, as a divisor, that a difference may
	// take. All differences since the base was written may take as much as the complete generation.
	differenceShare = 4
	// staleShare is how many times as large as the generation its base may be. Otherwise the next
	// start would need too much time and memory.
	staleShare = 4
)

// encode returns the content of a generation's file, for Save. If the known base does not fit,
// it writes another base first. A small generation needs none.
func (s *Store) encode(stored Stored) ([]byte, error) {
	g := stored.Generation
	size := sizeOf(g)
	if size > maxStored {
		return nil, fmt.Errorf("it would have %d MiB, and canaryd reads %d at most", size>>20, maxStored>>20)
	}
	if size < s.wholeBelow {
		s.rests = ""
		return json.Marshal(storedFile{Stored: stored})
	}
	stored.Generation = nil
	if b := s.base; b != nil && b.size <= staleShare*size && s.unchanged(b) {
		d := b.print.difference(g)
		if n := d.size(); n <= size/differenceShare && b.changes+n <= size {
			b.changes += n
			s.rests = b.name
			return json.Marshal(storedFile{Stored: stored, Base: b.name, Difference: d})
		}
	}
	_ = s.pruneBases() // the space may be needed; a failure to remove prevents no write
	s.step("base")
	b, err := s.writeBase(g)
	if err != nil {
		return nil, err
	}
	s.base, s.rests = b, b.name
	return json.Marshal(storedFile{Stored: stored, Base: b.name, Difference: b.print.difference(g)})
}

// sizeOf estimates how many bytes g takes on disk. encode decides by it whether to write a
// difference.
func sizeOf(g rules.Generation) int64 {
	n := 0
	for _, section := range g {
		for _, h := range section.Jumps {
			n += jumpSize(h)
		}
		for _, c := range section.Chains {
			n += len(`{"name":"","rules":[]}`) + len(c.Name)
			for _, r := range c.Rules {
				n += len(`"",`) + len(r.Spec)
			}
		}
	}
	return int64(n)
}

// load returns the generation with that ID, if check accepts its identity and its content
// matches its name. It also returns its base; nil if it is complete. loadIf and Show call it.
func (s *Store) load(id string, check func(Identity) error) (Stored, *base, error) {
	if !idPattern.MatchString(id) {
		return Stored{}, nil, fmt.Errorf("%q is not a generation's ID (12 hexadecimal digits): %w", id, ErrNothingStored)
	}
	for again := true; ; again = false {
		var file storedFile
		if err := s.read(s.path(id), &file); err != nil {
			return Stored{}, nil, err
		}
		if err := check(file.Identity); err != nil {
			return Stored{}, nil, err
		}
		stored, rests, err := s.resolve(file)
		if again && errors.Is(err, errNoBase) {
			continue // the daemon may have written it again meanwhile, on another base
		}
		if err != nil {
			return Stored{}, nil, fmt.Errorf("stored generation %s: %w", id, err)
		}
		if err := checkContent(stored, id); err != nil {
			return stored, rests, err
		}
		// The version that saved a rule may have had no words for it, or other bytes.
		stored.Generation = stored.Generation.WithTexts(func(table rules.TableID, _ string, rule rules.Rule) rules.Rule {
			return iptables.Reread(table.Family, rule)
		})
		return stored, rests, nil
	}
}

// resolve returns the complete generation of a file, and its base; nil if it has none. load
// calls it. errNoBase means that the base's file is missing.
func (s *Store) resolve(file storedFile) (Stored, *base, error) {
	if file.Base == "" && file.Difference == nil {
		return file.Stored, nil, nil
	}
	if file.Format < basedFrom || file.Base == "" || file.Generation != nil {
		return Stored{}, nil, errors.New("it is corrupt: a complete generation rests on no base")
	}
	chains, err := s.readBase(file.Base)
	if err != nil {
		return Stored{}, nil, err
	}
	if file.Generation, err = file.Difference.apply(chains); err != nil {
		return Stored{}, nil, fmt.Errorf("it is corrupt: %w", err)
	}
	info, err := os.Stat(s.basePath(file.Base))
	if err != nil {
		return file.Stored, nil, nil // the generation was read; the next difference rests on another base
	}
	return file.Stored, &base{name: file.Base, size: info.Size(), modified: info.ModTime(), print: fingerprintOf(chains)}, nil
}

// pruneBases removes the bases that neither a generation on disk nor the next difference needs.
// A generation that cannot be read for now may need any base; a file that is no generation
// needs none. encode calls it before it writes a base, and prune.
func (s *Store) pruneBases() error {
	list, err := s.list()
	if err != nil {
		return err
	}
	needed := map[string]bool{}
	for _, k := range list {
		h := s.headers[k.ID]
		if _, unread := errors.AsType[*fs.PathError](h.err); unread {
			return nil
		}
		needed[h.stored.Base] = true
	}
	if s.base != nil {
		needed[s.base.name] = true
	}
	entries, err := os.ReadDir(s.folder())
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), baseSuffix); ok && baseName.MatchString(name) && !needed[name] {
			s.step("prune base")
			errs = append(errs, os.Remove(s.basePath(name)))
		}
	}
	return errors.Join(errs...)
}
