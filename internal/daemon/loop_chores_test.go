package daemon

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/copies"
	"github.com/canaryd/canaryd/internal/drill"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/quarantine"
	"github.com/canaryd/canaryd/internal/sdnotify"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A hanging is a kernel that stops answering one kind of question.
type hanging struct {
	*iptablestest.Fake
	stamps, begins jump
}

// A jump blocks its callers, once it is set, until the channel is closed.
type jump struct{ at atomic.Pointer[chan struct{}] }

func (h *jump) set() chan struct{} {
	c := make(chan struct{})
	h.at.Store(&c)
	return c
}

func (h *jump) pass() {
	if c := h.at.Load(); c != nil {
		<-*c
	}
}

func (h *hanging) Stamp(ctx context.Context, f rules.Family) (iptables.Stamp, error) {
	h.stamps.pass()
	return h.Fake.Stamp(ctx, f)
}

func (h *hanging) Begin(ctx context.Context) (iptables.Session, error) {
	h.begins.pass()
	return h.Fake.Begin(ctx)
}

// TestStepThatHangs: a step does not end. /healthz names it, the log reports it once, and the
// service manager hears nothing more. Other goroutines run meanwhile, and canaryd recovers when
// the step ends.
func TestStepThatHangs(t *testing.T) {
	for _, test := range []struct {
		name  string
		hang  func(*hanging) chan struct{}
		do    func(*rig)
		step  string
		limit time.Duration
	}{
		{"a stamp", func(h *hanging) chan struct{} { return h.stamps.set() }, func(*rig) {}, "look", readLimit},
		{"a guarded write", func(h *hanging) chan struct{} { return h.begins.set() }, (*rig).flushNat, "heal", writeLimit + readLimit + 200*time.Millisecond},
		{"a request", func(h *hanging) chan struct{} { return h.begins.set() }, func(r *rig) {
			go func() { _, _ = r.d.Restore(context.Background(), api.RestoreRequest{}) }()
		}, "answer a request", writeLimit + readLimit + 200*time.Millisecond},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				kernel := &hanging{Fake: loadedFake(t, backend)}
				r := run(t, kernel.Fake, setup{kernel: kernel})
				r.settled()
				r.wantReady()
				var heard []string // messages to the service manager
				send := func(message string) error { heard = append(heard, message); return nil }
				ctx, cancel := context.WithCancel(t.Context())
				go func() {
					must(t, sdnotify.Notifier{Send: send, Status: r.d.Status, Alive: r.d.Alive, Watchdog: 30 * time.Second}.Run(ctx))
				}()
				defer func() { cancel(); synctest.Wait() }()

				hung := test.hang(kernel)
				end := sync.OnceFunc(func() { close(hung) })
				defer end()
				test.do(r)
				r.after(test.limit - 2*time.Second) // the step began within the poll of a second
				must(t, r.d.Alive())
				r.after(4 * time.Second)
				if err := r.d.Alive(); err == nil || !strings.Contains(err.Error(), `"`+test.step+`" has run for `) {
					t.Errorf("alive: %v; want the step %q and how long it has run", err, test.step)
				}
				before := len(heard)
				r.after(time.Hour)
				if fed := strings.Count(strings.Join(heard[before:], "\n"), "WATCHDOG=1"); fed != 0 {
					t.Errorf("the watchdog was fed %d times beside a step that hangs", fed)
				}
				if n := strings.Count(r.log.String(), "A step hangs"); n != 1 {
					t.Errorf("the log says %d times that a step hangs", n)
				}

				end()
				r.after(10 * time.Second)
				must(t, r.d.Alive())
				r.wantReady()
			})
		})
	}
}

// TestSlowStepsAreAlive: neither a replay of many seconds nor a lock that another process holds
// counts as a hang.
func TestSlowStepsAreAlive(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.fake.LockWait(5 * time.Second)
		r.fake.RestoreTakes(90 * time.Second)
		r.flushNat()
		release := r.fake.HoldLock()
		for n := range 300 {
			r.after(time.Second)
			must(t, r.d.Alive())
			if n == 60 {
				release()
			}
		}
	})
}

// A situation makes a chore due.
type situation func(t *testing.T, d *Daemon, st *state, fake *iptablestest.Fake)

// ofNative follows the name of a chore in its second situation, for native tables.
const ofNative = ", of a native table"

// situations returns a situation for each chore, by the chore's name.
func situations() map[string]situation {
	now := func(at func(st *state) *time.Time) situation {
		return func(_ *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) { *at(st) = time.Now() }
	}
	ipv4 := func(at func(fs *familyState) *time.Time) situation {
		return now(func(st *state) *time.Time { return at(st.families[rules.IPv4]) })
	}
	return map[string]situation{
		"end the pause": now(func(st *state) *time.Time { return &st.pause.until }),
		"end a drill that is not answered": func(_ *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) {
			st.drills.Under = &drill.Drill{By: time.Now(), Done: make(chan struct{})}
		},
		"judge what the last run left": func(t *testing.T, d *Daemon, st *state, fake *iptablestest.Fake) {
			must(t, fake.Flush(rules.IPv4, rules.Nat, ""))
			st.marks.current = nil
			st.suspicion = &suspicion{
				remains: reload.Remains{Identity: identity(iptables.NFT), ID: "0123456789ab", Generation: st.want()},
				todo:    map[rules.TableID]bool{rules.IPv4.Table(rules.Nat): true},
				read:    map[rules.Family]bool{}, retry: pace.Retry{At: time.Now()},
			}
		},
		"look": now(func(st *state) *time.Time { return &st.looking.at }),
		"heal": func(t *testing.T, d *Daemon, st *state, fake *iptablestest.Fake) {
			must(t, fake.Flush(rules.IPv4, rules.Nat, ""))
			st.openLoss(rules.IPv4, 0)
			st.families[rules.IPv4].tables[rules.Nat].verdict = "emptied"
		},
		"examine":                        ipv4(func(fs *familyState) *time.Time { return &fs.examined.dueAt }),
		"ask kube-proxy for a full sync": ipv4(func(fs *familyState) *time.Time { return &fs.proxy.askAt }),
		"plant": func(_ *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) {
			st.marks.current, st.marks.retry.At = nil, time.Now()
		},
		"keep connections": func(_ *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) { st.generation.edition++ },
		"follow with the standby": func(_ *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) {
			nat := st.standby[rules.IPv4.Table(rules.Nat)]
			nat.kind.(*natCopy).basis, nat.next = standbyBasis{}, time.Time{}
		},
		"open the standby": func(t *testing.T, _ *Daemon, st *state, fake *iptablestest.Fake) {
			must(t, fake.Flush(rules.IPv4, rules.Nat, ""))
			st.openLoss(rules.IPv4, 0)
			st.families[rules.IPv4].tables[rules.Nat].verdict = "emptied"
		},
		"shut the standby": func(t *testing.T, d *Daemon, st *state, _ *iptablestest.Fake) {
			_, err := d.cfg.Standby.Table.Gate(copies.Want{ID: rules.IPv4.Table(rules.Nat)}, copies.Open)
			must(t, err)
			st.standby[rules.IPv4.Table(rules.Nat)].gate.Opened = time.Now()
		},
		"look at native tables before the heal": func(_ *testing.T, d *Daemon, st *state, _ *iptablestest.Fake) {
			d.cfg.Native.Kernel.(*fakeNative).flushRuleset()
			st.openLoss(rules.IPv4, 0)
			st.native.lookAt = time.Now()
		},
		"follow with the standby" + ofNative: func(_ *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) {
			delete(st.standby, proxyTable)
		},
		"open the standby" + ofNative: func(_ *testing.T, d *Daemon, st *state, _ *iptablestest.Fake) {
			d.cfg.Native.Kernel.(*fakeNative).flushTable(proxyTable)
			st.native.tables[proxyTable].finding = native.Finding{Verdict: native.Emptied, Remedy: native.ByRefill}
			d.loseNative(st, proxyTable)
		},
		"shut the standby" + ofNative: func(t *testing.T, d *Daemon, st *state, _ *iptablestest.Fake) {
			_, err := d.cfg.Standby.Table.Gate(copies.Want{ID: proxyTable, Native: copies.Native{Table: st.native.tables[proxyTable].want}}, copies.Open)
			must(t, err)
			st.standby[proxyTable].gate.Opened = time.Now()
		},
		"apply the declaration": func(_ *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) {
			own := rules.Section{Chains: []rules.Chain{{Name: "OPS", Rules: []rules.Rule{{Spec: "-j RETURN", Target: "RETURN"}}}}}
			st.declare(Declaration{
				Generation: rules.Generation{rules.IPv4.Table(rules.Filter): own},
				Claims:     func(chain string) bool { return chain == "OPS" },
			}, time.Now())
		},
		"empty the quarantine": func(t *testing.T, d *Daemon, st *state, _ *iptablestest.Fake) {
			id := rules.IPv4.Table(rules.Nat)
			section := st.generation.learned.Generation[id]
			d.setQuarantine(t.Context(), st, id, []reload.QuarantinedRule{{Chain: section.Chains[0].Name, Rule: section.Chains[0].Rules[0]}}, nil, quarantine.Recall)
			st.quarantine.Plan(id, time.Now())
		},
		"remove doubled jumps":                ipv4(func(fs *familyState) *time.Time { return &fs.undoubleAt }),
		"remove what pods that are gone left": now(func(st *state) *time.Time { return &st.pods.RemoveAt }),
		"renew the marks": func(_ *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) {
			fs := st.families[rules.IPv4]
			fs.rotation.at, fs.rotation.by = time.Now(), time.Now()
		},
		"end the contention":                  now(func(st *state) *time.Time { return &st.contention.calmAt }),
		"end the contention of native tables": now(func(st *state) *time.Time { return &st.native.contention.calmAt }),
		"count unguarded rules": func(_ *testing.T, _ *Daemon, st *state, fake *iptablestest.Fake) {
			st.generation.learned.Generation, st.inventory.at = rules.Generation{}, time.Time{}
			st.generation.edition++
		},
		"find owners": func(_ *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) {
			st.guards = guards{said: map[string]bool{}}
			st.generation.edition++
		},
		"compare with the baseline": func(_ *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) {
			st.baseline = baseline.Of(reload.Baseline{}, nil)
		},
		"go on with a drill": func(t *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) {
			x, err := drill.New(api.DrillRequest{}, drill.Guarded{Iptables: true, Native: true})
			must(t, err)
			if !x.MayGoOn(time.Now()) {
				t.Fatal("the drill does not go on")
			}
			st.drills.Under, x.By = x, time.Now().Add(time.Hour)
		},
		"remove tables of drills": now(func(st *state) *time.Time { return &st.native.drill.removeAt }),
		"drill by schedule": func(_ *testing.T, d *Daemon, st *state, _ *iptablestest.Fake) {
			d.cfg.DrillEvery, st.drills.At = period, time.Now()
		},
		"look at native tables": now(func(st *state) *time.Time { return &st.native.lookAt }),
		"heal native tables": func(_ *testing.T, d *Daemon, st *state, _ *iptablestest.Fake) {
			d.cfg.Native.Kernel.(*fakeNative).flushTable(proxyTable)
			d.loseNative(st, proxyTable)
		},
		"read native tables": now(func(st *state) *time.Time { return &st.native.readAt }),
		"read what packets add to native tables": func(_ *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) {
			table := tableOf(proxyTable, "a")
			table.Sets = []native.Set{{Name: "seen", Flags: unix.NFT_SET_EVAL}}
			st.native.tables[proxyTable] = &nativeTable{want: table}
			st.native.refreshAt = time.Now()
		},
		"say what was accepted": func(_ *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) {
			id := rules.IPv4.Table(rules.Nat)
			st.accept(id, st.generation.learned.Generation[id], rules.Section{}, time.Now())
		},
		"say which policies have become DROP": func(_ *testing.T, d *Daemon, st *state, _ *iptablestest.Fake) {
			id := rules.IPv4.Table(rules.Filter)
			d.followPolicies(st, id, map[string]string{"INPUT": "ACCEPT"})
			d.followPolicies(st, id, map[string]string{"INPUT": "DROP"})
		},
		"empty the quarantine" + ofNative: func(t *testing.T, d *Daemon, st *state, _ *iptablestest.Fake) {
			r := native.Repair{Remedy: native.ByCreate, Want: natTable(proxyTable, "a", "b", "c")}
			if table := st.native.tables[proxyTable]; table == nil || !r.Leave(native.Spot{Kind: nft.Rules, At: 1, In: 2}, "a test") {
				t.Fatal("there is nothing to be held")
			}
			d.setQuarantine(t.Context(), st, proxyTable, nil, r.Held(), quarantine.Recall)
			st.quarantine.Plan(proxyTable, time.Now())
		},
		"rehearse native tables": func(_ *testing.T, d *Daemon, st *state, _ *iptablestest.Fake) {
			d.cfg.Native.Rehearse = func(*native.Table) error { return errNativeBroken }
			st.native.tables[proxyTable].rehearsal.at = time.Now()
		},
		"request full syncs in nftables mode": func(_ *testing.T, _ *Daemon, st *state, _ *iptablestest.Fake) {
			st.native.tables[proxyTable].fullSync.At = time.Now()
		},
		"plant witnesses":    now(func(st *state) *time.Time { return &st.native.plantAt }),
		"save native tables": now(func(st *state) *time.Time { return &st.native.disk.saveAt }),
		"save":               now(func(st *state) *time.Time { return &st.disk.saveAt }),
		"give memory back":   now(func(st *state) *time.Time { return &st.memory.FreeAt }),
	}
}

// A world has in memory everything that a chore may use.
type world struct {
	fake    *iptablestest.Fake
	keeper  *keeper
	guarded *fakeNative
	standby *fakeStandby
}

// An ill is a fault that may occur during a chore.
type ill struct {
	asked func(w world) int // counts the questions so far that the fault would fail
	fail  func(t *testing.T, w world)
}

func ills() map[string]ill {
	return map[string]ill{
		"reads":  {func(w world) int { return w.fake.Reads() }, func(_ *testing.T, w world) { w.fake.FailReads(errNative) }},
		"probes": {func(w world) int { return w.fake.Probes() + w.fake.ProbesOnly() + w.fake.Stamps() }, func(_ *testing.T, w world) { w.fake.FailProbes(errNative) }},
		"restores": {func(w world) int { return w.fake.Restores() }, func(_ *testing.T, w world) {
			w.fake.FailRestores(-1, iptables.ReasonOther)
		}},
		"the lock": {func(w world) int {
			if w.fake.Info().Backend == iptables.NFT {
				return 0 // nft has no lock
			}
			return w.fake.Begins()
		}, func(t *testing.T, w world) { t.Cleanup(w.fake.HoldLock()) }},
		"native tables": {func(w world) int { return w.guarded.questions() }, func(_ *testing.T, w world) { w.guarded.breakDown(errNativeBroken) }},
		"keepers":       {func(w world) int { return w.keeper.questions() }, func(_ *testing.T, w world) { w.keeper.fail(errNative) }},
		"standbys": {func(w world) int { return w.standby.questions() }, func(_ *testing.T, w world) {
			w.standby.set(func(s *fakeStandby) { s.followErr, s.gateErr, s.shutErr = errNative, errNative, errNative })
			w.standby.native.set(func(s *fakeNativeStandby) { s.followErr, s.gateErr, s.shutErr = errNative, errNative, errNative })
		}},
	}
}

// TestChoresEnd: a chore that was done is no longer due, even if something failed. Otherwise
// the loop would never sleep. Each chore runs once without faults; then each kind of its
// questions fails once.
func TestChoresEnd(t *testing.T) {
	prepared, tried := situations(), map[string]bool{}
	d, _ := choresWorld(t, iptables.NFT)
	for _, c := range d.chores {
		if prepared[c.name] == nil {
			t.Errorf("the chore %q is not tried", c.name)
			continue
		}
		if c.limit < briefLimit || c.limit > time.Hour {
			t.Errorf("the chore %q may take %s", c.name, c.limit)
		}
		for n := range 4 {
			backend, what := []iptables.Backend{iptables.NFT, iptables.Legacy}[n%2], c.name+[]string{"", ofNative}[n/2]
			if prepared[what] == nil {
				continue
			}
			var asked map[string]int // nil: -run left the chore out
			try := func(name string, fails ill) {
				t.Run(fmt.Sprintf("%s/%s/failing %s", what, backend, name), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						if got := tryChore(t, backend, c.name, prepared[what], fails); fails.fail == nil {
							asked = got
						}
					})
				})
			}
			try("nothing", ill{})
			for name, fails := range ills() {
				if asked == nil || asked[name] > 0 {
					tried[name] = true
					try(name, fails)
				}
			}
		}
	}
	for name := range ills() {
		if !tried[name] {
			t.Errorf("no chore asks what fails with %s", name)
		}
	}
}

// choresWorld returns a daemon with a world, without running its loop.
func choresWorld(t *testing.T, backend iptables.Backend) (*Daemon, world) {
	t.Helper()
	dir, w := t.TempDir(), world{fake: loadedFake(t, backend), keeper: newKeeper(), guarded: newFakeNative(natTable(proxyTable, "a", "b"))}
	w.standby = newFakeStandby(w.fake)
	w.standby.native = newFakeNativeStandby(w.guarded)
	return configure(t, w.fake, setup{store: openStore(t, dir, identity(backend)), keeper: w.keeper, standby: w.standby, guarded: w.guarded,
		nativeStandby: w.standby.native, nativeStore: nativestore.New(dir, nativestore.Identity{})}).d, w
}

// doChore does a chore, and the write of copies or to disk that it begins.
func doChore(ctx context.Context, d *Daemon, st *state, c *chore) {
	c.do(ctx, st)
	if st.copying != nil {
		(<-d.copier.todo)()
		d.endCopying(ctx, st)
	}
	if st.saving != nil {
		(<-d.saver.todo)()
		d.endSaving(ctx, st)
	}
}

// tryChore does a chore under a fault, and returns how often it asked the questions of each
// ill.
func tryChore(t *testing.T, backend iptables.Backend, name string, prepare situation, fails ill) map[string]int {
	d, w := choresWorld(t, backend)
	log := &logText{}
	ctx, st := log.context(t.Context(), 1), d.newState()
	st.mode = api.Heal
	st.looking.at, st.marks.retry.At = time.Now(), time.Now()
	for range 200 { // it begins as Run does
		if c := d.next(st); c != nil {
			doChore(ctx, d, st, c)
		}
		time.Sleep(50 * time.Millisecond)
	}
	if st.loss != nil || !st.allPlanted() {
		t.Fatal("the daemon has not begun")
	}
	must(t, w.fake.RestoreNoflush(rules.IPv4, scenario.NewService)) // gives the chore something to read

	prepare(t, d, st, w.fake)
	asked := map[string]int{}
	for other, i := range ills() {
		asked[other] = -i.asked(w)
	}
	if fails.fail != nil {
		fails.fail(t, w)
	}
	c := &d.chores[slices.IndexFunc(d.chores, func(c chore) bool { return c.name == name })]
	if now := time.Now(); !pace.Due(c.dueAt(st), now) {
		t.Fatalf("%q is not due", name)
	}
	doChore(ctx, d, st, c)
	if at := c.dueAt(st); pace.Due(at, time.Now()) {
		t.Errorf("%q is due at %s after it was done, which is now", name, at)
	}
	// Chores must not keep making each other due either.
	for n := 0; d.next(st) != nil; n++ {
		if n > 50 {
			t.Fatalf("the loop spins: %q is due", d.next(st).name)
		}
		doChore(ctx, d, st, d.next(st))
	}
	for other, i := range ills() {
		asked[other] += i.asked(w)
	}
	return asked
}
