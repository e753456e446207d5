package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
)

// savingTakes is how long the disk takes for a generation in these stories.
const savingTakes = 10 * time.Second

// A slowDisk is a state folder whose disk takes its time.
type slowDisk struct {
	*rig
	dir      string
	standby  *fakeStandby
	previous string // ID of the generation that the disk has
}

// duringASave starts a daemon that has just begun to write a changed generation. at is called while
// the disk takes its time; nil: nothing happens then.
func duringASave(t *testing.T, at func(dir string)) *slowDisk {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	fake := loadedFake(t, iptables.NFT)
	s := newFakeStandby(fake)
	slow := false
	r := run(t, fake, setup{standby: s, store: openStore(t, dir, identity(iptables.NFT)), saverDelay: func() {
		if slow {
			time.Sleep(savingTakes / 2)
			if at != nil {
				at(dir)
			}
			time.Sleep(savingTakes / 2)
		}
	}})
	r.after(10 * time.Second)
	r.wantReady()
	slow = true
	disk := &slowDisk{rig: r, dir: dir, standby: s, previous: r.d.Status().Generation.ID}
	r.endpoint(2, true)
	r.after(saveQuiet + 100*time.Millisecond)
	if d := cmp.Diff(disk.previous, disk.named()); d != "" || r.d.Status().Generation.ID == disk.previous {
		t.Fatalf("no save has begun, or it has ended: the disk names another generation (-want +got):\n%s", d)
	}
	return disk
}

// state returns the state on disk as a start would read it.
func (s *slowDisk) state() reload.State {
	s.t.Helper()
	state, _, err := openStore(s.t, s.dir, identity(iptables.NFT)).LoadState()
	must(s.t, err)
	return state
}

// named returns the ID of the generation that the state on disk names.
func (s *slowDisk) named() string { return s.state().ID }

// TestTheLoopGoesOnWhileASaveIsWritten: the loop learns, opens a gate and heals while the disk
// takes its time. The status says that a generation is saved only once it is, and the newest
// generation follows.
func TestTheLoopGoesOnWhileASaveIsWritten(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(t *testing.T, s *slowDisk)
	}{
		{"a change is learned", func(t *testing.T, s *slowDisk) {
			before := s.d.Status().Generation.ID
			s.endpoint(4, true)
			s.after(captureSoon + time.Millisecond)
			if s.d.Status().Generation.ID == before {
				t.Error("the change was not learned during the save")
			}
		}},
		{"a flush is healed", func(t *testing.T, s *slowDisk) {
			flushed := time.Now()
			s.flushNat()
			s.after(0)
			if opened := s.standby.named("open ipv4", flushed); len(opened) != 1 || !opened[0].at.Equal(flushed) {
				t.Errorf("opened: %+v, want at once", opened)
			}
			s.settled()
			s.wantReady()
			record := s.records(0)[0]
			want := api.Flush{Outcome: api.Outcome(reload.Proved), Attempts: 1}
			if d := cmp.Diff(want, api.Flush{Outcome: record.Outcome, Attempts: record.Attempts}); d != "" || record.AbsentSeconds > 0.1 {
				t.Errorf("absent for %v s; the record (-want +got):\n%s", record.AbsentSeconds, d)
			}
			// A canaryd that is killed now leaves the marks of the replay.
			state := s.state()
			for _, f := range s.fake.Families() {
				seen, err := s.fake.Probe(t.Context(), f, state.Marks.Places(f, canary.DefaultChain))
				must(t, err)
				if !state.Marks.Standing(f, canary.DefaultChain, seen) {
					t.Errorf("%s: the disk lacks the marks of the replay", f)
				}
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := duringASave(t, nil)
				before := s.d.Status()
				test.do(t, s)
				if d := cmp.Diff(s.previous, s.named()); d != "" {
					t.Fatalf("the save had ended by then (-want +got):\n%s", d)
				}
				now := s.d.Status()
				if now.StateError != "" || len(now.Stored) != len(before.Stored) || now.StateBehind != 0 {
					t.Errorf("state: %q, %d behind; stored: %+v", now.StateError, now.StateBehind, now.Stored)
				}
				s.after(2 * (savingTakes + saveQuiet))
				if d := cmp.Diff(s.d.Status().Generation.ID, s.named()); d != "" {
					t.Errorf("the disk names another generation than the newest (-want +got):\n%s", d)
				}
			})
		})
	}
}

// TestAStopWhileASaveIsWritten: canaryd ends after the save, and after one more of the newest
// generation, which it learned meanwhile.
func TestAStopWhileASaveIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := duringASave(t, nil)
		s.endpoint(4, true)
		s.after(captureSoon + time.Millisecond)
		newest := s.d.Status().Generation.ID
		s.stop()
		if d := cmp.Diff(newest, s.named()); d != "" {
			t.Errorf("the disk names another generation (-want +got):\n%s", d)
		}
		before := s.tables()
		s.flushNat()
		left := s.tables()
		next := run(t, s.fake, setup{store: openStore(t, s.dir, identity(iptables.NFT))})
		next.settled()
		next.wantBack(before, left)
	})
}

// TestACleanupWhileASaveIsWritten: the cleanup waits for the save, so that no state stays which
// would take the removed marks for lost ones.
func TestACleanupWhileASaveIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := duringASave(t, nil)
		must(t, s.d.Cleanup(t.Context(), api.CleanupRequest{}))
		s.after(time.Minute)
		if _, err := os.Stat(filepath.Join(s.dir, "state.json")); !os.IsNotExist(err) {
			t.Errorf("after a cleanup there is a state: %v", err)
		}
	})
}

// TestASaveThatFails: the disk breaks during a save, or during the next one. The log and the status
// say so once that save has ended, until a later one succeeds. The rules that changed during the
// first save are not on disk either way.
func TestASaveThatFails(t *testing.T) {
	for name, behind := range map[string]int{"the first": 2, "the next": 1} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := behind
				s := duringASave(t, func(dir string) {
					if n++; n == 3 {
						must(t, os.Rename(dir, dir+"-away"))
						must(t, os.WriteFile(dir, nil, 0o600))
					}
				})
				s.endpoint(4, true)
				s.after(savingTakes * 3 / 4)
				if now := s.d.Status(); now.StateError != "" {
					t.Errorf("before the save has ended: %q", now.StateError)
				}
				s.after(time.Hour)
				if now := s.d.Status(); now.StateError == "" || now.StateBehind != behind || !now.Healthy {
					t.Errorf("state: %q, %d behind, want %d; healthy %t", now.StateError, now.StateBehind, behind, now.Healthy)
				}
				if n := strings.Count(s.log.String(), "The generation is not on disk"); n != behind { // once for each generation
					t.Errorf("the log says it %d times", n)
				}
				must(t, os.Remove(s.dir))
				must(t, os.Rename(s.dir+"-away", s.dir))
				s.after(time.Hour)
				if now := s.d.Status(); now.StateError != "" || now.StateBehind != 0 || now.Generation.ID != s.named() {
					t.Errorf("the disk is well: %q, %d behind", now.StateError, now.StateBehind)
				}
				s.wantLog("The generation is on disk again")
			})
		})
	}
}

// TestASaveThatHangs: the service manager learns that the disk does not finish a save.
func TestASaveThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := run(t, loadedFake(t, iptables.NFT), setup{store: openStore(t, t.TempDir(), identity(iptables.NFT)), saverDelay: func() { time.Sleep(2 * diskLimit) }})
		r.after(diskLimit / 2)
		if err := r.d.Alive(); err != nil {
			t.Errorf("too early: %v", err)
		}
		r.after(diskLimit)
		if err := r.d.Alive(); err == nil || !strings.Contains(err.Error(), `"write to disk" has run for `) {
			t.Errorf("a save that hangs: %v", err)
		}
		r.after(2 * diskLimit)
		r.wantReady()
	})
}

// TestNativeTablesAreSavedBesideTheLoop: a flush is healed while the disk takes the tables, and a
// stop leaves the newest content on disk.
func TestNativeTablesAreSavedBesideTheLoop(t *testing.T) {
	dir := t.TempDir()
	slow := false
	nativeNode(t, setup{nativeStore: nativestore.New(dir, nativestore.Identity{}), saverDelay: func() {
		if slow {
			time.Sleep(savingTakes)
		}
	}}, func(t *testing.T, r *rig, k *fakeNative) {
		stored := func() string {
			loaded, err := nativestore.New(dir, nativestore.Identity{}).Load()
			must(t, err)
			for _, row := range loaded.Tables {
				if row.Generation.Table.ID == proxyTable {
					return row.ID
				}
			}
			return ""
		}
		r.after(2 * time.Minute)
		slow = true
		before := stored()
		k.addRule(proxyTable, "one more")
		r.after(4 * time.Second)
		if before == "" || stored() != before {
			t.Fatalf("%q was stored, and now %q: no save has begun, or it has ended", before, stored())
		}
		k.flushTable(proxyTable)
		r.after(time.Second)
		if record := r.records(0)[0]; record.Outcome != api.Outcome(reload.Proved) || record.AbsentSeconds > 0.5 {
			t.Errorf("the flush: %+v", record)
		}
		if stored() != before {
			t.Fatal("the save had ended by then")
		}
		k.addRule(proxyTable, "and another")
		r.after(3 * time.Second)
		r.stop()
		if want := nativestore.IDOf(k.standing(proxyTable).Digest()); stored() != want {
			t.Errorf("stored: %s, want %s", stored(), want)
		}
	})
}
