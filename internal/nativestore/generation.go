package nativestore

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/onrequest"
	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	// keptEach is how many generations of a table are kept, including the one in force.
	// keptMost and keptBytes bound the generations of all tables that are not in force.
	keptEach  = 5
	keptMost  = 256
	keptBytes = 64 << 20
)

// A Header describes a generation without its content. It is the first part of the file.
type Header struct {
	Format   int         `json:"format"`
	Identity Identity    `json:"identity"`
	ID       string      `json:"id"`
	Family   string      `json:"family"` // as nftables has it
	Name     string      `json:"table"`  // with its family
	Made     reload.Made `json:"made,omitempty"`
	Captured time.Time   `json:"captured"` // when it was learned
	Chains   int         `json:"chains"`
	Rules    int         `json:"rules"`
	Elements int         `json:"elements"`

	// The following fields are only in memory, for lists of headers.
	Foreign  string `json:"-"` // why it must not be restored here; "" if it may be
	size     int64
	modified time.Time
}

// A Generation is the expected content of one native table, as a file.
type Generation struct {
	Header
	Read   time.Duration `json:"read"` // the machine's uptime when the remaining timeouts were read
	Digest string        `json:"digest"`
	Table  *native.Table `json:"content"`
}

// IDOf returns the ID of a table's content. It is as long as the IDs of iptables' generations.
func IDOf(d native.Digest) string { return d.String()[:12] }

var idPattern = regexp.MustCompile(`^[0-9a-f]{12}$`)

// GenerationOf returns a table in its stored form, for Save and for undoing a restore. left is
// the machine's uptime when the remaining timeouts of elements were read: later they count from
// there.
func GenerationOf(t *native.Table, digest native.Digest, made reload.Made, captured time.Time, left time.Duration) Generation {
	g := Generation{Read: left, Digest: digest.String(), Table: t, Header: Header{
		ID: IDOf(digest), Family: t.ID.Family.NFT(), Name: t.ID.NFT(), Made: made, Captured: captured.UTC()}}
	g.Chains, g.Rules, g.Elements = t.Counts()
	return g
}

// IDs returns the IDs of the native tables' generations in a state folder.
func IDs(dir string) []string { return reload.IDsIn(filepath.Join(dir, folder)) }

func (s *Store) folder() string { return filepath.Join(filepath.Dir(s.path), folder) }

func (s *Store) file(id string) string { return filepath.Join(s.folder(), id+".json") }

// keep writes a generation for Save, unless its file already holds exactly these elements. A
// generation's ID does not depend on elements that packets or time change.
func (s *Store) keep(g Generation) error {
	if _, err := os.Stat(s.file(g.ID)); s.written[g.Table.ID] == g.Table && !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := s.put(g); err != nil {
		return err
	}
	s.written = tableid.With(s.written, g.Table.ID, g.Table)
	return nil
}

// put writes a generation that the index need not name, such as the one that undoes a restore.
// Prune may remove it.
func (s *Store) put(g Generation) error {
	g.Format, g.Identity = format, s.Identity
	text, err := json.Marshal(g)
	if err == nil && len(text) > mostStored {
		err = fmt.Errorf("it takes %d bytes, and canaryd keeps %d at most", len(text), mostStored)
	}
	if err == nil {
		err = private.Folder(s.folder())
	}
	if err == nil {
		err = private.Write(s.file(g.ID), text)
	}
	return err
}

// Read returns a stored generation, even one of another node or boot: MayRestore checks that.
// The error is ErrNothingStored if there is none.
func (s *Store) Read(id string) (g Generation, err error) {
	if !idPattern.MatchString(id) {
		return Generation{}, fmt.Errorf("%w: %q", reload.ErrNothingStored, id)
	}
	text, err := private.Read(s.file(id), mostStored)
	if errors.Is(err, fs.ErrNotExist) {
		return Generation{}, fmt.Errorf("%w: %s", reload.ErrNothingStored, id)
	}
	if err == nil {
		err = json.Unmarshal(text, &g)
	}
	switch {
	case err != nil:
		return Generation{}, fmt.Errorf("stored generation %s of a native table: %w", id, err)
	case g.Format != format:
		return Generation{}, fmt.Errorf("stored generation %s of a native table has format %d, and this canaryd reads %d", id, g.Format, format)
	case g.Table == nil || g.Table.Digest().String() != g.Digest || g.ID != id || !strings.HasPrefix(g.Digest, id):
		return Generation{}, fmt.Errorf("stored generation %s of a native table is corrupt: its content does not match its digest", id)
	}
	return g, nil
}

// foreign returns why content that was stored elsewhere must not be restored here; "" if it
// may. made is the boot, network namespace and kernel of then.
func (s *Store) foreign(made Identity) string {
	for _, c := range []struct{ what, stored, now string }{
		{"boot", made.BootID, s.Identity.BootID},
		{"network namespace", made.NetNS, s.Identity.NetNS},
		{"kernel", made.Release, s.Identity.Release},
	} {
		if c.stored != c.now {
			return fmt.Sprintf("%v: %s %q, here %q", reload.ErrForeign, c.what, c.stored, c.now)
		}
	}
	return ""
}

// List returns the generations on disk, grouped by table, each group with the newest first. It
// reads a file again only if it changed.
func (s *Store) List() []Header {
	entries, err := os.ReadDir(s.folder())
	if err != nil {
		return nil
	}
	headers := map[string]Header{}
	var list []Header
	for _, e := range entries {
		id, ok := strings.CutSuffix(e.Name(), ".json")
		info, err := e.Info()
		if !ok || err != nil || !idPattern.MatchString(id) {
			continue
		}
		h, known := s.headers[id]
		if !known || h.size != info.Size() || !h.modified.Equal(info.ModTime()) {
			if h, err = readHeader(s.file(id)); err != nil || h.ID != id || h.Format != format {
				continue // Read reports the reason to an operator
			}
			h.Foreign, h.size, h.modified = s.foreign(h.Identity), info.Size(), info.ModTime()
		}
		headers[id] = h
		list = append(list, h)
	}
	s.headers = headers
	sorting.Stable(list, func(a, b Header) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), b.Captured.Compare(a.Captured))
	})
	return list
}

// readHeader reads a generation's file up to its content, which may have 12 MB: List needs only
// the fields before it.
func readHeader(path string) (h Header, err error) {
	file, err := private.Open(path, os.O_RDONLY)
	if err != nil {
		return h, err
	}
	defer func() { _ = file.Close() }() // read only
	decoder := json.NewDecoder(file)
	if _, err := decoder.Token(); err != nil {
		return h, err
	}
	fields := map[string]any{"format": &h.Format, "identity": &h.Identity, "id": &h.ID, "family": &h.Family, "table": &h.Name,
		"made": &h.Made, "captured": &h.Captured, "chains": &h.Chains, "rules": &h.Rules, "elements": &h.Elements}
	for decoder.More() {
		token, err := decoder.Token()
		if err != nil {
			return h, err
		}
		word, _ := token.(string)
		target, known := fields[word]
		if !known {
			break
		}
		if err := decoder.Decode(target); err != nil {
			return h, err
		}
	}
	return h, nil
}

// Prune removes old generations after a save, but none that the saved index names: keptEach of
// a table, keptMost files and keptBytes in all stay. An error leaves files that the next Prune
// tries again.
func (s *Store) Prune(saved Stored) error {
	keeps, each := map[string]bool{}, map[string]int{}
	for _, t := range saved.Tables {
		keeps[t.Generation.ID] = true
		each[t.Generation.Name]++
	}
	list := s.List()
	sorting.Stable(list, func(a, b Header) int { return b.Captured.Compare(a.Captured) })
	files, size := 0, int64(0)
	var errs []error
	for _, k := range list {
		if keeps[k.ID] {
			continue
		}
		if each[k.Name] < keptEach && files < keptMost && size+k.size <= keptBytes {
			each[k.Name]++
			files, size = files+1, size+k.size
			continue
		}
		errs = append(errs, os.Remove(s.file(k.ID)))
	}
	return errors.Join(append(errs, s.removeUnfinished())...)
}

// removeUnfinished removes the unfinished files of a killed process.
func (s *Store) removeUnfinished() error {
	left, err := filepath.Glob(filepath.Join(s.folder(), "*"+private.Unfinished))
	for _, path := range left {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}

// Show returns a stored generation of a native table in words. The error is
// reload.ErrNothingStored if no generation has that ID.
func (s *Store) Show(id string) (string, error) {
	g, err := s.Read(id)
	if err != nil {
		return "", err
	}
	return g.Text(s), nil
}

// Text returns the generation in words, under a heading that says if s must not restore it
// here; "" without a table.
func (g Generation) Text(s *Store) string {
	if g.Table == nil {
		return ""
	}
	var text strings.Builder
	text.WriteString(onrequest.Heading(g.ID+" of table "+g.Name, g.Captured, s.foreign(g.Identity)))
	for l := range g.Table.Lines() {
		fmt.Fprintln(&text, l.Text)
	}
	return text.String()
}
