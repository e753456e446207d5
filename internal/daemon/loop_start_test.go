package daemon

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

func identity(backend iptables.Backend) reload.Identity {
	return reload.Identity{BootID: "boot", NetNS: "cookie:1", Backend: string(backend), Version: "1.8.9"}
}

func openStore(t *testing.T, dir string, id reload.Identity) *reload.Store {
	t.Helper()
	store, err := reload.OpenStore(dir, id)
	must(t, err)
	return store
}

// TestRestart: a start judges the events since the last run by that run's stored state.
func TestRestart(t *testing.T) {
	tests := []struct {
		name   string
		down   time.Duration
		flush  bool
		change func(*reload.Identity)
		clock  time.Duration // change of the wall clock meanwhile
		asleep time.Duration // how much the machine's uptime lags
		back   bool          // the flushed rules come back
		waits  bool          // they wait for a decision
		log    string
	}{
		{name: "intact", down: time.Minute, back: true, log: "Took up the stored generation"},
		{name: "intact for long", down: time.Hour, back: true, log: "Took up the stored generation"},
		{name: "flushed", down: time.Minute, flush: true, back: true, log: "The rules are back and proved"},
		{name: "flushed long ago", down: time.Hour, flush: true, waits: true, log: "too old for a replay"},
		{name: "flushed, the clock set forward", down: time.Minute, flush: true, clock: 24 * time.Hour, back: true, log: "The rules are back and proved"},
		{name: "flushed long ago, the clock set back", down: time.Hour, flush: true, clock: -24 * time.Hour, waits: true, log: "too old for a replay"},
		{name: "flushed, in another time namespace", down: time.Minute, flush: true, asleep: time.Hour, waits: true, log: "too old for a replay"},
		{name: "another boot", down: time.Minute, flush: true, change: func(id *reload.Identity) { id.BootID = "later" }, log: "The stored generation is not used"},
		{name: "another version", down: time.Minute, flush: true, change: func(id *reload.Identity) { id.Version = "1.8.10" }, waits: true, log: "The stored generation is not used"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir, id := t.TempDir(), identity(backend)
				first := start(t, backend, setup{store: openStore(t, dir, id)})
				before, text := first.tables(), first.fake.Save(rules.IPv4)
				first.stop()
				if now := first.fake.Save(rules.IPv4); now != text {
					t.Error("the end of a run touched the tables")
				}
				generation := first.d.Status().Generation
				time.Sleep(test.down)
				left := before
				if test.flush {
					first.flushNat()
					left = first.tables()
				}
				if test.change != nil {
					test.change(&id)
				}
				setClock(t, dir, test.clock)
				restores := first.fake.Restores()
				r := run(t, first.fake, setup{store: openStore(t, dir, id), uptime: func() time.Duration { return bubbleUptime() - test.asleep }})
				r.settled()
				if test.waits {
					r.wantAwaiting(generation.ID)
				} else {
					r.wantReady()
				}
				r.wantLog(test.log)
				if test.back {
					r.wantBack(before, left)
				} else if len(r.chain(rules.IPv4, rules.Nat, "KUBE-SERVICES")) != 0 {
					t.Error("rules were replayed that ought not to be")
				}
				if !test.flush {
					if n := r.fake.Restores() - restores; n != 0 {
						t.Errorf("%d restores at the start of a run that found all intact", n)
					}
					if now := r.d.Status().Generation; now.ID != generation.ID {
						t.Errorf("the generation is %s, was %s", now.ID, generation.ID)
					}
				}
				// In each case canaryd guards the tables from now on.
				must(t, r.fake.Flush(rules.IPv4, rules.Filter, ""))
				r.settled()
				if len(r.chain(rules.IPv4, rules.Filter, "KUBE-FORWARD")) == 0 {
					t.Error("a flush after the start was not healed")
				}
			})
		})
	}
}

// setClock changes the state on disk as if the wall clock had been set since. A bubble's own
// clock cannot be set.
func setClock(t *testing.T, dir string, by time.Duration) {
	t.Helper()
	path := filepath.Join(dir, "state.json")
	text, err := os.ReadFile(path)
	must(t, err)
	var state reload.State
	must(t, json.Unmarshal(text, &state))
	state.Confirmed, state.Sum = state.Confirmed.Add(-by), ""
	text, err = json.Marshal(state)
	must(t, err)
	must(t, os.WriteFile(path, text, 0o600))
}

// TestStoreFails: canaryd heals although its disk fails.
func TestStoreFails(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := filepath.Join(t.TempDir(), "state")
		store := openStore(t, dir, identity(backend))
		must(t, os.RemoveAll(dir)) // a read-only folder would not stop root
		must(t, os.WriteFile(dir, nil, 0o600))
		r := start(t, backend, setup{store: store})
		before := r.tables()
		r.flushNat()
		r.settled()
		r.wantBack(before, leftBy(t, backend, "flush-nat"))
		r.wantLog("is not on disk")
		reads := r.fake.Reads()
		r.after(5 * time.Minute)
		if n := r.fake.Reads() - reads; n != 0 {
			t.Errorf("%d reads because the disk fails", n)
		}
		if n := strings.Count(r.log.String(), "is not on disk"); n > 20 {
			t.Errorf("logged %d times in 5 minutes", n)
		}
	})
}

// TestObserve: canaryd writes nothing but marks, and the loss lasts until the owner has written
// its rules again.
func TestObserve(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{mode: api.Observe})
		saved := r.fake.Save(rules.IPv4)
		generation := r.d.Status().Generation
		for n := 1; n <= 3; n++ {
			r.flushNat()
			left := without(r.tables())
			r.after(20 * time.Second)
			if diff := cmp.Diff(left, without(r.tables())); diff != "" {
				t.Errorf("flush %d: observe mode wrote (-flushed +now):\n%s", n, diff)
			}
			r.wantNotReady("ipv4 nat is emptied")
			if s := r.d.Status(); s.LossSince.IsZero() || s.Generation.Rules != generation.Rules || len(s.Flushes) != n {
				t.Errorf("flush %d: loss since %v, generation %+v, %d records", n, s.LossSince, s.Generation, len(s.Flushes))
			}
			for key, v := range r.metrics("canary_present") {
				if v != 1 {
					t.Errorf("flush %d: %s is %v", n, key, v)
				}
			}
			if n == 1 {
				continue // a second flush of the lost table
			}
			// The owner writes its rules, without canaryd's marks.
			var lines []string
			for line := range strings.Lines(saved) {
				if !strings.Contains(line, "canaryd-") && !strings.Contains(line, canary.DefaultChain) {
					lines = append(lines, line)
				}
			}
			nat := strings.Join(lines, "")
			nat = nat[strings.Index(nat, "*nat"):]
			nat = nat[:strings.Index(nat, "COMMIT\n")+len("COMMIT\n")]
			must(t, r.fake.RestoreNoflush(rules.IPv4, nat))
			r.after(5 * time.Second)
			r.wantReady()
		}
		if got := r.metrics("replays_total", "flushes_total"); got["flushes_total{family=ipv4,kind=emptied,table=nat}"] != 3 || len(got) != 1 {
			t.Errorf("metrics: %v", got)
		}
	})
}

// TestRequests: the daemon answers the control socket's requests.
func TestRequests(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{deaf: true, store: openStore(t, t.TempDir(), identity(backend))})
		ctx := t.Context()
		first, before := r.d.Status().Generation.ID, r.tables()
		r.after(5 * time.Second)

		// Look answers with the present state, between two polls and without hints.
		must(t, scenario.FakePrograms{Fake: r.fake}.Flush(ctx, rules.IPv4, rules.Nat, ""))
		s, err := r.d.Look(ctx)
		must(t, err)
		if s.Families[rules.IPv4][rules.Nat] != canary.Emptied || s.LossSince.IsZero() || s.Healthy {
			t.Errorf("Look: %+v", s)
		}
		object := r.statusJSON()
		if object["healthy"] != false || object["lossSince"] == nil || object["families"].(map[string]any)["ipv4"].(map[string]any)["nat"] != "emptied" {
			t.Errorf("status -o json during a loss: %v", object)
		}
		r.after(3 * time.Second)
		r.wantBack(before, r.tables())

		reply, err := r.d.Restore(ctx, api.RestoreRequest{})
		must(t, err)
		if !reply.Proved() {
			t.Errorf("Restore of what is intact: %+v", reply)
		}
		if _, err := r.d.Restore(ctx, api.RestoreRequest{Generation: "0123456789ab"}); !errors.Is(err, api.ErrNoGeneration) {
			t.Errorf("Restore of an unknown generation: %v", err)
		}

		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		r.after(5 * time.Second)
		if id := r.d.Status().Generation.ID; id == first {
			t.Fatal("the change was not captured")
		}
		reply, err = r.d.Restore(ctx, api.RestoreRequest{Generation: first, DryRun: true})
		must(t, err)
		reply, err = r.d.Restore(ctx, api.RestoreRequest{Generation: first, Agreed: reply.Agreement()})
		must(t, err)
		if !reply.Proved() || r.chain(rules.IPv4, rules.Nat, latecome) != nil {
			t.Errorf("Restore of the first generation: %+v, and %s holds %q", reply, latecome, r.chain(rules.IPv4, rules.Nat, latecome))
		}
		r.after(5 * time.Second)
		r.wantReady()

		text, err := r.d.Render(ctx, api.RenderRequest{})
		must(t, err)
		empty := iptablestest.NewFake(backend)
		v4, err := r.d.Render(ctx, api.RenderRequest{Family: rules.IPv4})
		must(t, err)
		must(t, empty.RestoreNoflush(rules.IPv4, v4))
		if !strings.HasPrefix(text, v4) || strings.Contains(text, "canaryd-") || !strings.Contains(text, "*nat") {
			t.Error("Render is not the generation as iptables-restore input")
		}
		if _, err := r.d.Render(ctx, api.RenderRequest{Generation: "0123456789ab"}); !errors.Is(err, api.ErrNoGeneration) {
			t.Errorf("Render of an unknown generation: %v", err)
		}
	})
}

func TestCleanup(t *testing.T) {
	for _, all := range []bool{false, true} {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			r := start(t, backend, setup{store: openStore(t, t.TempDir(), identity(backend))})
			before := without(r.tables())
			if n := len(r.metrics("canary_present")); n != 6 {
				t.Errorf("before the cleanup %d canaries are present, want 6", n)
			}
			must(t, r.d.Cleanup(t.Context(), api.CleanupRequest{Rules: all}))
			text := r.fake.Save(rules.IPv4) + r.fake.Save(rules.IPv6)
			if strings.Contains(strings.ToLower(text), "canaryd") {
				t.Error("canaryd's marks are still there")
			}
			if got := strings.Contains(text, "KUBE-SERVICES") || strings.Contains(text, "CNI-"); got == all {
				t.Errorf("with rules %t: protected chains are there: %t", all, got)
			}
			if !all && before != without(r.tables()) {
				t.Errorf("cleanup touched rules:\n%s", cmp.Diff(before, without(r.tables())))
			}
			if !strings.Contains(text, "corp-input") || strings.Count(text, "ssh") == 0 {
				t.Error("foreign rules are gone")
			}
			// canaryd heals no more, and the status says so.
			must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
			left := r.fake.Save(rules.IPv4)
			r.after(time.Minute)
			if now := r.fake.Save(rules.IPv4); now != left {
				t.Error("canaryd wrote after a cleanup")
			}
			r.wantNotReady("stopped by a cleanup")
			if left := r.metrics("canary_present"); len(left) > 0 {
				t.Errorf("after a cleanup these canaries are said to be present: %v", left)
			}
			if _, err := r.d.Restore(t.Context(), api.RestoreRequest{}); err == nil {
				t.Error("a restore after a cleanup did not fail")
			}
			if _, err := r.d.Look(t.Context()); err != nil {
				t.Error(err)
			}
			must(t, r.d.Alive())
		})
	}
}

// TestCommitWatcherFeedsTheLoop: the real watcher gives the hints, and canaryd names its
// culprit.
func TestCommitWatcherFeedsTheLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := loadedFake(t, iptables.NFT)
		r := run(t, fake, setup{deaf: true})
		w := &watch.CommitWatcher{Hints: r.hints, Writers: r.writers, Subscribe: func() (watch.CommitSource, error) { return fake.Subscribe(), nil }}
		done := make(chan error)
		go func() { done <- w.Run(t.Context()) }()
		t.Cleanup(func() { must(t, <-done) })
		r.settled()
		before := r.tables()
		must(t, fake.As(1<<30, "firewalld").Flush(rules.IPv4, rules.Nat, ""))
		r.after(100 * time.Millisecond)
		r.wantBack(before, leftBy(t, iptables.NFT, "flush-nat"))
		if record := r.oneRecord(); record.Culprit.Comm != "firewalld" || record.Culprit.PID != 1<<30 {
			t.Errorf("the culprit is %+v", record.Culprit)
		}
	})
}
