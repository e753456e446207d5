package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	nativeFile   = "native.json"
	nativeFormat = 1
	// nativeStored bounds the file: 5,000 services of kube-proxy need 12 MB.
	nativeStored = 64 << 20
)

// A NativeIdentity is what stored native tables are bound to. Their bytes are the kernel's own.
type NativeIdentity struct {
	BootID  string `json:"bootID"`
	NetNS   string `json:"netns"`
	Release string `json:"kernel"`
}

// A NativeStore keeps the guarded native tables in one file of the state folder.
type NativeStore struct {
	path     string
	identity NativeIdentity
}

// storedNative is what the file holds.
type storedNative struct {
	Format   int            `json:"format"`
	Identity NativeIdentity `json:"identity"`
	// Confirmed is how long the machine had been up when all tables were last known to be in force.
	Confirmed time.Duration       `json:"confirmed"`
	Tables    []storedNativeTable `json:"tables"`
}

type storedNativeTable struct {
	Read    time.Duration  `json:"read"` // the machine's uptime when what is left of timeouts was left
	Witness string         `json:"witness,omitempty"`
	Digest  string         `json:"digest"`
	Verdict native.Verdict `json:"verdict"`
	Table   *native.Table  `json:"table"`
}

// OpenNativeStore returns the store in a state folder that is there.
func OpenNativeStore(folder string) (*NativeStore, error) {
	here, err := Identify(iptables.Info{})
	if err != nil {
		return nil, err
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return nil, fmt.Errorf("asking for the kernel's release: %w", err)
	}
	return &NativeStore{filepath.Join(folder, nativeFile),
		NativeIdentity{here.BootID, here.NetNS, unix.ByteSliceToString(name.Release[:])}}, nil
}

func (s *NativeStore) save(stored storedNative) error {
	stored.Format, stored.Identity = nativeFormat, s.identity
	text, err := json.Marshal(stored)
	if err == nil && len(text) > nativeStored {
		err = fmt.Errorf("they take %d bytes, and canaryd keeps %d at most", len(text), nativeStored)
	}
	if err == nil {
		err = private.Write(s.path, text)
	}
	if err != nil {
		return fmt.Errorf("keeping the native tables: %w", err)
	}
	return nil
}

// load returns what the file holds; nothing if there is none, or it is of another boot, network
// namespace or kernel.
func (s *NativeStore) load() (stored storedNative, err error) {
	text, err := private.Read(s.path, nativeStored)
	if errors.Is(err, fs.ErrNotExist) {
		return storedNative{}, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &stored)
	}
	switch {
	case err != nil:
		return storedNative{}, fmt.Errorf("reading the stored native tables: %w", err)
	case stored.Format != nativeFormat:
		return storedNative{}, fmt.Errorf("the stored native tables have format %d, and this canaryd reads %d", stored.Format, nativeFormat)
	case stored.Identity != s.identity:
		return storedNative{}, nil
	}
	for _, t := range stored.Tables {
		if t.Table == nil || t.Table.Digest().String() != t.Digest {
			return storedNative{}, fmt.Errorf("%s is corrupt: a table is not the one that was stored", s.path)
		}
	}
	return stored, nil
}

// ForgetNative removes what a NativeStore keeps in a state folder.
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
	confirmed time.Duration // the machine's uptime when all were in force
	lastRun   time.Time     // when the last run knew that
	trouble   trouble
}

// changed has the tables written a moment later.
func (s *nativeDisk) changed(now time.Time) {
	s.saveAt = earliest(s.saveAt, latest(now.Add(saveQuiet), s.savedAt.Add(saveShare*s.cost)))
}

// saveNative writes the tables, and until when they were known to be in force.
func (d *Daemon) saveNative(ctx context.Context, st *state) {
	r := &st.native
	r.disk.saveAt = time.Time{}
	if d.cfg.Native.Store == nil || st.removed || !r.begun {
		return
	}
	start := time.Now()
	up := d.cfg.Uptime() - time.Since(start)
	if d.nativeSound(st) && !r.known.IsZero() {
		r.disk.confirmed = up - start.Sub(r.known)
	}
	stored := storedNative{Confirmed: r.disk.confirmed, Tables: []storedNativeTable{}}
	for _, id := range r.ids() {
		t := r.tables[id]
		stored.Tables = append(stored.Tables, storedNativeTable{Read: up - start.Sub(t.leftAt), Witness: t.witness,
			Digest: t.digest.String(), Verdict: t.finding.Verdict, Table: t.want})
	}
	err := d.cfg.Native.Store.save(stored)
	r.disk.savedAt, r.disk.cost = time.Now(), time.Since(start)
	r.disk.saveAt = r.disk.savedAt.Add(max(confirmEvery, saveShare*r.disk.cost))
	switch {
	case err == nil:
		r.disk.trouble.over()
	case r.disk.trouble.met(err, time.Now()):
		klog.FromContext(ctx).Error(err, "The native tables are not on disk; after a restart canaryd would begin with those that stand")
	}
}

// recallNative takes up the tables that the last run guarded. The first read says what became of
// them; what was last known to be in force longer ago than --max-stored-age is not put back.
func (d *Daemon) recallNative(ctx context.Context, st *state) {
	if !d.guardsNative() || d.cfg.Native.Store == nil {
		return
	}
	stored, err := d.cfg.Native.Store.load()
	if err != nil {
		klog.FromContext(ctx).Error(err, "canaryd begins with the native tables that stand")
		return
	}
	r, now := &st.native, time.Now()
	age := d.cfg.Uptime() - stored.Confirmed
	if age < 0 {
		return // another clock, as in a time namespace: nothing can be said of how old it is
	}
	r.disk.confirmed, r.disk.lastRun = stored.Confirmed, now.Add(-age)
	for _, s := range stored.Tables {
		if !d.cfg.Native.Protects(s.Table.ID) {
			continue
		}
		if len(r.tables) >= protect.MaxNative { // another --protect let the last run guard others
			r.beyond++
			continue
		}
		t := &nativeTable{want: s.Table, witness: s.Witness, digest: s.Table.Digest(), missed: true, old: age > d.cfg.MaxStoredAge,
			read: now.Add(-(d.cfg.Uptime() - s.Read))}
		t.leftAt = t.read
		if s.Verdict == native.Unattributed {
			t.finding.Verdict = s.Verdict
		}
		r.tables[s.Table.ID] = t
	}
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
