package reload

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A BytesSource knows the kernel's bytes of rules with a text. iptables.Kernel is one.
type BytesSource interface {
	// InBytes returns the opaque rule that holds the bytes of a rule; false if they are not known, or
	// do not make the rule again.
	InBytes(f rules.Family, r rules.Rule) (rules.Rule, bool)
}

// A byteFile keeps the bytes of the rules that generations on disk have as text. A rule that is
// lost while canaryd does not run is then written by its bytes, as every other, without a program
// and exactly.
//
// The file has one line for each rule: family, a digest of the text, and the opaque rule that holds
// the bytes, with a digest of its own. New lines go to its end. A line that a killed process left
// unfinished has another digest, and counts for nothing. The file is bound to the Identity in its
// first line, as the generations are.
//
// Look up may be called concurrently with everything else; all other methods are for one goroutine.
type byteFile struct {
	path     string
	identity Identity
	limit    int64 // the file's size, in bytes; more rules are kept as text only

	mu    sync.Mutex
	size  int64             // of the file as it was read or written last; 0: it has to be written anew
	known []uint64          // sorted: the beginnings of the digests on disk
	lines map[digest]string // the file's rules, while a replay looks them up
	saved rules.Generation  // its rules are on disk, as far as their bytes were known
}

// A digest names the text of a rule of one family: half of a SHA-256.
type digest [16]byte

func digestOf(f rules.Family, key rules.Key) (d digest) {
	sum := sha256.New()
	_, _ = io.WriteString(sum, f.String()+" "+string(key))
	copy(d[:], sum.Sum(nil))
	return d
}

func (d digest) short() uint64 { return binary.BigEndian.Uint64(d[:]) }

// byteFileHead is the first line of the file.
type byteFileHead struct {
	Format   int      `json:"format"`
	Identity Identity `json:"identity"`
}

// openByteFile reads which rules the file has. A file that was made elsewhere, cannot be read or is
// missing has none.
func openByteFile(dir string, identity Identity) *byteFile {
	b := &byteFile{path: filepath.Join(dir, "rules.bytes"), identity: identity, limit: maxStored}
	b.scan()
	return b
}

// scan reads which rules the file has.
func (b *byteFile) scan() {
	b.size, b.known, b.saved = 0, nil, nil
	last := ""
	size, err := b.each(func(d digest, rule string) { b.known, last = append(b.known, d.short()), rule })
	if err != nil {
		b.known = nil
		return
	}
	if _, whole := heldIn(last); !whole && len(b.known) > 0 {
		b.known = b.known[:len(b.known)-1]
	}
	b.size = size
	slices.Sort(b.known)
	b.known = slices.Clip(slices.Compact(b.known))
}

// each calls do for each complete line of the file, and returns the file's size.
func (b *byteFile) each(do func(d digest, rule string)) (size int64, err error) {
	text, err := private.Read(b.path, b.limit)
	if err != nil {
		return 0, err
	}
	first, rest, _ := bytes.Cut(text, []byte("\n"))
	var head byteFileHead
	if err := json.Unmarshal(first, &head); err != nil {
		return 0, fmt.Errorf("%s is corrupt: %w", b.path, err)
	}
	if head.Format != everywhere || head.Identity != b.identity {
		return 0, ErrForeign
	}
	for len(rest) > 0 {
		var line []byte
		line, rest, _ = bytes.Cut(rest, []byte("\n"))
		name, rule, found := bytes.Cut(line, []byte(" "))
		var d digest
		if !found || len(name) != hex.EncodedLen(len(d)) {
			continue
		}
		if _, err := hex.Decode(d[:], name); err == nil {
			do(d, string(rule))
		}
	}
	return int64(len(text)), nil
}

// lookUp returns the opaque rule with the bytes of a text.
func (b *byteFile) lookUp(f rules.Family, key rules.Key) (rules.Rule, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	d := digestOf(f, key)
	at, has := slices.BinarySearch(b.known, d.short())
	if !has {
		return rules.Rule{}, false
	}
	if b.lines == nil {
		b.lines = make(map[digest]string, len(b.known))
		_, _ = b.each(func(d digest, rule string) { b.lines[d] = rule }) // without lines nothing is found
	}
	rule, ok := heldIn(b.lines[d])
	if !ok { // the next save writes it again
		b.known = slices.Delete(b.known, at, at+1)
	}
	return rule, ok
}

// heldIn returns the opaque rule of a line, if its bytes are those that its digest names.
func heldIn(line string) (rules.Rule, bool) {
	rule, err := rules.ParseRule(line)
	if err != nil {
		return rules.Rule{}, false
	}
	_, _, _, ok := rule.Bytes()
	return rule, ok
}

// close forgets the lines that were looked up: they take as much memory as the file has bytes.
func (b *byteFile) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lines = nil
}

// save adds the rules of a generation that the file does not have.
func (b *byteFile) save(g rules.Generation, from BytesSource) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if info, err := os.Stat(b.path); err != nil || info.Size() != b.size {
		b.scan() // it was removed, or another canaryd wrote it
	}
	text, added := b.missing(g, from)
	if len(added) == 0 {
		b.saved = g
		return nil
	}
	whole, _ := g.Counts()
	if b.size == 0 || len(b.known)+len(added) > crowdedFrom+3*whole || b.size+int64(len(text)) > b.limit {
		return b.rewrite(g, from)
	}
	file, err := private.Open(b.path, os.O_WRONLY|os.O_APPEND)
	if err != nil {
		return err
	}
	n, err := file.Write(text)
	if err = errors.Join(err, file.Close()); err != nil {
		b.size = 0
		return err
	}
	b.size += int64(n)
	b.took(g, added)
	return nil
}

// crowdedFrom is how many rules the file may have whatever the generation has: a small file is not
// worth a rewrite.
const crowdedFrom = 4096

func (b *byteFile) took(g rules.Generation, added []uint64) {
	b.known = append(b.known, added...)
	slices.Sort(b.known)
	b.saved, b.lines = g, nil
}

// missing returns lines for the rules that the file does not have. Chains that are the same memory
// as those of the last save are not searched again: there may be tens of thousands of rules.
func (b *byteFile) missing(g rules.Generation, from BytesSource) (text []byte, added []uint64) {
	met := map[uint64]bool{}
	for id, section := range g {
		for r := range section.NewRules(b.saved[id]) {
			if _, opaque := r.Opaque(); opaque {
				continue
			}
			d := digestOf(id.Family, r.Key())
			if _, has := slices.BinarySearch(b.known, d.short()); has || met[d.short()] {
				continue
			}
			if held, ok := from.InBytes(id.Family, r); ok && held.HasBytes() {
				met[d.short()] = true
				text, added = appendLine(text, d, held.Spec), append(added, d.short())
			}
		}
	}
	return text, added
}

// appendLine begins with a line break, because the line before may be unfinished.
func appendLine(text []byte, d digest, rule string) []byte {
	text = append(hex.AppendEncode(append(text, '\n'), d[:]), ' ')
	return append(text, rule...)
}

// rewrite writes the file anew: the rules of the generation, and as many others, the newest, for
// earlier generations. What exceeds the limit is left out.
func (b *byteFile) rewrite(g rules.Generation, from BytesSource) error {
	type line struct {
		d    digest
		rule string
	}
	var earlier []line
	if b.size > 0 {
		_, _ = b.each(func(d digest, rule string) { earlier = append(earlier, line{d, rule}) })
	}
	head, err := json.Marshal(byteFileHead{everywhere, b.identity})
	if err != nil {
		return err
	}
	b.known, b.saved = nil, nil
	text, added := b.missing(g, from)
	has := make(map[uint64]bool, 2*len(added))
	for _, short := range added {
		has[short] = true
	}
	wanted := map[digest]bool{} // rules of the generation whose bytes only the file knows
	for id, section := range g {
		for r := range section.NewRules(rules.Section{}) {
			wanted[digestOf(id.Family, r.Key())] = true
		}
	}
	others := max(len(added), crowdedFrom/2)
	for _, e := range slices.Backward(earlier) {
		fits := int64(len(head)+len(text)+len(e.rule)+64) <= b.limit
		if short := e.d.short(); !has[short] && fits && (wanted[e.d] || others > 0) {
			if !wanted[e.d] {
				others--
			}
			has[short] = true
			text, added = appendLine(text, e.d, e.rule), append(added, short)
		}
	}
	if int64(len(head)+len(text)) > b.limit {
		text = text[:bytes.LastIndexByte(text[:b.limit-int64(len(head))], '\n')]
	}
	if err := private.Write(b.path, slices.Concat(head, text)); err != nil {
		b.size = 0
		return err
	}
	b.size = int64(len(head) + len(text))
	b.took(g, added)
	return nil
}

// KeepBytes has the store write, with each generation that it saves, the bytes of its rules.
func (s *Store) KeepBytes(from BytesSource) { s.bytesFrom = from }

// LookUpBytes returns the opaque rule that holds the bytes of the rule of this Key, as some
// generation had it. It may be called concurrently with everything else.
func (s *Store) LookUpBytes(f rules.Family, key rules.Key) (rules.Rule, bool) {
	return s.bytes.lookUp(f, key)
}

// saveBytes writes the bytes of a generation's rules.
func (s *Store) saveBytes(g rules.Generation) error {
	if s.bytesFrom == nil {
		return nil
	}
	s.step("bytes")
	if err := s.onDisk(func() error { return s.bytes.save(g, s.bytesFrom) }); err != nil {
		return fmt.Errorf("saving the bytes of rules: %w", err)
	}
	return nil
}
