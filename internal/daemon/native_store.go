package daemon

import (
	"context"
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
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/here"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	nativeFile   = "native.json"
	nativeFolder = "native" // the generations of tables
	nativeFormat = 2
	// nativeStored bounds a file: 5,000 services of kube-proxy need 12 MB.
	nativeStored = 64 << 20
)

// A NativeIdentity is what stored native tables are bound to. Their bytes are the kernel's own.
type NativeIdentity struct {
	BootID  string `json:"bootID"`
	NetNS   string `json:"netns"`
	Release string `json:"kernel"`
}

// A NativeStore keeps the guarded native tables in the state folder: one file names the generation
// of each, and each generation is a file of its own, which is written once. One goroutine may use
// it, but for Show, which any may call.
type NativeStore struct {
	path     string
	identity NativeIdentity
	index    string                            // the digest of the file that names them, as it was read or written last; "" without one
	written  map[tableid.TableID]*native.Table // what the files that the index names hold
	headers  map[string]nativeHeader           // by ID
}

// storedNative is what the file that names the generations holds.
type storedNative struct {
	Format   int            `json:"format"`
	Identity NativeIdentity `json:"identity"`
	// Confirmed is how long the machine had been up when all tables were last known to be in force.
	Confirmed time.Duration       `json:"confirmed"`
	Tables    []storedNativeTable `json:"tables"`

	foreign string          // why it says nothing of the tables here, and Tables is empty; "" if it does
	unread  []reload.Unread // files of this boot, perhaps, that cannot be read
}

type storedNativeTable struct {
	ID      string         `json:"id"`              // of its generation
	Name    string         `json:"table,omitempty"` // with its family; "" in a file of an older canaryd
	Witness string         `json:"witness,omitempty"`
	Verdict native.Verdict `json:"verdict"`
	// Held are the table's parts in quarantine, and HeldFor the flush that took them.
	Held    []native.Held `json:"held,omitempty"`
	HeldFor string        `json:"heldFor,omitempty"`
	// Policies are the known ones, where a policy has become DROP since.
	Policies map[string]string `json:"policies,omitempty"`

	generation nativeGeneration
	inForce    string // the ID of the content that was in force, where the generation is older; else ""
}

// OpenNativeStore returns the store in a state folder that is there.
func OpenNativeStore(folder string) (*NativeStore, error) {
	bound, err := here.Identify(iptables.Info{})
	if err != nil {
		return nil, err
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return nil, fmt.Errorf("asking for the kernel's release: %w", err)
	}
	return &NativeStore{path: filepath.Join(folder, nativeFile),
		identity: NativeIdentity{bound.BootID, bound.NetNS, unix.ByteSliceToString(name.Release[:])}}, nil
}

// save writes the generations that are not on disk yet, then what names them. A process that is
// killed meanwhile leaves everything that the older file names.
func (s *NativeStore) save(stored storedNative) error {
	stored.Format, stored.Identity = nativeFormat, s.identity
	for i := range stored.Tables {
		t := &stored.Tables[i]
		t.ID, t.Name = t.generation.ID, t.generation.Name
		if err := s.keep(t.generation); err != nil {
			return fmt.Errorf("keeping native table %s: %w", t.generation.Name, err)
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
		written[t.generation.Table.ID] = t.generation.Table
	}
	s.written = written
	return nil
}

// load returns what the files hold; nothing if there are none, or they are of another boot, network
// namespace or kernel. With an error it returns the tables that can be read, and what cannot.
func (s *NativeStore) load() (stored storedNative, err error) {
	text, err := private.Read(s.path, nativeStored)
	if errors.Is(err, fs.ErrNotExist) {
		return storedNative{}, nil
	}
	if err == nil {
		s.index = indexOf(text)
		err = json.Unmarshal(text, &stored)
	}
	if err == nil && !private.SumHolds(text) {
		err = fmt.Errorf("%s is corrupt: its sum is another", s.path)
	}
	if err == nil && stored.Format > nativeFormat && stored.Identity == s.identity {
		err = fmt.Errorf("%s: %w (format %d, here %d)", s.path, reload.ErrNewer, stored.Format, nativeFormat)
	}
	switch {
	case err != nil:
		return storedNative{unread: s.unreadIndex(err)}, fmt.Errorf("reading the stored native tables: %w", err)
	case stored.Format != nativeFormat:
		return storedNative{}, fmt.Errorf("the stored native tables have format %d, and this canaryd reads %d", stored.Format, nativeFormat)
	case stored.Identity != s.identity && len(stored.Tables) > 0:
		return storedNative{foreign: s.foreign(stored.Identity)}, nil
	case stored.Identity != s.identity:
		return storedNative{}, nil
	}
	var unread []error
	listed := stored.Tables
	stored.Tables = nil
	for _, t := range listed {
		g, err := s.read(t.ID)
		if err != nil {
			unread = append(unread, err)
			stored.unread = append(stored.unread, reload.Unread{File: s.file(t.ID), Reason: err.Error(), Since: time.Now(), Native: true, Table: t.Name, IDs: []string{t.ID}})
			continue
		}
		t.generation = g
		stored.Tables = append(stored.Tables, t)
	}
	if err := errors.Join(unread...); err != nil {
		return stored, fmt.Errorf("reading the stored native tables: %w", err)
	}
	return stored, nil
}

// indexOf returns the digest of the file that names the tables.
func indexOf(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:12])
}

// unreadIndex returns that the file that names the tables cannot be read. The newest generations
// of all tables are what it may have named.
func (s *NativeStore) unreadIndex(err error) []reload.Unread {
	u := reload.Unread{File: s.path, Reason: err.Error(), Since: time.Now(), Native: true}
	last := ""
	for _, h := range s.list() {
		if h.foreign == "" && h.Name != last {
			u.IDs, last = append(u.IDs, h.ID), h.Name
		}
	}
	return []reload.Unread{u}
}

// ForgetNative removes what names the native tables in a state folder, so that the next start takes
// none for lost. Their generations stay, for restore.
func ForgetNative(folder string) error {
	if err := os.Remove(filepath.Join(folder, nativeFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// nativeDisk is what the disk has of native tables, and when it gets the next.
type nativeDisk struct {
	saveAt    time.Time     // zero: nothing is to be written
	savedAt   time.Time     // when it was last written
	cost      time.Duration // of the last write
	kept      []nativeHeader
	confirmed time.Duration // the machine's uptime when all were in force
	lastRun   time.Time     // when the last run knew that
	trouble   pace.Trouble  // why they are not on disk
	keptAt    time.Time     // when they were last written
	// changes counts the changes of the guarded tables; keptChanges: until keptAt.
	changes, keptChanges int
	retry                pace.Retry   // of a write that failed
	unpruned             pace.Trouble // why old generations could not be removed
}

// changed has the tables written a moment later.
func (s *nativeDisk) changed(now time.Time) {
	s.saveAt = pace.Earliest(s.saveAt, pace.Latest(now.Add(saveQuiet), s.savedAt.Add(saveShare*s.cost)))
}

// moved is changed where the content of a table is another one, or a table came or went.
func (s *nativeDisk) moved(now time.Time) {
	s.changes++
	s.changed(now)
}

// saveNative writes the tables, and until when they were known to be in force.
func (d *Daemon) saveNative(ctx context.Context, st *state) {
	r := &st.native
	r.disk.saveAt = time.Time{}
	switch {
	case d.cfg.Native.Store == nil || st.removed:
		return
	case !r.begun:
		r.disk.saveAt = time.Now().Add(confirmEvery)
		return
	}
	start := time.Now()
	if !d.keepUnread(ctx, st) {
		r.disk.retry.Failed(nil, start)
		r.disk.saveAt = r.disk.retry.At
		return
	}
	up := d.cfg.Uptime() - time.Since(start)
	if d.nativeSound(st) && !r.known.IsZero() {
		r.disk.confirmed = up - start.Sub(r.known)
	}
	stored := storedNative{Confirmed: r.disk.confirmed, Tables: []storedNativeTable{}}
	for _, id := range r.ids() {
		t := r.tables[id]
		row := storedNativeTable{Witness: t.witness, Verdict: t.finding.Verdict, Held: t.held, HeldFor: t.heldFor,
			generation: generationOf(t.want, t.digest, t.made, t.captured, up-start.Sub(t.leftAt))}
		if len(t.policies.drops) > 0 {
			row.Policies = t.policies.known
		}
		stored.Tables = append(stored.Tables, row)
	}
	err := d.cfg.Native.Store.save(stored)
	if err == nil { // what cannot be removed costs room, and no table
		r.disk.unpruned.Report(pace.Warnings(ctx), d.cfg.Native.Store.prune(stored), "Old generations of native tables could not be removed; they take room on the disk")
	}
	r.disk.savedAt, r.disk.cost = time.Now(), time.Since(start)
	r.disk.saveAt = r.disk.savedAt.Add(max(confirmEvery, saveShare*r.disk.cost))
	if err == nil {
		r.disk.retry, r.disk.keptAt, r.disk.keptChanges = pace.Retry{}, r.disk.savedAt, r.disk.changes
	} else {
		r.disk.retry.Failed(nil, r.disk.savedAt)
		r.disk.saveAt = pace.Latest(r.disk.retry.At, r.disk.savedAt.Add(saveShare*r.disk.cost))
	}
	r.disk.kept = d.cfg.Native.Store.list()
	d.countStateError(err)
	d.tookWrite(ctx, &r.disk.trouble, err, d.cfg.Store.SaveNativeBehind, d.nativeBehind(st))
}

// recallNative takes up the tables that the last run guarded. The first read says what became of
// them; what was last known to be in force longer ago than --max-stored-age is not put back.
func (d *Daemon) recallNative(ctx context.Context, st *state) {
	if !d.guardsNative() || d.cfg.Native.Store == nil {
		return
	}
	stored, err := d.cfg.Native.Store.load()
	for _, u := range stored.unread {
		if u.File != d.cfg.Native.Store.path || reload.OfThisBoot(u.File, d.booted()) { // a name in it is of here
			d.noteUnread(ctx, st, u)
		}
	}
	if err != nil {
		pace.Unusable(klog.FromContext(ctx), err).Error(err, "Of what cannot be read, canaryd begins with the native tables that stand")
	}
	if len(stored.Tables) == 0 && err != nil {
		return
	}
	stored.Tables = d.recallNativeBehind(ctx, st, stored)
	r, now := &st.native, time.Now()
	age := d.cfg.Uptime() - stored.Confirmed
	if age < 0 {
		return // another clock, as in a time namespace: nothing can be said of how old it is
	}
	r.disk.confirmed, r.disk.lastRun, r.disk.saveAt = stored.Confirmed, now.Add(-age), now.Add(confirmEvery) // also if nothing changes
	if stored.Confirmed > 0 {
		r.disk.keptAt = r.disk.lastRun
	}
	for _, s := range stored.Tables {
		g := s.generation
		if !d.cfg.Native.Protects(g.Table.ID) {
			continue
		}
		if !r.room(g.Table.ID, d.cfg.Native.Named, nil) { // another --protect let the last run guard others
			r.beyond++
			continue
		}
		t := &nativeTable{heldFor: s.HeldFor, want: g.Table, witness: s.Witness, digest: g.Table.Digest(), missed: true, old: age > d.cfg.MaxStoredAge,
			made: g.Made, captured: g.Captured, read: now.Add(-(d.cfg.Uptime() - g.Read)), wrote: now}
		t.leftAt = t.read
		t.policies.known, t.inForce = s.Policies, s.inForce
		if s.Verdict == native.Unattributed {
			t.finding.Verdict = s.Verdict
		}
		r.tables[g.Table.ID] = t
		d.hold(st, t, s.Held)
	}
	r.disk.kept = d.cfg.Native.Store.list()
	d.noteBeyond(ctx, r, r.beyond)
	if len(r.tables) > 0 {
		klog.FromContext(ctx).Info("Took up the stored native tables", "tables", len(r.tables), "age", age.Round(time.Second))
	}
}

// leaveNative looks once more at the end of a run, and keeps what is known.
func (d *Daemon) leaveNative(ctx context.Context, st *state) {
	if !d.guardsNative() {
		return
	}
	if !st.removed && st.native.loss == nil {
		d.lookNative(ctx, st)
	}
	d.saveNative(ctx, st)
}

// stopNative removes what is canaryd's own of native tables, after a cleanup.
func (d *Daemon) stopNative(st *state) error {
	if !d.guardsNative() {
		return nil
	}
	st.native = nativeRealm{tables: map[tableid.TableID]*nativeTable{}}
	var errs []error
	if d.cfg.Native.Cleanup != nil {
		errs = append(errs, d.cfg.Native.Cleanup())
	}
	if d.cfg.Native.Store != nil {
		errs = append(errs, ForgetNative(filepath.Dir(d.cfg.Native.Store.path)))
	}
	return errors.Join(errs...)
}
