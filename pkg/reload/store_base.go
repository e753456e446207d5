package reload

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A base is a file of chains and jumps that the files of generations refer to: they name it and
// hold only the difference. A base never changes, is always complete, and is named by its digest.
type base struct {
	name     string
	size     int64
	modified time.Time
	changes  int64 // bytes of the differences that were written since
	print    fingerprint
}

const baseSuffix = ".base"

// baseName matches the name of a base: half of a SHA-256.
var baseName = regexp.MustCompile(`^[0-9a-f]{32}$`)

// A baseLine is one line of a base's file. The first line has the format. Then each section has a
// line with family, table and jumps, followed by a line for each chain.
type baseLine struct {
	Format int             `json:"format,omitempty"`
	Family rules.Family    `json:"family,omitempty"`
	Table  rules.TableName `json:"table,omitempty"`
	Jumps  []rules.Jump    `json:"jumps,omitempty"`
	Name   string          `json:"name,omitempty"`
	Policy string          `json:"policy,omitempty"`
	Rules  []string        `json:"rules,omitempty"`
}

// generationsFolder is the folder of the generations in a state folder.
const generationsFolder = "generations"

func (s *Store) folder() string { return filepath.Join(s.dir, generationsFolder) }

func (s *Store) basePath(name string) string { return filepath.Join(s.folder(), name+baseSuffix) }

// writeBase writes the chains and jumps of g line by line. As one piece of JSON they would take
// three times their size in memory. encode calls it if no known base fits a generation.
func (s *Store) writeBase(g rules.Generation) (*base, error) {
	b := base{print: fingerprintOf(g)}
	err := private.Stream(s.folder(), func(file io.Writer) (string, error) {
		digest := sha256.New()
		buffered := bufio.NewWriterSize(io.MultiWriter(file, digest), 64<<10)
		if err := encodeBase(buffered, g); err != nil {
			return "", err
		}
		if err := buffered.Flush(); err != nil {
			return "", err
		}
		b.name = nameOf(digest.Sum(nil))
		return b.name + baseSuffix, nil
	})
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(s.basePath(b.name))
	if err != nil {
		return nil, err
	}
	b.size, b.modified = info.Size(), info.ModTime()
	return &b, nil
}

// nameOf returns the name of the base with that SHA-256.
func nameOf(digest []byte) string { return hex.EncodeToString(digest)[:32] }

// encodeBase writes the lines of a base, for writeBase. Families and tables have a fixed order,
// so that equal content has an equal name.
func encodeBase(w io.Writer, g rules.Generation) error {
	lines := json.NewEncoder(w)
	lines.SetEscapeHTML(false)
	if err := lines.Encode(baseLine{Format: everywhere}); err != nil {
		return err
	}
	var specs []string
	for _, f := range rules.Families() {
		for _, t := range rules.AllTables() {
			section, ok := g[f.Table(t)]
			if !ok {
				continue
			}
			if err := lines.Encode(baseLine{Family: f, Table: t, Jumps: section.Jumps}); err != nil {
				return err
			}
			for _, c := range section.Chains {
				specs = specs[:0]
				for _, r := range c.Rules {
					specs = append(specs, r.Spec)
				}
				if err := lines.Encode(baseLine{Name: c.Name, Policy: c.Policy, Rules: specs}); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// errNoBase: the base of a generation does not exist.
var errNoBase = errors.New("the file that it rests on is missing")

// readBase returns the chains and jumps of a base, if its content matches its name. resolve
// needs it to load a generation; errNoBase means that the file is missing.
func (s *Store) readBase(name string) (rules.Generation, error) {
	if !baseName.MatchString(name) {
		return nil, fmt.Errorf("%q is not the name of a base", name)
	}
	path := s.basePath(name)
	file, err := private.Open(path, os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s", errNoBase, path)
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // read only
	digest := sha256.New()
	g, err := decodeBase(io.TeeReader(io.LimitReader(file, maxStored), digest))
	if errors.Is(err, ErrNewer) {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("%s is corrupt: %w", path, err)
	}
	if got := nameOf(digest.Sum(nil)); got != name {
		return nil, fmt.Errorf("%s is corrupt: its content has the digest %s", path, got)
	}
	return g, nil
}

// decodeBase reads the lines that encodeBase wrote, for readBase. ErrNewer: a newer canaryd
// wrote them. After any other error the file is corrupt.
func decodeBase(r io.Reader) (rules.Generation, error) {
	lines := json.NewDecoder(r)
	lines.DisallowUnknownFields()
	var first baseLine
	if err := lines.Decode(&first); err != nil {
		return nil, err
	}
	if first.Format > format {
		return nil, fmt.Errorf("%w (format %d, here %d)", ErrNewer, first.Format, format)
	}
	g := rules.Generation{}
	var in baseLine // the line that began the current section
	var chains []rules.Chain
	put := func() {
		if in.Table != "" {
			g = g.With(in.Family.Table(in.Table), rules.Section{Chains: chains, Jumps: in.Jumps})
		}
	}
	for {
		var line baseLine
		err := lines.Decode(&line)
		if errors.Is(err, io.EOF) {
			put()
			return g, nil
		}
		if err != nil {
			return nil, err
		}
		if line.Table != "" {
			put()
			in, chains = line, nil
			continue
		}
		chain := rules.Chain{Name: line.Name, Policy: line.Policy}
		if len(line.Rules) > 0 {
			chain.Rules = make([]rules.Rule, len(line.Rules))
		}
		for i, spec := range line.Rules {
			if chain.Rules[i], err = rules.ParseRule(spec); err != nil {
				return nil, err
			}
		}
		chains = append(chains, chain)
	}
}

// unchanged reports whether a base's file is as it was written.
func (s *Store) unchanged(b *base) bool {
	info, err := os.Stat(s.basePath(b.name))
	return err == nil && info.Size() == b.size && info.ModTime().Equal(b.modified)
}
