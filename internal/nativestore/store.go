// Package nativestore keeps generations of native nftables tables in the state folder, and puts
// them back on request, with and without a daemon.
//
// A daemon calls [New], [Store.Load] at its start, and [Store.Save] after each change;
// [Store.Prune] removes old generations. Commands call [Open], then [Store.CheckStored] to compare
// the kernel with the folder, and [Store.RestoreStored] or [Store.RestoreGeneration] to write.
// [Store.List] and [Store.Show] are for people.
//
// Callers distinguish [ErrNotProtected], [ErrOwnersNewer], [ErrNotInForce], [ErrNotProved],
// [ErrOwnerWrote], [ErrDevicesLeft], [ErrTooLarge] and [ErrNoNFTables]. Load returns the readable
// tables together with its error. A Store is for one goroutine; only Show may be called by any.
package nativestore

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/here"
	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	indexFile = "native.json"
	folder    = "native" // the generations of tables
	format    = 2
	// mostStored bounds a file: 5,000 services of kube-proxy need 12 MB.
	mostStored = 64 << 20
)

// An Identity is the place that stored native tables are bound to, because their bytes are the
// kernel's own.
type Identity struct {
	BootID  string `json:"bootID"`
	NetNS   string `json:"netns"`
	Release string `json:"kernel"`
}

// A Store keeps the guarded native tables in the state folder. One file, the index, names the
// generation of each. Each generation is a file of its own, which is written once. One
// goroutine may use it; but any goroutine may call Show.
type Store struct {
	path     string
	Identity Identity                          // of this node and boot
	index    string                            // digest of the index; "" without one
	written  map[tableid.TableID]*native.Table // the content of the files that the index names
	headers  map[string]Header                 // by ID
}

// A LeftOut is all that the index has of a table that was too large to keep. After a restart the
// node stays unhealthy because of it.
type LeftOut struct {
	ID      tableid.TableID `json:"id"`
	Handle  uint64          `json:"handle,omitempty"`
	Finding native.Finding  `json:"finding"`
	Held    []native.Held   `json:"held,omitempty"` // as in a Row
}

// Stored is the content of the index.
type Stored struct {
	Format   int      `json:"format"`
	Identity Identity `json:"identity"`
	// Confirmed is how long the machine had been up when all tables were last known to be in force.
	Confirmed time.Duration `json:"confirmed"`
	Tables    []Row         `json:"tables"`
	// LeftOut are tables that were too large to keep, and are lost or have parts in quarantine.
	LeftOut []LeftOut `json:"leftOut,omitempty"`

	foreign string          // why it does not apply here, so that Tables is empty; "" if it does
	Unread  []reload.Unread `json:"-"` // unreadable files, perhaps of this boot
}

// A Row is the index's entry for one table, and the generation that it names.
type Row struct {
	ID      string         `json:"id"`              // of its generation
	Name    string         `json:"table,omitempty"` // with its family; "" in a file of an older canaryd
	Witness string         `json:"witness,omitempty"`
	Verdict native.Verdict `json:"verdict"`
	// Held are the table's parts in quarantine.
	Held []native.Held `json:"held,omitempty"`
	// Policies are the known ones, if a policy has become DROP since then.
	Policies map[string]string `json:"policies,omitempty"`

	Generation Generation `json:"-"`
	InForce    string     `json:"-"` // ID of the content in force, if it is newer; else ""
}

// Open returns the store in an existing state folder. It notes the boot, the network namespace
// and the kernel, so that content of others is not restored here.
func Open(folder string) (*Store, error) {
	bound, err := here.Identify(iptables.Info{})
	if err != nil {
		return nil, err
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return nil, fmt.Errorf("asking for the kernel's release: %w", err)
	}
	return New(folder, Identity{bound.BootID, bound.NetNS, unix.ByteSliceToString(name.Release[:])}), nil
}

// New returns the store in a folder for an identity.
func New(folder string, identity Identity) *Store {
	return &Store{path: filepath.Join(folder, indexFile), Identity: identity}
}

// Path returns the path of the index.
func (s *Store) Path() string { return s.path }

// Index returns the digest of the index as last read or written; "" without one.
func (s *Store) Index() string { return s.index }

// Save writes the generations that are not on disk yet, and then the index. If it is killed in
// between, everything that the old index names is still there.
func (s *Store) Save(stored Stored) error {
	stored.Format, stored.Identity = format, s.Identity
	for i := range stored.Tables {
		t := &stored.Tables[i]
		t.ID, t.Name = t.Generation.ID, t.Generation.Name
		if err := s.keep(t.Generation); err != nil {
			return fmt.Errorf("keeping native table %s: %w", t.Generation.Name, err)
		}
	}
	text, err := json.Marshal(stored)
	if err == nil {
		err = private.Folder(filepath.Dir(s.path))
	}
	if err == nil {
		text = private.Summed(text)
		err = private.Write(s.path, text)
	}
	if err != nil {
		return fmt.Errorf("keeping the native tables: %w", err)
	}
	s.index = indexOf(text)
	written := map[tableid.TableID]*native.Table{}
	for _, t := range stored.Tables {
		written[t.Generation.Table.ID] = t.Generation.Table
	}
	s.written = written
	return nil
}

// Load returns the stored tables. It returns none without files, or if they are of another
// boot, network namespace or kernel. With an error it returns the readable tables and lists the
// unreadable files.
func (s *Store) Load() (stored Stored, err error) {
	text, err := private.Read(s.path, mostStored)
	if errors.Is(err, fs.ErrNotExist) {
		return Stored{}, nil
	}
	if err == nil {
		s.index = indexOf(text)
		err = json.Unmarshal(text, &stored)
	}
	if err == nil && !private.SumHolds(text) {
		err = fmt.Errorf("%s is corrupt: its sum is another", s.path)
	}
	if err == nil && stored.Format > format && stored.Identity == s.Identity {
		err = fmt.Errorf("%s: %w (format %d, here %d)", s.path, reload.ErrNewer, stored.Format, format)
	}
	switch {
	case err != nil:
		return Stored{Unread: s.unreadIndex(err)}, fmt.Errorf("reading the stored native tables: %w", err)
	case stored.Format != format:
		return Stored{}, fmt.Errorf("the stored native tables have format %d, and this canaryd reads %d", stored.Format, format)
	case stored.Identity != s.Identity && len(stored.Tables) > 0:
		return Stored{foreign: s.foreign(stored.Identity)}, nil
	case stored.Identity != s.Identity:
		return Stored{}, nil
	}
	var unread []error
	listed := stored.Tables
	stored.Tables = nil
	for _, t := range listed {
		g, err := s.Read(t.ID)
		if err != nil {
			unread = append(unread, err)
			stored.Unread = append(stored.Unread, reload.Unread{File: s.file(t.ID), Reason: err.Error(), Since: time.Now(), Native: true, Table: t.Name, IDs: []string{t.ID}})
			continue
		}
		t.Generation = g
		stored.Tables = append(stored.Tables, t)
	}
	if err := errors.Join(unread...); err != nil {
		return stored, fmt.Errorf("reading the stored native tables: %w", err)
	}
	return stored, nil
}

// indexOf returns the digest of an index.
func indexOf(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:12])
}

// unreadIndex reports an unreadable index, for Load. It may have named the newest generations
// of all tables, so their IDs are offered to the operator.
func (s *Store) unreadIndex(err error) []reload.Unread {
	u := reload.Unread{File: s.path, Reason: err.Error(), Since: time.Now(), Native: true}
	last := ""
	for _, h := range s.List() {
		if h.Foreign == "" && h.Name != last {
			u.IDs, last = append(u.IDs, h.ID), h.Name
		}
	}
	return []reload.Unread{u}
}

// Forget removes the index of a state folder, so that the next start takes no native table for
// lost. The generations stay, for restore.
func Forget(folder string) error {
	if err := os.Remove(filepath.Join(folder, indexFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
