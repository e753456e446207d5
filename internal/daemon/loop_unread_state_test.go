package daemon

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// damages are the kinds of damage to a stored file. "" deletes it.
var damages = map[string]func(text string) string{
	"truncated":      func(s string) string { return s[:len(s)/2] },
	"emptied":        func(string) string { return "\n" },
	"a flipped byte": func(s string) string { return s[:len(s)/3] + string(s[len(s)/3]^1) + s[len(s)/3+1:] },
	"a newer format": func(s string) string { return strings.Replace(s, `"format":`, `"format":9`, 1) },
	"deleted":        func(string) string { return "" },
}

// damage damages a file in that way.
func damage(t *testing.T, path string, how func(string) string) {
	t.Helper()
	text, err := os.ReadFile(path)
	must(t, err)
	if after := how(string(text)); after != "" {
		must(t, os.WriteFile(path, []byte(after), 0o600))
	} else {
		must(t, os.Remove(path))
	}
}

// unreadFiles returns the files of iptables' tables that a start reads, by their content. A
// deleted state.json is not reported, because a cleanup deletes it too.
func unreadFiles(dir, id string) map[string]string {
	return map[string]string{"the state": filepath.Join(dir, "state.json"), "the generation": filepath.Join(dir, "generations", id+".json")}
}

// wantUnread fails unless the daemon says that a file cannot be read.
func (r *rig) wantUnread(file string) {
	r.t.Helper()
	r.wantNotReady("cannot be read")
	if s := r.d.Status(); len(s.StateUnread) == 0 || !strings.Contains(s.Headline, file) || !strings.Contains(s.Headline, "canaryd dismiss") {
		r.t.Errorf("headline %q, unread %+v; want it to name %s", s.Headline, s.StateUnread, file)
	}
}

// TestUnreadState: a stored file cannot be read, and rules were flushed while canaryd was down
// or not. After a flush the node is not healthy until an operator decides, also after another
// restart. Otherwise all marks are in force, and canaryd learns the present rules.
func TestUnreadState(t *testing.T) {
	for what, how := range damages {
		for _, file := range []string{"the state", "the generation"} {
			for _, flushed := range []bool{true, false} {
				name := strings.ReplaceAll(file+", "+what, " ", "_")
				if flushed {
					name += ", flushed"
				}
				if file == "the state" && what == "deleted" {
					continue
				}
				t.Run(name, func(t *testing.T) {
					oneBackend(t, func(t *testing.T, backend iptables.Backend) {
						dir := t.TempDir()
						first := start(t, backend, setup{store: openStore(t, dir, identity(backend))})
						first.after(5 * time.Second)
						id := first.d.Status().Generation.ID
						first.stop()
						damage(t, unreadFiles(dir, id)[file], how)
						if file == "the state" {
							damage(t, unreadFiles(dir, id)["the generation"], damages["truncated"])
						}
						if flushed {
							first.flushNat()
						}
						r := run(t, first.fake, setup{store: openStore(t, dir, identity(backend))})
						r.after(5 * time.Second)
						if !flushed {
							r.wantReady()
							r.wantLog("their marks are intact")
							return
						}
						r.wantUnread(dir)
						r.stop()
						r = run(t, r.fake, setup{store: openStore(t, dir, identity(backend))})
						r.after(5 * time.Second)
						r.wantUnread(dir)
						// canaryd guards the present rules anyway.
						must(t, r.fake.Flush(rules.IPv4, rules.Filter, ""))
						r.settled()
						if len(r.chain(rules.IPv4, rules.Filter, "KUBE-FORWARD")) == 0 {
							t.Error("a flush after the start was not healed")
						}
						reply, err := r.d.Dismiss(t.Context())
						must(t, err)
						if reply.Unread != 1 {
							t.Errorf("dismissed %+v, want one file", reply)
						}
						r.settled()
						r.wantReady()
						r.stop()
						r = run(t, r.fake, setup{store: openStore(t, dir, identity(backend))})
						r.settled()
						r.wantReady()
					})
				})
			}
		}
	}
}

// TestUnreadStateIsRestored: an older generation can be read. canaryd offers it, and its
// restore ends the wait.
func TestUnreadStateIsRestored(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		first := start(t, backend, setup{store: openStore(t, dir, identity(backend))})
		first.after(5 * time.Second)
		older := first.d.Status().Generation.ID
		addService(t, first.fake, "KUBE-SVC-AAAAAAAAAAAAAAAA")
		first.after(10 * time.Second)
		id := first.d.Status().Generation.ID
		first.stop()
		damage(t, unreadFiles(dir, id)["the generation"], damages["truncated"])
		first.flushNat()
		r := run(t, first.fake, setup{store: openStore(t, dir, identity(backend))})
		r.after(5 * time.Second)
		r.wantUnread(id)
		if s := r.d.Status(); !strings.Contains(s.Headline, "canaryd restore --generation "+older) {
			t.Errorf("headline %q does not offer %s", s.Headline, older)
		}
		reply, err := r.d.Restore(t.Context(), r.agreed(older))
		must(t, err)
		if !reply.Proved() {
			t.Fatalf("reply %+v", reply)
		}
		r.settled()
		r.wantReady()
	})
}

// TestUnreadIsKept: canaryd stores that a file is unreadable before it writes the state again,
// and also after the state folder was deleted.
func TestUnreadIsKept(t *testing.T) {
	for name, hinder := range map[string]func(t *testing.T, dir string) (over func()){
		"no room": func(t *testing.T, dir string) func() {
			path := filepath.Join(dir, "unread.json")
			occupy(t, path)
			return func() { must(t, os.RemoveAll(path)) }
		},
		"deleted": func(t *testing.T, dir string) func() { return func() {} },
	} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir := filepath.Join(t.TempDir(), "state")
				first := start(t, backend, setup{store: openStore(t, dir, identity(backend))})
				first.after(5 * time.Second)
				generation := unreadFiles(dir, first.d.Status().Generation.ID)["the generation"]
				first.stop()
				damage(t, generation, damages["truncated"])
				first.flushNat()
				over := hinder(t, dir)
				r := run(t, first.fake, setup{store: openStore(t, dir, identity(backend))})
				r.after(5 * time.Second)
				r.wantUnread(dir)
				if name == "deleted" {
					must(t, os.RemoveAll(dir))
				} else {
					r.wantLog("The list of unreadable stored files could not be saved; until it is, canaryd saves no rules")
					r.wantLog(`files=["` + filepath.Join(dir, "unread.json"))
					if s := r.d.Status(); s.StateError == "" {
						t.Error("status does not say that the disk lacks something")
					}
				}
				r.after(2 * confirmEvery)
				r.stop()
				over()
				r = run(t, r.fake, setup{store: openStore(t, dir, identity(backend))})
				r.after(5 * time.Second)
				r.wantUnread(generation)
			})
		})
	}
}

// TestUnreadDecision: the file of an outstanding loss cannot be read. The node is not healthy
// until an operator decides, also after another restart.
func TestUnreadDecision(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		g := beginGap(t, backend)
		must(t, g.first.fake.Flush(rules.IPv4, rules.Nat, ""))
		r := g.next()
		r.wantAwaiting(g.generation)
		r.stop()
		pending := filepath.Join(g.dir, "pending.json")
		damage(t, pending, damages["truncated"])
		for range 2 {
			r = g.next()
			r.wantUnread(pending)
			r.stop()
		}
		r = g.next()
		_, err := r.d.Dismiss(t.Context())
		must(t, err)
		r.settled()
		r.wantReady()
		r.stop()
		r = g.next()
		r.wantReady()
	})
}

// TestUnreadDecisionIsNotOnDisk: an operator accepts what stands, but the state folder does not
// let go of a file. Log and metric say so, and after a restart the file waits again.
func TestUnreadDecisionIsNotOnDisk(t *testing.T) {
	for file, line := range map[string]string{
		"pending.json": "A damaged file could not be removed; after a restart it waits for a decision again",
		"unread.json":  "The list of unreadable stored files could not be removed; until it is, canaryd saves no rules",
	} {
		t.Run(file, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				g := beginGap(t, backend)
				path := filepath.Join(g.dir, file)
				occupy(t, path)
				for range 2 {
					r := g.next()
					r.wantUnread(path)
					moved := r.moved(func() { must(t, errorOf(r.d.Dismiss(t.Context()))) }, "state_errors")
					if moved["state_errors_total"] == 0 {
						t.Error("the metric does not count the failed removal")
					}
					r.wantLog(line)
					r.wantLog("canaryd dismiss")
					r.stop()
				}
			})
		})
	}
}

// occupy puts a folder in the place of a file. It can be neither read as a file nor removed as
// one.
func occupy(t *testing.T, path string) {
	t.Helper()
	must(t, os.RemoveAll(path))
	must(t, os.Mkdir(path, 0o700))
	must(t, os.WriteFile(filepath.Join(path, "x"), nil, 0o600))
}

// TestPauseOutlivesTheGeneration: the state can be read, and the generation cannot. The pause
// of the state continues.
func TestPauseOutlivesTheGeneration(t *testing.T) {
	for what, how := range damages {
		t.Run(what, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir := t.TempDir()
				first := start(t, backend, setup{store: openStore(t, dir, identity(backend))})
				first.after(5 * time.Second)
				_, err := first.d.Pause(t.Context(), api.PauseRequest{Seconds: 3600, By: "ada"})
				must(t, err)
				id := first.d.Status().Generation.ID
				first.stop()
				damage(t, unreadFiles(dir, id)["the generation"], how)
				r := run(t, first.fake, setup{store: openStore(t, dir, identity(backend))})
				r.after(5 * time.Second)
				if s := r.d.Status(); !s.Paused || s.PausedBy != "ada" {
					t.Errorf("paused: %t, by %q", s.Paused, s.PausedBy)
				}
			})
		})
	}
}

// TestUnreadAfterAReboot: a machine lost its power, and its files are truncated. Its rules are
// gone too, so nothing is unknown.
func TestUnreadAfterAReboot(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, id := t.TempDir(), identity(backend)
		first := start(t, backend, setup{store: openStore(t, dir, id)})
		first.after(5 * time.Second)
		generation := first.d.Status().Generation.ID
		first.stop()
		before := time.Now().Add(-time.Hour)
		for _, path := range unreadFiles(dir, generation) {
			damage(t, path, damages["truncated"])
			must(t, os.Chtimes(path, before, before))
		}
		id.BootID = "later"
		r := run(t, loadedFake(t, backend), setup{store: openStore(t, dir, id), uptime: func() time.Duration { return time.Minute }})
		r.settled()
		r.wantReady()
	})
}

// TestUnreadNative: a stored file of native tables cannot be read. The node is healthy if the
// tables still have the same content, and otherwise not until an operator decides.
func TestUnreadNative(t *testing.T) {
	for what, how := range damages {
		for _, file := range []string{"native.json", "native/ID.json"} {
			if file == "native.json" && what == "deleted" {
				continue // as after a cleanup
			}
			for flush, do := range map[string]func(k *fakeNative){
				"not flushed": nil, "the ruleset flushed": (*fakeNative).flushRuleset, "the table flushed": func(k *fakeNative) { k.flushTable(proxyTable) },
			} {
				t.Run(file+", "+what+", "+flush, func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						dir := t.TempDir()
						open := func() setup {
							s := nativestore.New(dir, nativestore.Identity{BootID: "boot", NetNS: "cookie:1", Release: "6.1"})
							return setup{store: openStore(t, dir, identity(iptables.NFT)), nativeStore: s}
						}
						k := newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c"))
						s := open()
						s.guarded = k
						first := start(t, iptables.NFT, s)
						first.after(5 * time.Second)
						var id string
						for _, n := range first.d.Status().Native {
							if n.Table == proxyTable.NFT() {
								id = n.Generation
							}
						}
						first.stop()
						damage(t, filepath.Join(dir, strings.Replace(file, "ID", id, 1)), how)
						if do != nil {
							do(k)
							k.with(func() { k.unheard = nil })
						}
						next := func(f *rig) *rig {
							s := open()
							s.guarded = k
							r := run(t, f.fake, s)
							r.after(5 * time.Second)
							return r
						}
						r := next(first)
						if do == nil {
							r.wantReady()
							return
						}
						r.wantUnread(dir)
						r.stop()
						r = next(r)
						r.wantUnread(dir)
						_, err := r.d.Dismiss(t.Context())
						must(t, err)
						r.settled()
						r.wantReady()
					})
				})
			}
		}
	}
}

// TestUnreadNativeTablesAreRestoredOneByOne: the stored files of two native tables cannot be
// read, and both tables were flushed. A restore of an older generation decides about its own
// table only.
func TestUnreadNativeTablesAreRestoredOneByOne(t *testing.T) {
	disk := newFullDisk(t, iptables.NFT)
	k := newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c"))
	bubbleDisk(t, disk, k, func(t *testing.T, r *rig) {
		older := r.present(proxyTable)
		k.sync(tableOf(proxyTable, "a", "b", "c"))
		r.after(time.Minute)
		now := []string{r.present(proxyTable), r.present(dockerTable)}
		r.stop()
		for _, id := range now {
			damage(t, filepath.Join(disk.dir, "native", id+".json"), damages["truncated"])
		}
		k.flushRuleset()
		k.Hear(0)
		r = disk.start(r, k)
		unread := func() (tables []string) {
			for _, u := range r.d.Status().StateUnread {
				tables = append(tables, u.Table)
			}
			slices.Sort(tables)
			return tables
		}
		if d := cmp.Diff([]string{dockerTable.NFT(), proxyTable.NFT()}, unread()); d != "" {
			t.Errorf("before a restore (-want +got):\n%s", d)
		}
		reply, err := r.d.Restore(t.Context(), r.agreed(older))
		must(t, err)
		if !reply.Proved() {
			t.Fatalf("reply %+v", reply)
		}
		r.settled()
		if d := cmp.Diff([]string{dockerTable.NFT()}, unread()); d != "" {
			t.Errorf("after a restore (-want +got):\n%s", d)
		}
		r.wantUnread(dockerTable.NFT())
	})
}
