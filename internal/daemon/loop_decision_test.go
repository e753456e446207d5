package daemon

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// flushAll runs iptables -F on all tables of IPv4.
func flushAll(t *testing.T, fake *iptablestest.Fake) {
	t.Helper()
	for _, table := range protect.Always() {
		must(t, fake.Flush(rules.IPv4, table, ""))
	}
}

// A gap is a run that ended, a time without canaryd, and the runs that follow.
type gap struct {
	t          *testing.T
	dir        string
	id         reload.Identity
	first      *rig
	saved      string // the tables of IPv4, with the marks
	generation string // its ID
	before     map[rules.Family]rules.Ruleset
	mode       api.Mode
	elsewhere  func(context.Context, iptables.Backend) (Reader, func(), error)
}

// beginGap runs a daemon, ends it and lets an hour pass.
func beginGap(t *testing.T, backend iptables.Backend) *gap {
	t.Helper()
	g := &gap{t: t, dir: t.TempDir(), id: identity(backend), mode: api.Heal}
	g.first = start(t, backend, setup{store: openStore(t, g.dir, g.id), journal: g.dir})
	g.before, g.saved, g.generation = g.first.tables(), g.first.fake.Save(rules.IPv4), g.first.d.Status().Generation.ID
	g.first.stop()
	time.Sleep(time.Hour)
	return g
}

// next runs a daemon on the present kernel and files.
func (g *gap) next() *rig {
	g.t.Helper()
	r := run(g.t, g.first.fake, setup{store: openStore(g.t, g.dir, g.id), journal: g.dir, mode: g.mode, elsewhere: g.elsewhere})
	r.settled()
	return r
}

// wantAwaiting fails unless everything says that a decision is needed about the
// generation, and how to make it.
func (r *rig) wantAwaiting(generation string) {
	r.t.Helper()
	r.wantNotReady("canaryd restore --generation " + generation)
	r.wantNotReady("canaryd dismiss")
	s := r.d.Status()
	if s.Decision == nil || s.LossSince.IsZero() || s.Decision.Generation != generation || len(s.Decision.Tables) == 0 {
		r.t.Fatalf("the decision is %+v, loss since %v", s.Decision, s.LossSince)
	}
	for f, tables := range s.Decision.Tables {
		for table := range tables {
			if v := s.Families[f][table]; !v.Loss() {
				r.t.Errorf("%s %s is %s, and waits for a decision", f, table, v)
			}
		}
	}
	if n := r.metrics("awaiting_decision", "loss_since"); len(n) != 2 {
		r.t.Errorf("metrics: %v", n)
	}
	r.wantLog(awaitDecision)
	r.wantLog("canaryd restore --generation " + generation)
	if page := pageOf(r.t, s); !strings.Contains(page, `class="verdict lost"`) || !strings.Contains(page, "canaryd restore --generation "+generation) {
		r.t.Errorf("the page says\n%s", page)
	}
	if w := s.Flushes[0]; w.Outcome != api.AwaitingDecision || w.Lost.Rules == 0 || w.ID != s.Decision.Flush {
		r.t.Errorf("the record is %+v", w)
	}
}

// wantDecided fails unless nothing waits any more, also after a restart.
func (g *gap) wantDecided(r *rig, outcome api.Outcome) {
	g.t.Helper()
	for again := range 2 {
		r.wantReady()
		s := r.d.Status()
		if s.Decision != nil || len(r.metrics("awaiting_decision")) != 0 || len(s.Flushes) != 1 || s.Flushes[0].Outcome != outcome {
			g.t.Errorf("start %d: decision %+v, records %+v", again, s.Decision, s.Flushes)
		}
		if _, err := os.Stat(filepath.Join(g.dir, "pending.json")); !errors.Is(err, os.ErrNotExist) {
			g.t.Errorf("start %d: the loss is still on disk (%v)", again, err)
		}
		if again == 0 {
			r.stop()
			time.Sleep(time.Hour)
			r = g.next()
		}
	}
}

// TestFlushedLongAgo: a flush happens while no canaryd runs, too long ago for a replay without
// a request. The loss is recorded, and the node is not healthy, also after restarts, until an
// operator restores it.
func TestFlushedLongAgo(t *testing.T) {
	for _, mode := range []api.Mode{api.Heal, api.Observe} {
		t.Run(string(mode), func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				g := beginGap(t, backend)
				flushAll(t, g.first.fake)
				left := g.first.tables()
				g.mode = mode
				r := g.next()
				r.wantAwaiting(g.generation)
				r.wantTables(left, left)
				moved := r.metrics("flush_events", "flushes_total", "rules_absent_seconds")
				if moved["flush_events_total"] != 1 || moved["flushes_total{family=ipv4,kind=emptied,table=nat}"] != 1 || moved["rules_absent_seconds"] != 0 {
					t.Errorf("metrics: %v", moved)
				}

				// canaryd keeps learning the present tables meanwhile, and keeps the lost
				// generation.
				for n := range 8 {
					r.write(rules.Filter, ":KUBE-NEW-"+string(rune('A'+n))+" - [0:0]", "-A KUBE-NEW-"+string(rune('A'+n))+" -j RETURN")
					r.after(time.Minute)
				}
				r.wantAwaiting(g.generation)
				r.stop()
				r = g.next()
				r.wantAwaiting(g.generation)
				if n := r.metrics("flush_events"); len(n) != 0 || len(r.d.Status().Flushes) != 1 {
					t.Errorf("after a restart the flush is counted again: %v, %+v", n, r.d.Status().Flushes)
				}
				reply, err := r.d.Restore(t.Context(), api.RestoreRequest{})
				must(t, err)
				if reply.Proved() || !strings.Contains(reply.Detail, g.generation) {
					t.Errorf("a restore of what is there now says %+v", reply)
				}
				r.wantAwaiting(g.generation)

				reply, err = r.d.Restore(t.Context(), api.RestoreRequest{Generation: g.generation})
				must(t, err)
				if !reply.Proved() {
					t.Errorf("the restore: %+v", reply)
				}
				r.settled()
				r.wantTables(g.before, r.tables())
				record := r.oneRecord()
				if record.Outcome != reload.Proved || !record.AbsentAtMost || record.AbsentSeconds < 3600 || record.AbsentSeconds > 3600+9*60 {
					t.Errorf("the record is %+v", record)
				}
				if n := r.metrics("rules_absent_seconds"); n["rules_absent_seconds"] != 1 {
					t.Errorf("the absence is not counted: %v", n)
				}
				g.wantDecided(r, reload.Proved)
			})
		})
	}
}

// TestRestoredIsOld: after a restore of old rules canaryd requests a full sync of kube-proxy.
func TestRestoredIsOld(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		g := beginGap(t, backend)
		flushAll(t, g.first.fake)
		r := g.next()
		r.write(rules.Mangle, ":KUBE-PROXY-CANARY - [0:0]") // kube-proxy works again
		r.settled()
		if r.tables()[rules.IPv4][rules.Mangle].Chain("KUBE-PROXY-CANARY") == nil {
			t.Fatal("kube-proxy's canary does not stand")
		}
		_, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: g.generation})
		must(t, err)
		r.settled()
		if r.tables()[rules.IPv4][rules.Mangle].Chain("KUBE-PROXY-CANARY") != nil {
			t.Error("kube-proxy was not asked for a full sync")
		}
		r.wantReady()
	})
}

// TestOwnerEndsTheWait: a table that its owner has written again needs no decision.
func TestOwnerEndsTheWait(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		g := beginGap(t, backend)
		flushAll(t, g.first.fake)
		r := g.next()
		r.wantAwaiting(g.generation)
		for _, table := range []rules.TableName{rules.Filter, rules.Mangle} {
			r.write(table, sectionOf(g.before[rules.IPv4][table])...)
			r.after(5 * time.Second)
			if waiting := r.d.Status().Decision; waiting == nil || waiting.Tables[rules.IPv4][table] != "" || waiting.Tables[rules.IPv4][rules.Nat] == "" {
				t.Errorf("after %s came back, %+v waits", table, waiting)
			}
		}
		r.write(rules.Nat, sectionOf(g.before[rules.IPv4][rules.Nat])...)
		r.after(5 * time.Second)
		if record := r.oneRecord(); !record.AbsentAtMost || record.AbsentSeconds < 3600 {
			t.Errorf("the record is %+v", record)
		}
		g.wantDecided(r, reload.Skipped)
	})
}

// TestDismissed: an operator accepts a loss, and canaryd never raises it again.
func TestDismissed(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		g := beginGap(t, backend)
		must(t, g.first.fake.Flush(rules.IPv4, rules.Nat, ""))
		r := g.next()
		r.wantAwaiting(g.generation)
		reply, err := r.d.Dismiss(t.Context())
		must(t, err)
		if reply.Generation != g.generation || reply.Rules == 0 || reply.Flush == "" {
			t.Errorf("the answer is %+v", reply)
		}
		if again, err := r.d.Dismiss(t.Context()); err != nil || !cmp.Equal(again, api.DismissReply{}) {
			t.Errorf("once more: %+v, %v", again, err)
		}
		g.wantDecided(r, api.Dismissed)
		if n := r.metrics("rules_absent_seconds"); len(n) != 0 {
			t.Errorf("what never came back was absent for some time: %v", n)
		}
	})
}

// TestDismissedAndNotOnDisk: an operator accepts a loss, but the state folder does not let go of
// it. Log and metric say so, and after a restart it waits again.
func TestDismissedAndNotOnDisk(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		g := beginGap(t, backend)
		must(t, g.first.fake.Flush(rules.IPv4, rules.Nat, ""))
		pending := filepath.Join(g.dir, "pending.json")
		r := g.next()
		r.wantAwaiting(g.generation)
		must(t, os.Rename(pending, pending+"-away"))
		occupy(t, pending)
		moved := r.moved(func() { must(t, errorOf(r.d.Dismiss(t.Context()))) }, "state_errors")
		if moved["state_errors_total"] != 1 {
			t.Errorf("the metric counts %v failed removals", moved)
		}
		r.wantLog("A loss no longer waits for a decision, but the disk still has it; after a restart it waits again")
		r.stop()
		must(t, os.RemoveAll(pending))
		must(t, os.Rename(pending+"-away", pending))
		r = g.next()
		r.wantAwaiting(g.generation)
		must(t, errorOf(r.d.Dismiss(t.Context())))
		r.wantReady()
	})
}

// TestWhatIsLeftIsGuarded: some tables wait for a decision. canaryd heals a flush of other
// tables, and a flush of rules that an owner has written meanwhile.
func TestWhatIsLeftIsGuarded(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		g := beginGap(t, backend)
		must(t, g.first.fake.Flush(rules.IPv4, rules.Nat, ""))
		r := g.next()
		r.wantAwaiting(g.generation)
		r.write(rules.Nat, ":KUBE-MARK-MASQ - [0:0]", "-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000")
		r.settled()
		before := r.tables()
		for _, table := range []rules.TableName{rules.Filter, rules.Nat} {
			must(t, r.fake.Flush(rules.IPv4, table, ""))
			r.settled()
			r.wantTables(before, r.tables())
		}
		r.wantNotReady(g.generation)
		if w := r.d.Status().Decision; w == nil || len(w.Tables[rules.IPv4]) != 1 || w.Tables[rules.IPv4][rules.Nat] == "" {
			t.Errorf("%+v waits for a decision", w)
		}
		if n := len(r.records(0)); n != 3 {
			t.Errorf("%d records, want 3", n)
		}
	})
}

// TestRefusedForOtherReasons: a flush is reported for each reason not to replay stored rules.
func TestRefusedForOtherReasons(t *testing.T) {
	corrupt := func(path string) func(*gap) {
		return func(g *gap) { must(g.t, os.WriteFile(filepath.Join(g.dir, path), []byte(`{"format":2,"ident`), 0o600)) }
	}
	for name, refuse := range map[string]func(*gap){
		"another version": func(g *gap) { g.id.Version = "1.8.11" },
		"another clock":   nil,
		"a torn state":    corrupt("state.json"),
		"a torn state, 2": func(g *gap) { must(g.t, os.WriteFile(filepath.Join(g.dir, "state.json"), nil, 0o600)) },
		"a newer canaryd's": func(g *gap) {
			must(g.t, os.WriteFile(filepath.Join(g.dir, "state.json"), []byte(`{"format":99}`), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				g := beginGap(t, backend)
				if refuse != nil {
					refuse(g)
				}
				must(t, g.first.fake.Flush(rules.IPv4, rules.Nat, ""))
				r := g.next()
				r.wantAwaiting(g.generation)
				r.stop()
				r = g.next()
				r.wantAwaiting(g.generation)
				reply, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: g.generation})
				must(t, err)
				if !reply.Proved() {
					t.Errorf("the restore: %+v", reply)
				}
				r.settled()
				r.wantTables(g.before, r.tables())
				g.wantDecided(r, reload.Proved)
			})
		})
	}
}

// TestTheOtherBackendWasFlushed: the node has changed its backend, and the guarded rules are
// gone from both backends.
func TestTheOtherBackendWasFlushed(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		for _, test := range []struct {
			name  string
			flush bool
			moved bool // the owner has written its rules to the other backend
			waits bool
		}{{"flushed", true, false, true}, {"flushed and moved", true, true, false}, {"left behind", false, false, false}} {
			g := beginGap(t, backend)
			old := g.first.fake
			if test.flush {
				flushAll(t, old)
			}
			g.id = identity(backend.Other())
			g.elsewhere = func(_ context.Context, b iptables.Backend) (Reader, func(), error) {
				if b != backend {
					t.Errorf("%s is opened", b)
				}
				return old, func() {}, nil
			}
			other := iptablestest.NewFake(backend.Other())
			if test.moved {
				other = loadedFake(t, backend.Other())
			}
			g.first.fake = other
			r := g.next()
			switch {
			case test.moved:
				r.wantReady()
			case !test.waits:
				r.wantBare() // the new backend has no rules to guard
			}
			if !test.waits {
				continue
			}
			r.wantAwaiting(g.generation)
			r.wantNotReady("canaryd run --backend=" + string(backend))
			if _, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: g.generation}); !errors.Is(err, reload.ErrForeign) {
				t.Errorf("a restore of the other backend's rules: %v", err)
			}
			must(t, scenario.Load(t.Context(), scenario.FakePrograms{Fake: other}, rules.IPv4))
			r.after(5 * time.Second)
			g.wantDecided(r, reload.Skipped)
		}
	})
}

// TestNothingWasLost: lost marks alone are no loss, and a state of another boot is no evidence.
func TestNothingWasLost(t *testing.T) {
	for name, happen := range map[string]func(*gap){
		"a reboot":                  func(g *gap) { g.id.BootID = "later"; flushAll(g.t, g.first.fake) },
		"another network namespace": func(g *gap) { g.id.NetNS = "cookie:2"; flushAll(g.t, g.first.fake) },
		"no state":                  func(g *gap) { must(g.t, openStore(g.t, g.dir, g.id).Forget()); flushAll(g.t, g.first.fake) },
		"its owner was there again": func(g *gap) {
			flushAll(g.t, g.first.fake)
			for _, table := range protect.Always() {
				g.first.write(table, sectionOf(g.before[rules.IPv4][table])...)
			}
		},
		"marks alone": func(g *gap) {
			must(g.t, g.first.fake.Flush(rules.IPv6, rules.Mangle, ""))
			must(g.t, g.first.fake.Flush(rules.IPv4, rules.Filter, canary.DefaultChain))
		},
		"a nonce that is not on disk": func(g *gap) {
			must(g.t, g.first.fake.RestoreNoflush(rules.IPv4, strings.ReplaceAll(sectionWithMarks(g.saved), "canary:", "canary:f")))
		},
		"a torn state": func(g *gap) { must(g.t, os.WriteFile(filepath.Join(g.dir, "state.json"), []byte("{"), 0o600)) },
		"a torn state of another boot": func(g *gap) {
			must(g.t, os.WriteFile(filepath.Join(g.dir, "state.json"), []byte("{"), 0o600))
			g.id.BootID = "later"
			flushAll(g.t, g.first.fake)
		},
	} {
		t.Run(name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				g := beginGap(t, backend)
				happen(g)
				r := g.next()
				r.wantReady()
				if s := r.d.Status(); s.Decision != nil || len(s.Flushes) != 0 {
					t.Errorf("decision %+v, records %+v", s.Decision, s.Flushes)
				}
			})
		})
	}
}

// sectionWithMarks returns the canary chain of nat in the words of iptables-save.
func sectionWithMarks(saved string) string {
	nat := saved[strings.Index(saved, "*nat"):]
	nat = nat[:strings.Index(nat, "COMMIT")]
	var lines []string
	for line := range strings.Lines(nat) {
		if strings.HasPrefix(line, "-A "+canary.DefaultChain) {
			lines = append(lines, ":"+canary.DefaultChain+" - [0:0]", strings.TrimSpace(line))
		}
	}
	return section(rules.Nat, lines...)
}

// TestRebootEndsTheWait: a loss of an earlier boot needs no decision.
func TestRebootEndsTheWait(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		g := beginGap(t, backend)
		flushAll(t, g.first.fake)
		r := g.next()
		r.wantAwaiting(g.generation)
		r.stop()
		g.id.BootID = "later"
		g.wantDecided(g.next(), api.Interrupted)
	})
}

// TestFlushedAgainWhileItWaits: a second flush happens while no canaryd runs. It joins the
// outstanding loss, and one restore brings both back.
func TestFlushedAgainWhileItWaits(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		g := beginGap(t, backend)
		for _, table := range []rules.TableName{rules.Nat, rules.Filter} {
			must(t, g.first.fake.Flush(rules.IPv4, table, ""))
			r := g.next()
			r.wantAwaiting(g.generation)
			if w := r.d.Status().Decision.Tables[rules.IPv4]; w[table] == "" || w[rules.Nat] == "" {
				t.Errorf("%s was flushed, and %v waits", table, w)
			}
			r.stop()
			time.Sleep(time.Hour)
		}
		r := g.next()
		reply, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: g.generation})
		must(t, err)
		if !reply.Proved() {
			t.Errorf("the restore: %+v", reply)
		}
		r.settled()
		r.wantTables(g.before, r.tables())
		g.wantDecided(r, reload.Proved)
	})
}

// TestUnreadAtTheStart: while reads fail, canaryd does not know whether rules were lost. It
// plants no mark before that is known.
func TestUnreadAtTheStart(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		g := beginGap(t, backend)
		flushAll(t, g.first.fake)
		g.first.fake.FailReads(errInjected)
		r := g.next()
		r.after(time.Minute)
		r.wantNotReady("unknown")
		if len(r.records(0)) != 0 || strings.Contains(r.fake.Save(rules.IPv4), "canaryd-canary") {
			t.Errorf("%d records, and\n%s", len(r.records(0)), r.fake.Save(rules.IPv4))
		}
		r.fake.FailReads(nil)
		r.after(time.Minute)
		r.wantAwaiting(g.generation)
	})
}

// TestOneTableUnreadAtTheStart: canaryd judges and guards the other tables meanwhile.
func TestOneTableUnreadAtTheStart(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		g := beginGap(t, backend)
		must(t, g.first.fake.Flush(rules.IPv4, rules.Nat, ""))
		g.first.fake.DropTableFromReads(rules.IPv4, rules.Nat, errInjected)
		r := g.next()
		r.wantNotReady("ipv4 nat is unknown")
		must(t, r.fake.Flush(rules.IPv4, rules.Filter, ""))
		r.settled()
		if !strings.Contains(r.fake.SaveTable(rules.IPv4, rules.Filter), "-A KUBE-FORWARD") {
			t.Error("a flush of a table that can be read was not healed")
		}
		r.fake.DropTableFromReads(rules.IPv4, rules.Nat, nil)
		r.after(time.Minute)
		r.wantNotReady("canaryd restore --generation " + g.generation)
	})
}

// TestNoRoomForTheDecision: canaryd keeps the evidence on disk until it has stored the loss
// itself.
func TestNoRoomForTheDecision(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		g := beginGap(t, backend)
		must(t, g.first.fake.Flush(rules.IPv4, rules.Nat, ""))
		blocked := filepath.Join(g.dir, "pending.json")
		must(t, os.Mkdir(blocked, 0o700))
		must(t, os.WriteFile(filepath.Join(blocked, "x"), nil, 0o600)) // so that it stays
		r := g.next()
		r.after(3 * time.Minute)
		r.wantAwaiting(g.generation)
		r.wantLog("is not on disk")
		r.stop()
		r = g.next() // as after a kill
		r.wantAwaiting(g.generation)
		must(t, os.RemoveAll(blocked))
		r.after(2 * time.Minute)
		r.stop()
		r = g.next()
		r.wantAwaiting(g.generation)
		if n := r.metrics("flush_events"); len(n) != 0 {
			t.Errorf("what is on disk is counted again: %v", n)
		}
	})
}
