package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// addService adds a chain with one rule, as an owner does.
func addService(t *testing.T, fake *iptablestest.Fake, name string) {
	t.Helper()
	must(t, fake.RestoreNoflush(rules.IPv4, "*nat\n:"+name+" - [0:0]\n-A "+name+" -j RETURN\nCOMMIT\n"))
}

// TestStateFolderIsDeleted: rm -rf deletes the state folder while canaryd runs. canaryd makes
// it again, with all that a restart needs.
func TestStateFolderIsDeleted(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := filepath.Join(t.TempDir(), "state")
		first := start(t, backend, setup{store: openStore(t, dir, identity(backend))})
		first.after(5 * time.Second)
		generation := first.d.Status().Generation.ID
		must(t, os.RemoveAll(dir))
		first.after(2 * confirmEvery)
		s := first.d.Status()
		if s.StateError != "" || !s.Healthy || s.StateSaved.IsZero() || time.Since(s.StateSaved) > confirmEvery {
			t.Errorf("state: %q, saved %s ago, healthy %t", s.StateError, time.Since(s.StateSaved), s.Healthy)
		}
		for path, mode := range map[string]os.FileMode{
			dir: 0o700, filepath.Join(dir, "generations"): 0o700,
			filepath.Join(dir, "state.json"): 0o600, filepath.Join(dir, "generations", generation+".json"): 0o600,
		} {
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != mode {
				t.Errorf("%s: %v, %v; want mode %04o", path, info, err, mode)
			}
		}
		first.wantLog("The state folder was gone, and is made again")
		before := first.tables()
		first.stop()
		first.flushNat()
		left := first.tables()
		next := run(t, first.fake, setup{store: openStore(t, dir, identity(backend))})
		next.settled()
		next.wantBack(before, left)
	})
}

// TestStateCannotBeKept: the disk takes nothing for 20 minutes. Status, metrics and log say so,
// canaryd guards the rules anyway, and writes everything once the disk takes it.
func TestStateCannotBeKept(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := filepath.Join(t.TempDir(), "state")
		r := start(t, backend, setup{store: openStore(t, dir, identity(backend))})
		r.after(5 * time.Second)
		saved := r.d.Status().StateSaved
		must(t, os.Rename(dir, dir+"-away"))
		must(t, os.WriteFile(dir, nil, 0o600))
		addService(t, r.fake, "KUBE-SVC-AAAAAAAAAAAAAAAA")
		r.after(10 * time.Second)
		addService(t, r.fake, "KUBE-SVC-BBBBBBBBBBBBBBBB")
		r.after(20 * time.Minute)
		s := r.d.Status()
		if s.StateError == "" || s.StateBehind != 2 || s.StateSaved.Sub(saved).Abs() > confirmEvery || !s.Healthy {
			t.Errorf("state: %q, %d behind, saved at %s (at first %s), healthy %t", s.StateError, s.StateBehind, s.StateSaved, saved, s.Healthy)
		}
		if want := "healthy, but the latest rules are not on disk"; s.Headline != want {
			t.Errorf("headline %q, want %q", s.Headline, want)
		}
		if n := strings.Count(r.log.String(), "The generation is not on disk"); n == 0 || n > 3 {
			t.Errorf("the log says it %d times", n)
		}
		before := r.tables()
		r.flushNat()
		left := r.tables()
		r.settled()
		r.wantTables(before, left)
		tries := r.metrics("state_errors")["state_errors_total"]
		if tries < 20 || tries > 400 {
			t.Errorf("%v failed writes in 20 minutes", tries)
		}
		must(t, os.Remove(dir))
		must(t, os.Rename(dir+"-away", dir))
		r.after(pace.LastTry + 5*time.Second)
		if s := r.d.Status(); s.StateError != "" || s.StateBehind != 0 || time.Since(s.StateSaved) > confirmEvery {
			t.Errorf("the disk is well: %q, %d behind, saved %s ago", s.StateError, s.StateBehind, time.Since(s.StateSaved))
		}
		r.wantLog("The generation is on disk again")
		before = r.tables()
		r.stop()
		r.flushNat()
		left = r.tables()
		next := run(t, r.fake, setup{store: openStore(t, dir, identity(backend))})
		next.settled()
		next.wantBack(before, left)
	})
}

// TestGenerationHasNoRoom: the disk takes the small state, but not the generation. A heal
// writes the state; status, log and the note aside still say that the disk is behind.
func TestGenerationHasNoRoom(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, aside := t.TempDir(), t.TempDir()
		store := openStore(t, dir, identity(backend))
		store.KeepAside(aside)
		r := start(t, backend, setup{store: store})
		r.after(5 * time.Second)
		saved, generations := r.d.Status().StateSaved, filepath.Join(dir, "generations")
		must(t, os.Rename(generations, generations+"-away"))
		must(t, os.WriteFile(generations, nil, 0o600))
		addService(t, r.fake, "KUBE-SVC-AAAAAAAAAAAAAAAA")
		r.after(5 * time.Minute)
		before := r.tables()
		r.flushNat()
		left := r.tables()
		r.settled()
		r.wantTables(before, left)
		s := r.d.Status()
		if s.StateError == "" || s.StateBehind != 1 || s.StateSaved.Sub(saved) > confirmEvery {
			t.Errorf("after a flush: %q, %d behind, saved at %s (at first %s)", s.StateError, s.StateBehind, s.StateSaved, saved)
		}
		if _, err := os.Stat(filepath.Join(aside, "behind.json")); err != nil {
			t.Errorf("the note that the state is behind: %v", err)
		}
		const over = "The generation is on disk again"
		if strings.Contains(r.log.String(), over) {
			t.Errorf("the log says %q", over)
		}
		must(t, os.Remove(generations))
		must(t, os.Rename(generations+"-away", generations))
		r.after(pace.LastTry + 5*time.Second)
		if s := r.d.Status(); s.StateError != "" || s.StateBehind != 0 {
			t.Errorf("the disk is well: %q, %d behind", s.StateError, s.StateBehind)
		}
		r.wantLog(over)
	})
}

// A fullDisk is a state folder that can refuse all writes, next to a folder that takes them.
type fullDisk struct {
	t          *testing.T
	dir, aside string
	id         reload.Identity
}

func newFullDisk(t *testing.T, backend iptables.Backend) *fullDisk {
	t.Helper()
	return &fullDisk{t, filepath.Join(t.TempDir(), "state"), t.TempDir(), identity(backend)}
}

// open opens the folder as a start does.
func (f *fullDisk) open() *reload.Store {
	store := openStore(f.t, f.dir, f.id)
	store.KeepAside(f.aside)
	return store
}

// fill makes the folder refuse writes, and clear restores it.
func (f *fullDisk) fill() {
	must(f.t, os.Rename(f.dir, f.dir+"-away"))
	must(f.t, os.WriteFile(f.dir, nil, 0o600))
}

func (f *fullDisk) clear() {
	must(f.t, os.Remove(f.dir))
	must(f.t, os.Rename(f.dir+"-away", f.dir))
}

// TestUnreadableNote: the note about missing changes cannot be read. The restored rules may be
// older than the last in force; record, log and status say so. A cleanup removes the note.
func TestUnreadableNote(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		disk := newFullDisk(t, backend)
		first := start(t, backend, setup{store: disk.open()})
		first.after(5 * time.Second)
		disk.fill()
		addService(t, first.fake, "KUBE-SVC-AAAAAAAAAAAAAAAA")
		first.after(30 * time.Second)
		first.stop()
		disk.clear()
		damage(t, filepath.Join(disk.aside, "behind.json"), damages["truncated"])
		first.flushNat()
		r := run(t, first.fake, setup{store: disk.open()})
		r.after(5 * time.Second)
		r.wantReady()
		r.wantLog("the stored rules may be older than the last rules in force")
		const want = "a generation that may be older"
		if s := r.d.Status(); len(s.Flushes) != 1 || !strings.Contains(s.Flushes[0].Older, want) || !strings.Contains(s.Headline, want) {
			t.Errorf("headline %q, records %+v", s.Headline, s.Flushes)
		}
		must(t, os.RemoveAll(disk.dir))
		must(t, os.WriteFile(disk.dir, nil, 0o600))
		addService(t, r.fake, "KUBE-SVC-BBBBBBBBBBBBBBBB")
		r.after(30 * time.Second)
		note := filepath.Join(disk.aside, "behind.json")
		if _, err := os.Stat(note); err != nil {
			t.Fatal(err)
		}
		_ = r.d.Cleanup(t.Context(), api.CleanupRequest{}) // the folder's content cannot be removed
		if _, err := os.Stat(note); err == nil {
			t.Error("after a cleanup the note is there")
		}
	})
}

// TestOlderGeneration: the disk refuses the last generation, and canaryd restarts. It leaves
// unflushed tables alone, and restores flushed ones from the older generation. Record, log and
// status say so.
func TestOlderGeneration(t *testing.T) {
	for name, flushed := range map[string]bool{"flushed": true, "not flushed": false} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				disk := newFullDisk(t, backend)
				first := start(t, backend, setup{store: disk.open()})
				first.after(5 * time.Second)
				disk.fill()
				addService(t, first.fake, "KUBE-SVC-AAAAAAAAAAAAAAAA")
				first.after(30 * time.Second)
				must(t, first.fake.RestoreNoflush(rules.IPv4, "*filter\n:KUBE-SVC-BBBBBBBBBBBBBBBB - [0:0]\n-A KUBE-SVC-BBBBBBBBBBBBBBBB -j RETURN\nCOMMIT\n"))
				first.after(30 * time.Second)
				before := first.tables()
				first.stop()
				disk.clear()
				if flushed {
					first.flushNat()
				}
				r := run(t, first.fake, setup{store: disk.open()})
				r.after(5 * time.Second)
				r.wantReady()
				s := r.d.Status()
				if len(r.chain(rules.IPv4, rules.Filter, "KUBE-SVC-BBBBBBBBBBBBBBBB")) != 1 {
					t.Error("what was not flushed is not as it was")
				}
				if !flushed {
					r.wantTables(before, before)
					if len(s.Flushes) != 0 || s.StateOlder != "" {
						t.Errorf("nothing was flushed: %+v, older: %q", s.Flushes, s.StateOlder)
					}
					r.wantLog("their marks are intact, so canaryd starts from the rules in the kernel")
				} else {
					const want = "2 changes since were not kept"
					if len(s.Flushes) != 1 || !strings.Contains(s.Flushes[0].Older, want) || !strings.Contains(s.StateOlder, want) || !strings.Contains(s.Headline, want) {
						t.Errorf("headline %q, older %q, records %+v", s.Headline, s.StateOlder, s.Flushes)
					}
					r.wantLog(`"The stored rules are older than the last rules in force; canaryd puts flushed rules back from them"`)
					r.wantLog(`tables=["ipv4 nat"]`)
					addService(t, r.fake, "KUBE-SVC-CCCCCCCCCCCCCCCC") // canaryd learns nat, so it is no longer older
					r.after(10 * time.Second)
					r.flushNat()
					r.settled()
					if s := r.d.Status(); len(s.Flushes) != 2 || s.Flushes[0].Older != "" || s.Flushes[1].Older == "" {
						t.Errorf("records after another flush: %+v", s.Flushes)
					}
					if len(r.chain(rules.IPv4, rules.Nat, "KUBE-SERVICES")) == 0 {
						t.Error("the flushed rules are not back")
					}
				}
				if _, err := os.Stat(filepath.Join(disk.aside, "behind.json")); err == nil {
					t.Error("the state is on disk, and the note that it is behind stays")
				}
			})
		})
	}
}
