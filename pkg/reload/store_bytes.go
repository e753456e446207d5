package reload

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A RawSource has the rules in the kernel's form. iptables.Kernel is one.
type RawSource interface {
	// RawRule is iptables.Kernel.RawRule.
	RawRule(f rules.Family, r rules.Rule, room []byte) (iptables.RawRule, bool)
}

// A byteFile keeps the bytes of the rules that generations on disk have as text. So a rule that is
// lost while canaryd does not run is written by its bytes like any other: exactly, and without a
// program.
//
// The file is a sequence of gzip's members, each with a checksum. Each save adds a member with the
// new rules. The first member begins with the Identity that the file is bound to, like a
// generation. If a killed process left the last member unfinished, the next save writes the file
// again.
type byteFile struct {
	path     string
	identity Identity
	limit    int64 // the file's size, in bytes; more rules are kept as text only

	mu    sync.Mutex
	read  bool
	size  int64            // of the file as it was read or written last; 0: the file must be written again
	known []uint64         // sorted hashes of the rules on disk
	saved rules.Generation // its rules are on disk, as far as their bytes were known
}

// byteFileHead begins the file.
type byteFileHead struct {
	Format   int      `json:"format"`
	Identity Identity `json:"identity"`
}

const (
	// crowdedFrom is how many rules the file may always have: a small file is not worth a rewrite.
	crowdedFrom = 4096
	// mostInflated bounds the content of a file, in bytes. Rules compress to a twentieth.
	mostInflated = 1 << 30
	// mostRecords bounds how many rules the file has: a megabyte of zeros is a million of them,
	// each with a hash in memory. --max-rules keeps a generation below.
	mostRecords = 1 << 22
	// mostRecord bounds one rule. Netlink counts a rule's bytes by 16 bits.
	mostRecord = 128 << 10
)

// A record is one rule of the file.
type record struct {
	family rules.Family
	iptables.RawRule
}

// hash identifies a record in this process. The file is searched by it, so that no rule is
// written twice.
func (r record) hash() uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	_, _ = h.WriteString(r.family.String())
	_, _ = h.WriteString(r.Text)
	_ = h.WriteByte(0)
	_, _ = h.Write(r.Bytes)
	return h.Sum64()
}

// write writes the record for readRecord: family, and text and bytes with the length before
// each.
func (r record) write(out io.Writer) error {
	head := binary.AppendUvarint([]byte{byte(r.family)}, uint64(len(r.Text)))
	head = binary.AppendUvarint(append(head, r.Text...), uint64(len(r.Bytes)))
	_, err := out.Write(head)
	if err == nil {
		_, err = out.Write(r.Bytes)
	}
	return err
}

// readRecord reads a record that write wrote, for records. The bytes are in room, which the
// next call overwrites. The error is io.EOF at a member's end, and errRecord after damage.
func readRecord(in *bufio.Reader, room *[]byte) (r record, err error) {
	family, err := in.ReadByte()
	if err != nil {
		return record{}, err
	}
	r.family = rules.Family(family)
	piece := func() []byte {
		size, sizeErr := binary.ReadUvarint(in)
		if err != nil || sizeErr != nil || size > mostRecord {
			err = errRecord
			return nil
		}
		*room = slices.Grow((*room)[:0], int(size))[:size]
		if _, readErr := io.ReadFull(in, *room); readErr != nil {
			err = errRecord
		}
		return *room
	}
	r.Text = string(piece())
	r.Bytes = piece()
	return r, err
}

var errRecord = errors.New("no record of a rule")

// each calls do for each record of the members with a valid checksum, up to the first error.
// earlier and rewrite call it.
func (b *byteFile) each(do func(record)) {
	held := 0 // records of the members whose checksum holds
	n := 0
	_, _ = b.records(func(record) error { n++; return nil }, func() { held = n })
	if held == 0 {
		return
	}
	n = 0
	_, _ = b.records(func(r record) error {
		if n++; n > held {
			return io.EOF
		}
		do(r)
		return nil
	}, func() {})
}

// records calls do for each record of the file, and held after each member with a valid
// checksum. It returns the file's size. An error of do ends the reading. each and scan call it.
func (b *byteFile) records(do func(record) error, held func()) (size int64, err error) {
	file, err := private.Open(b.path, os.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer func() { _ = file.Close() }() // read only
	info, err := file.Stat()
	if err != nil {
		return 0, err
	}
	compressed := bufio.NewReader(io.LimitReader(file, b.limit))
	member, err := gzip.NewReader(compressed)
	if err != nil {
		return 0, fmt.Errorf("%s is corrupt: %w", b.path, err)
	}
	left := int64(mostInflated)
	in := bufio.NewReaderSize(nil, 64<<10)
	var room []byte
	for first, n := true, 0; ; first = false {
		member.Multistream(false)
		inflated := &io.LimitedReader{R: member, N: left}
		in.Reset(inflated)
		if first {
			if err := b.checkHead(in); err != nil {
				return 0, err
			}
		}
		for err == nil {
			var r record
			if r, err = readRecord(in, &room); err != nil {
				break
			}
			if n++; n > mostRecords {
				err = fmt.Errorf("more than %d rules", mostRecords)
				break
			}
			err = do(r)
		}
		if !errors.Is(err, io.EOF) || inflated.N == 0 {
			return 0, fmt.Errorf("%s is corrupt: %w", b.path, err)
		}
		held()
		left = inflated.N
		if err = member.Reset(compressed); errors.Is(err, io.EOF) {
			return info.Size(), nil
		}
		if err != nil {
			return 0, fmt.Errorf("%s is corrupt: %w", b.path, err)
		}
	}
}

// checkHead reads the head for records. It returns ErrForeign if the file is bound to another
// Identity; the next save then writes the file again.
func (b *byteFile) checkHead(in *bufio.Reader) error {
	line, err := in.ReadSlice('\n')
	var head byteFileHead
	if err = errors.Join(err, json.Unmarshal(line, &head)); err != nil {
		return fmt.Errorf("%s is corrupt: %w", b.path, err)
	}
	if head != (byteFileHead{everywhere, b.identity}) {
		return ErrForeign
	}
	return nil
}

// earlier calls add with each stored rule of a family; its bytes are valid until add returns.
// On nft the lexicon calls it through Store.Earlier, to write a rule whose bytes this run has
// not read. It ignores the damaged end of a file: iptables-restore writes these rules from
// their text.
func (b *byteFile) earlier(f rules.Family, add func(iptables.RawRule)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.each(func(r record) { // rules behind an error are written as text
		if r.family == f {
			add(r.RawRule)
		}
	})
}

// save adds the rules of a generation that the file does not have, with their bytes from a
// source. It writes the whole file again if that is unusable, half full, or has many old rules.
func (b *byteFile) save(g rules.Generation, from RawSource) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if info, err := os.Stat(b.path); !b.read || err != nil || info.Size() != b.size {
		b.scan() // it was removed, or it is an earlier canaryd's file
	}
	whole, _ := g.Counts()
	if b.size == 0 || b.size > b.limit/2 || len(b.known) > crowdedFrom+3*whole {
		return b.rewrite(g, from)
	}
	var text io.Writer
	var member *gzip.Writer
	var file *os.File
	added, err := b.missing(g, from, func(r record) (err error) {
		if member == nil {
			if file, err = private.Open(b.path, os.O_WRONLY|os.O_APPEND); err != nil {
				return err
			}
			member, _ = gzip.NewWriterLevel(file, gzip.BestSpeed)
			text = member
		}
		return r.write(text)
	})
	switch {
	case file == nil && err != nil: // no file was opened
		b.size = 0
		return err
	case file == nil:
		b.saved = g
		return nil
	}
	err = errors.Join(err, member.Close())
	info, statErr := file.Stat()
	if err = errors.Join(err, statErr, file.Close()); err != nil {
		b.size = 0
		return err
	}
	b.took(g, info.Size(), added)
	return nil
}

// scan reads the hashes of the rules in the file, for save. A file that was made elsewhere, is
// damaged or missing gets size 0, and is written again.
func (b *byteFile) scan() {
	b.read, b.known, b.saved = true, nil, nil
	size, err := b.records(func(r record) error { b.known = append(b.known, r.hash()); return nil }, func() {})
	if err != nil {
		size = 0
	}
	b.took(nil, size, nil)
}

// took notes the file's content after a read or a write: its size, the hashes in added, and
// that it has the rules of g. scan knows no generation, and passes nil.
func (b *byteFile) took(g rules.Generation, size int64, added []uint64) {
	b.known = append(b.known, added...)
	slices.Sort(b.known)
	b.known = slices.Clip(slices.Compact(b.known))
	b.saved, b.size = g, size
}

// missing calls write for each rule that the file does not have, and returns their hashes. save
// and rewrite call it. A rule whose bytes from does not know is left out. It does not search
// chains that share memory with the last save again: there may be tens of thousands of rules.
func (b *byteFile) missing(g rules.Generation, from RawSource, write func(record) error) (added []uint64, err error) {
	met := map[uint64]bool{}
	var room []byte
	for id, section := range g {
		for rule := range section.NewRules(b.saved[id]) {
			if _, opaque := rule.Opaque(); opaque {
				continue // it holds its bytes
			}
			raw, ok := from.RawRule(id.Family, rule, room)
			if room = raw.Bytes; !ok || len(raw.Bytes) > mostRecord || len(raw.Text) > mostRecord {
				continue
			}
			r := record{id.Family, raw}
			hash := r.hash()
			if _, has := slices.BinarySearch(b.known, hash); has || met[hash] {
				continue
			}
			if err := write(r); err != nil {
				return nil, err
			}
			met[hash], added = true, append(added, hash)
		}
	}
	return added, nil
}

// rewrite writes the file again, with the generation's rules. Before them it keeps the file's
// newest other rules for earlier generations: as many again, or crowdedFrom/2 if that is more.
func (b *byteFile) rewrite(g rules.Generation, from RawSource) error {
	earlier := b.known
	b.known, b.saved = nil, nil
	current := []uint64{}
	if len(earlier) > 0 {
		current, _ = b.missing(g, from, func(record) error { return nil })
		slices.Sort(current)
	}
	skip := len(earlier) - len(current) - max(len(current), crowdedFrom/2)
	var kept []uint64
	var size int64
	err := private.Stream(filepath.Dir(b.path), func(file io.Writer) (string, error) {
		buffered := bufio.NewWriterSize(file, 64<<10)
		member, _ := gzip.NewWriterLevel(buffered, gzip.BestSpeed)
		head, err := json.Marshal(byteFileHead{everywhere, b.identity})
		if err != nil {
			return "", err
		}
		if _, err := member.Write(append(head, '\n')); err != nil {
			return "", err
		}
		if len(earlier) > 0 && b.size <= b.limit/2 {
			var failed error
			b.each(func(r record) {
				hash := r.hash()
				if _, is := slices.BinarySearch(current, hash); is {
					return
				}
				if skip--; skip < 0 {
					failed, kept = errors.Join(failed, r.write(member)), append(kept, hash)
				}
			})
			if failed != nil {
				return "", failed
			}
		}
		if current, err = b.missing(g, from, func(r record) error { return r.write(member) }); err != nil {
			return "", err
		}
		return filepath.Base(b.path), errors.Join(member.Close(), buffered.Flush())
	})
	if err == nil {
		var info os.FileInfo
		if info, err = os.Stat(b.path); err == nil {
			size = info.Size()
		}
	}
	if err != nil {
		b.size = 0
		return err
	}
	b.took(g, size, slices.Concat(kept, current))
	return nil
}

// KeepBytes makes SaveBytes write the bytes that a source has.
func (s *Store) KeepBytes(from RawSource) { s.rawRules = from }

// Earlier calls add with each rule of a family whose bytes were kept. It may run concurrently with
// all other methods.
func (s *Store) Earlier(f rules.Family, add func(iptables.RawRule)) { s.bytes.earlier(f, add) }

// SaveBytes writes the bytes of a generation's rules that are not on disk yet. It follows
// SaveState: without the bytes a program restores the same rules.
func (s *Store) SaveBytes(g rules.Generation) error {
	if s.rawRules == nil {
		return nil
	}
	s.step("bytes")
	if err := s.onDisk(func() error { return s.bytes.save(g, s.rawRules) }); err != nil {
		return fmt.Errorf("saving the bytes of rules: %w", err)
	}
	return nil
}
