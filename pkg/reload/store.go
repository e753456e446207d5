package reload

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Errors of a Store that callers distinguish.
var (
	// ErrNothingStored: no generation was ever stored, or none has that ID.
	ErrNothingStored = errors.New("no such generation is stored")
	// ErrForeign: the stored file is of another boot, network namespace, backend or iptables
	// version, and must not be replayed here.
	ErrForeign = errors.New("the stored generation was made elsewhere")
	// ErrNewer: a newer canaryd wrote the file, and this version does not know its meaning.
	ErrNewer = errors.New("a newer canaryd wrote it")
)

const (
	// format is the newest format of the files. Format 0 has no format field. Format 1 has no
	// quarantine, no named jumps and no ipsets; 2 has no counts and no Made; 3 has no base. Format
	// 4 has no chains that protected rules lead to; 5 has no sum and no pause. Format 6 has no
	// names of ipsets next to the bytes of rules, and 7 has no tables that are guarded on demand.
	// All else is the same. A change that adds a field or changes a meaning increments it, and
	// reads the older formats or refuses them by name. State and generation share one number. An
	// older canaryd that read the state but not its generation would otherwise take an older
	// generation for the newest.
	format = 8
	// everywhere is the format of a file that names no table that is guarded on demand. Nearly all
	// nodes have only such files, and an older canaryd reads them.
	everywhere = 7
	// countedFrom is the first format whose generations have counts of rules and chains.
	countedFrom = 3
	// basedFrom is the first format whose generations may rest on a base.
	basedFrom = 4
	// maxStored bounds the size of a file to read, in bytes: 5,000 services need 10 MB. Reading a
	// file takes about three times its size in memory.
	maxStored = 64 << 20
)

// An Identity names the environment that a stored generation is bound to. Rules of another boot are
// out of date. Another version of iptables may misread them: 1.8.7 reads some rules of 1.8.8
// without their match.
type Identity struct {
	BootID  string `json:"bootID"`
	NetNS   string `json:"netns"`
	Backend string `json:"backend"`
	Version string `json:"iptables"`
}

// Stored is a generation on disk, with its origin. The counts are written before the generation, so
// that listing the files does not read it.
type Stored struct {
	Format     int              `json:"format"`
	Identity   Identity         `json:"identity"`
	ID         string           `json:"id"`
	Source     string           `json:"source"`
	Captured   time.Time        `json:"captured"` // when the generation was learned
	Made       Made             `json:"made,omitempty"`
	Rules      int              `json:"rules"` // jumps included
	Chains     int              `json:"chains"`
	Generation rules.Generation `json:"generation,omitempty"`
}

// State is the last knowledge of canaryd: the generation that was in force, and the planted marks.
type State struct {
	Format    int       `json:"format"`
	Identity  Identity  `json:"identity"`
	ID        string    `json:"id"`
	Confirmed time.Time `json:"confirmed"` // when it was last seen in force
	// Uptime is the machine's uptime at Confirmed (CLOCK_BOOTTIME). It gives the age of the state,
	// because the wall clock may be set.
	Uptime time.Duration `json:"uptime"`
	Marks  canary.Marks  `json:"marks"`
	// Quarantine has the rules of the generation that could not be put back.
	Quarantine Quarantine `json:"quarantine,omitempty"`
	// MadeTables are the tables that did not exist before canaryd wrote to them.
	MadeTables Tables `json:"madeTables,omitempty"`
	// Pause says until when replays were paused; nil if they were not.
	Pause *Pause `json:"pause,omitempty"`
	// Policies has the learned policies of built-in chains, and those policies that an operator has
	// accepted.
	Policies map[rules.Family]map[rules.TableName]map[string]string `json:"policies,omitempty"`
	// Sum is the sum of the text before it in the file; "" in a file of an older canaryd.
	Sum string `json:"sum,omitempty"`
}

// A Pause says until when an operator has paused replays. Uptime is the machine's uptime then,
// because the wall clock may be set.
type Pause struct {
	Until  time.Time     `json:"until"`
	Uptime time.Duration `json:"uptime"`
	Since  time.Time     `json:"since"`
	By     string        `json:"by,omitempty"`  // who requested it
	Why    string        `json:"why,omitempty"` // and why
}

// Tables is a set of tables. It is a value.
type Tables map[rules.Family][]rules.TableName

// With returns the tables with one more. The daemon notes in MadeTables each table that its
// write made.
func (m Tables) With(f rules.Family, t rules.TableName) Tables {
	if slices.Contains(m[f], t) {
		return m
	}
	next := maps.Clone(m)
	if next == nil {
		next = Tables{}
	}
	next[f] = append(slices.Clone(m[f]), t)
	return next
}

// A Store keeps generations and the marks in one folder. It keeps the newest five generations, and
// the fullest of the last hour and of each day of a week. Its files have mode 0600 and are written
// atomically. One goroutine may use it, and no other process may use the folder.
type Store struct {
	dir        string
	identity   Identity
	written    string // the generation that the next state names
	format     int    // of its file, if this store wrote that
	named      string // the generation that the state on disk names
	headers    map[string]header
	pinned     string               // the generation of a loss that waits; it is not removed
	until      map[string]time.Time // when another generation replaced each one, as far as canaryd knows
	base       *base                // the base that the next difference may use; nil if none is known
	rests      string               // the base of the written generation; "" if that is complete
	wholeBelow int64                // a smaller generation is written complete, in bytes
	stateID    string               // the generation named by the state that was read or written last
	aside      string               // the folder of the note; "" if no note is kept
	note       note                 // says that the disk is behind
	noteErr    error                // why the note could not be read
	unwritable error                // why the last write to the folder failed
	remade     int                  // how often the folder was made again
	bytes      *byteFile
	rawRules   RawSource // nil: no bytes are written
	// step is called before each change of the folder. Tests stop there as if canaryd were killed.
	step func(what string)
}

// OpenStore opens the folder, and creates it if it is missing. A disk that is full or read-only is
// no error: each write tries again, and Unwritable says why the last one failed.
func OpenStore(dir string, identity Identity) (*Store, error) {
	s := &Store{dir: dir, identity: identity, wholeBelow: wholeBelow, until: map[string]time.Time{}, step: func(string) {}}
	s.bytes = &byteFile{path: filepath.Join(dir, "rules.bytes"), identity: identity, limit: maxStored}
	if err := s.prepare(); err != nil && !diskFails(err) {
		return nil, err
	}
	return s, nil
}

// Unwritable returns why the folder could not be written when that was last tried; nil if it could.
func (s *Store) Unwritable() error { return s.unwritable }

// Remade returns how often the folder was made again because it was gone.
func (s *Store) Remade() int { return s.remade }

// Holds reports whether the state can name a generation. It can if one was written or resumed since
// the store was opened.
func (s *Store) Holds() bool { return s.written != "" }

// formatOf returns the format for a file about these tables, for Save, SaveState and saveNote.
// It is everywhere unless a table is guarded on demand, so that an older canaryd can read the
// file.
func formatOf[M ~map[rules.TableID]V, V any](tables M) int {
	for id := range tables {
		if protect.OnDemand(id.Name) {
			return format
		}
	}
	return everywhere
}

// Save writes stored.Generation with its origin to a file of its own, and removes old
// generations. It writes nothing if that generation was written last and its files exist. The
// daemon calls it after changes, and `canaryd restore` without a daemon after its replay.
// SaveState follows.
func (s *Store) Save(stored Stored) error {
	id := stored.Generation.ID()
	if id == s.written && s.complete(id) {
		return nil
	}
	stored.Format, stored.Identity, stored.ID = formatOf(stored.Generation), s.identity, id
	stored.Rules, stored.Chains = stored.Generation.Counts()
	err := s.onDisk(func() error {
		text, err := s.encode(stored)
		if err != nil {
			return err
		}
		s.step("generation")
		return private.Write(s.path(id), text)
	})
	if err != nil {
		return fmt.Errorf("saving generation %s: %w", id, err)
	}
	if id != s.written {
		s.until[s.written] = time.Now()
	}
	delete(s.until, id)
	s.written, s.format = id, stored.Format
	if err := s.prune(); err != nil {
		return fmt.Errorf("removing old generations: %w", err)
	}
	return nil
}

// SaveState writes the state, which then names the generation that was written last. Marks must be
// on disk soon after they are planted. Otherwise the next start takes them for marks in saved
// rules.
func (s *Store) SaveState(state State) error {
	state.Format = max(formatOf(state.Marks), s.format) // that of its generation, too
	state.Identity, state.ID, state.Sum = s.identity, s.written, ""
	text, err := json.Marshal(state)
	if err == nil {
		err = s.put(s.statePath(), private.Summed(text))
	}
	if err != nil {
		return fmt.Errorf("saving the state: %w", err)
	}
	s.named, s.stateID = s.written, s.written
	return nil
}

// Forget removes the state, a loss that waits and the files of SaveUnread and SaveBehind. Without
// it, the next start would take removed marks for lost ones. Generations stay, for restore.
func (s *Store) Forget() error {
	s.note = note{}
	if err := errors.Join(s.ForgetPending(), s.SaveUnread(nil), s.saveNote()); err != nil {
		return err
	}
	if err := removeFile(s.statePath(), "the state"); err != nil {
		return err
	}
	return removeFile(s.ownersPath(), "the state")
}

// removeFile removes a file, if it exists. what names its content in the error. The folder may
// be on a read-only disk.
func removeFile(path, what string) error {
	err := os.Remove(path)
	if err == nil {
		return nil
	}
	if _, gone := os.Lstat(path); errors.Is(gone, fs.ErrNotExist) {
		return nil // a read-only disk refuses before it looks for the file
	}
	return fmt.Errorf("removing %s: %w", what, err)
}

// LoadState returns the last state with its generation. The error is ErrNothingStored, is
// ErrForeign with the difference, or names the broken part. If only the generation is broken,
// LoadState returns the state anyway.
func (s *Store) LoadState() (State, Stored, error) {
	var state State
	if err := s.read(s.statePath(), &state); err != nil {
		return State{}, Stored{}, err
	}
	if err := s.checkIdentity(state.Identity); err != nil {
		return State{}, Stored{}, err
	}
	state.Sum, s.stateID = "", state.ID
	for id, list := range state.Quarantine {
		for i, h := range list {
			list[i].Rule = iptables.Reread(id.Family, h.Rule)
		}
	}
	stored, rests, err := s.loadIf(state.ID, s.checkIdentity)
	if errors.Is(err, ErrNothingStored) {
		return state, Stored{}, fmt.Errorf("%s names generation %s, and its file is missing", s.statePath(), state.ID)
	}
	if err == nil {
		if s.base, s.rests = rests, ""; rests != nil { // the first change after a restart is a small write, too
			s.rests = rests.name
		}
	}
	return state, stored, err
}

// Resume makes the state name the stored generation with that ID.
func (s *Store) Resume(id string) { s.written, s.named = id, id }

// Load returns the generation with that ID.
func (s *Store) Load(id string) (Stored, error) {
	stored, _, err := s.loadIf(id, s.checkIdentity)
	return stored, err
}

// loadIf returns the generation with that ID, and its base, if check accepts its identity. Load
// accepts only the store's own identity, LoadHere any of this boot. If there is none, the error
// names the generations that can be restored.
func (s *Store) loadIf(id string, check func(Identity) error) (Stored, *base, error) {
	stored, rests, err := s.load(id, check)
	if errors.Is(err, ErrNothingStored) && idPattern.MatchString(id) {
		return Stored{}, nil, fmt.Errorf("%w: %s; %s", err, id, s.Offer())
	}
	return stored, rests, err
}

// checkContent returns nil if the content of a generation's file matches its name. load calls
// it, so that no damaged generation is replayed.
func checkContent(stored Stored, id string) error {
	if err := rules.Validate(stored.Generation); err != nil {
		return fmt.Errorf("stored generation %s: %w", id, err)
	}
	if got := stored.Generation.ID(); got != id {
		return fmt.Errorf("stored generation %s is corrupt: its content has ID %s", id, got)
	}
	return nil
}

var idPattern = regexp.MustCompile(`^[0-9a-f]{12}$`)

// checkIdentity returns nil if o is the store's identity, else ErrForeign with the first
// difference. LoadState and Load refuse such a file; lists show the error in Foreign.
func (s *Store) checkIdentity(o Identity) error {
	for _, c := range []struct{ what, stored, now string }{
		{"boot", o.BootID, s.identity.BootID},
		{"network namespace", o.NetNS, s.identity.NetNS},
		{"backend", o.Backend, s.identity.Backend},
		{"iptables version", o.Version, s.identity.Version},
	} {
		if c.stored != c.now {
			return fmt.Errorf("%w: %s %q, here %q", ErrForeign, c.what, c.stored, c.now)
		}
	}
	return nil
}

const stateFile = "state.json"

func (s *Store) statePath() string { return filepath.Join(s.dir, stateFile) }

func (s *Store) path(id string) string {
	return filepath.Join(s.folder(), id+".json")
}

// write writes a file so that a kill leaves the old file or the new one. It does not wait for the
// disk: a replay saves its marks first, and the wait would delay it by some 10 ms. Only a crash of
// the machine can lose the file, and after a boot the state is useless anyway.
func (s *Store) write(path string, value any) error {
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return s.put(path, data)
}

// put writes data to a file of the folder, for write and SaveState. It refuses data that read
// would refuse as too large.
func (s *Store) put(path string, data []byte) error {
	if len(data) > maxStored {
		return fmt.Errorf("%s would have %d MiB, and canaryd reads %d at most", path, len(data)>>20, maxStored>>20)
	}
	s.step(filepath.Base(path))
	return s.onDisk(func() error { return private.Write(path, data) })
}

// read reads a file of this format or of an older one.
func (s *Store) read(path string, value any) error { return readFile(path, format, value) }

// readFile reads a JSON file into value. The file's format may be as new as newest; the error
// of a newer one is ErrNewer. A missing file is ErrNothingStored, and an unknown field counts
// as damage.
func readFile(path string, newest int, value any) error {
	file, err := private.Open(path, os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return ErrNothingStored
	}
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // read only
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if info.Size() > maxStored {
		return fmt.Errorf("%s is too large: it has %d MiB, and canaryd reads %d at most", path, info.Size()>>20, maxStored>>20)
	}
	text := make([]byte, 0, info.Size()+bytes.MinRead) // allocated once; growing would double it
	buffer := bytes.NewBuffer(text)
	if _, err := buffer.ReadFrom(io.LimitReader(file, maxStored)); err != nil {
		return err
	}
	text = buffer.Bytes()
	// The format is checked first, or unknown fields of a newer format would be called corrupt.
	var about struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(text, &about); err != nil {
		return fmt.Errorf("%s is corrupt: %w", path, err)
	}
	if about.Format > newest {
		return fmt.Errorf("%s: %w (format %d, here %d)", path, ErrNewer, about.Format, newest)
	}
	if !private.SumHolds(text) {
		return fmt.Errorf("%s is corrupt: its sum is another", path)
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(value); err != nil {
		return fmt.Errorf("%s is corrupt: %w", path, err)
	}
	return nil
}
