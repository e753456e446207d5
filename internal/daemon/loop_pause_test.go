package daemon

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// whyPaused is the reason for each pause.
const whyPaused = "a new firewall"

// pause requests a pause of d.
func (r *rig) pause(d time.Duration) api.PauseReply {
	r.t.Helper()
	reply, err := r.d.Pause(r.t.Context(), api.PauseRequest{Seconds: d.Seconds(), By: "ada", Why: whyPaused})
	must(r.t, err)
	if !reply.Until.Equal(time.Now().Add(d)) {
		r.t.Errorf("a pause of %s at %s lasts until %s", d, time.Now(), reply.Until)
	}
	return reply
}

func (r *rig) resume() api.PauseReply {
	r.t.Helper()
	reply, err := r.d.Resume(r.t.Context())
	must(r.t, err)
	return reply
}

// wantHeld fails unless replays are held, nothing protected was written since
// the tables were as in left, and status and metrics say so.
func (r *rig) wantHeld(left string) {
	r.t.Helper()
	if diff := cmp.Diff(left, without(r.tables())); diff != "" {
		r.t.Errorf("written in a pause (-left +now):\n%s", diff)
	}
	r.wantNotReady("paused")
	if s := r.d.Status(); !s.Paused || s.PausedUntil.IsZero() || s.PausedSince.IsZero() || s.PausedBy != "ada" || s.PausedWhy != whyPaused {
		r.t.Errorf("paused: %t, since %v until %v, by %q: %q", s.Paused, s.PausedSince, s.PausedUntil, s.PausedBy, s.PausedWhy)
	}
	if object := r.statusJSON(); object["paused"] != true || object["pausedWhy"] != whyPaused || r.metrics("paused")["paused"] != 1 {
		r.t.Errorf("status -o json: paused %v, metrics: %v", object["paused"], r.metrics("paused"))
	}
}

// wantNotHeld fails unless no pause is left.
func (r *rig) wantNotHeld() {
	r.t.Helper()
	if s := r.d.Status(); s.Paused || !s.PausedUntil.IsZero() || !s.PausedSince.IsZero() || s.PausedBy+s.PausedWhy != "" || len(r.metrics("paused")) != 0 {
		r.t.Errorf("paused: %t, until %v, %v", s.Paused, s.PausedUntil, r.metrics("paused"))
	}
}

// TestPause: in a pause canaryd notices, reports and counts a flush, and replays nothing. When
// the pause ends, by itself or on request, everything is back at once. One flush is one record.
func TestPause(t *testing.T) {
	for _, how := range []string{"it runs out", "resume"} {
		t.Run(how, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{})
				before, left := r.tables(), leftBy(t, backend, "flush-nat")
				if reply := r.pause(10 * time.Minute); reply.WasPaused {
					t.Errorf("the first pause: %+v", reply)
				}
				r.wantHeld(without(before))
				flushed := time.Now()
				moved := r.moved(func() {
					r.flushNat()
					lost := without(r.tables())
					r.after(5 * time.Minute)
					r.wantHeld(lost)
				}, lossMetrics...)
				since := moved["loss_since_timestamp_seconds"]
				delete(moved, "loss_since_timestamp_seconds")
				wantMoved(t, moved, series{"flush_events_total": 1, "flushes_total{family=ipv4,kind=emptied,table=nat}": 1})
				s := r.d.Status()
				if since == 0 || !s.LossSince.Equal(flushed) || s.Families[rules.IPv4][rules.Nat] != canary.Emptied {
					t.Errorf("loss since %v, want %v; verdicts %v", s.LossSince, flushed, s.Families)
				}
				if record := r.oneRecord(); record.Outcome != api.WaitingPaused || !record.Open() || record.Kind != canary.Emptied || record.Lost.Rules == 0 {
					t.Errorf("the record in the pause: %+v", record)
				}
				if how == "resume" {
					if reply := r.resume(); !reply.WasPaused {
						t.Error("resume knows of no pause")
					}
					r.after(25 * time.Millisecond)
				} else {
					r.after(5*time.Minute - time.Millisecond)
					r.wantNotReady("paused")
					r.after(26 * time.Millisecond)
				}
				r.wantNotHeld()
				r.wantBack(before, left)
				r.wantOnlyNat()
				if record := r.oneRecord(); record.Outcome != reload.Proved || record.AbsentSeconds < 300 {
					t.Errorf("the record after the pause: %+v", record)
				}
				if again := r.resume(); again.WasPaused {
					t.Error("a second resume finds a pause")
				}
			})
		})
	}
}

// TestPauseGrows: the record of a pause counts later losses too. canaryd leaves and learns the
// owners' writes, in lost tables and in others.
func TestPauseGrows(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.pause(time.Hour)
		r.after(time.Minute)
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService)) // nothing is lost yet
		r.after(time.Minute)
		if len(r.chain(rules.IPv4, rules.Nat, latecome)) == 0 || r.d.Status().Generation.Rules <= 0 {
			t.Fatal("the owner's change is gone")
		}
		learned := r.tables()
		r.flushNat()
		r.after(time.Minute)
		const newer = "-p tcp -m tcp --dport 9999 -j KUBE-MARK-MASQ"
		r.write(rules.Nat, "-A KUBE-NODEPORTS "+newer)
		must(t, r.fake.Flush(rules.IPv6, rules.Filter, ""))
		r.after(time.Minute)
		wantMoved(t, r.metrics("flush_events", "flushes", "replays"), series{
			"flush_events_total": 1, "flushes_total{family=ipv4,kind=emptied,table=nat}": 1,
			"flushes_total{family=ipv6,kind=emptied,table=filter}": 1,
		})
		if record := r.oneRecord(); len(record.Families) != 2 || len(record.Tables) != 2 {
			t.Errorf("the record names %v %v", record.Families, record.Tables)
		}
		reads := r.fake.Reads()
		r.after(30 * time.Minute)
		if n := r.fake.Reads() - reads; n > 10 {
			t.Errorf("%d reads in half an hour of a pause", n)
		}
		r.resume()
		r.settled()
		r.wantReady()
		if got := r.chain(rules.IPv4, rules.Nat, "KUBE-NODEPORTS"); !cmp.Equal(got, []string{newer}) {
			t.Errorf("what its owner wrote in the pause was overwritten: %q", got)
		}
		for _, c := range []struct {
			family rules.Family
			table  rules.TableName
			name   string
		}{{rules.IPv4, rules.Nat, latecome}, {rules.IPv4, rules.Nat, "KUBE-SERVICES"}, {rules.IPv6, rules.Filter, "KUBE-FORWARD"}} {
			if want := learned[c.family][c.table].Chain(c.name); len(r.chain(c.family, c.table, c.name)) != len(want.Rules) {
				t.Errorf("%s %s %s is not back", c.family, c.table, c.name)
			}
		}
	})
}

// TestPauseAgain: a new pause replaces the present one, shorter or not.
func TestPauseAgain(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		for _, second := range []time.Duration{10 * time.Second, 5 * time.Minute} {
			r := start(t, backend, setup{})
			before, left := r.tables(), leftBy(t, backend, "flush-nat")
			r.pause(time.Minute)
			r.after(10 * time.Second)
			r.flushNat()
			lost := without(r.tables())
			r.after(time.Second)
			if reply := r.pause(second); !reply.WasPaused {
				t.Error("the second pause does not know of the first")
			}
			r.after(second - time.Second)
			r.wantHeld(lost)
			r.after(time.Second + 30*time.Millisecond)
			r.wantNotHeld()
			r.wantBack(before, left)
			r.wantOnlyNat()
			r.stop()
		}
	})
}

// TestPauseWhileRetrying: a pause also stops the tries of a failing replay.
func TestPauseWhileRetrying(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		before, left := r.tables(), leftBy(t, backend, "flush-nat")
		r.fake.FailRestores(1000, iptables.ReasonMissingSet)
		r.flushNat()
		r.after(10 * time.Second)
		r.pause(time.Hour)
		r.after(time.Second)
		restores := r.fake.Restores()
		r.after(30 * time.Minute)
		if n := r.fake.Restores() - restores; n != 0 {
			t.Errorf("%d restores in a pause", n)
		}
		r.fake.FailRestores(0, iptables.ReasonMissingSet)
		r.resume()
		r.after(30 * time.Millisecond)
		r.wantBack(before, left)
		r.wantOnlyNat()
	})
}

// TestWhyPaused: a reason is bounded, and a control character in it reaches no terminal.
func TestWhyPaused(t *testing.T) {
	long := strings.Repeat("ä", api.MostWhy)
	for _, test := range []struct{ why, want string }{
		{"", ""},
		{"kernel update, see OPS-12", "kernel update, see OPS-12"},
		{long, long},
		{long + "ä", "has 201 characters: want at most 200"},
		{"red\x1b[31m\nhealthy", `red\x1b[31m\nhealthy`},
		{"\xff", "?"},
	} {
		t.Run(fmt.Sprintf("%.20q", test.why), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, iptables.NFT, setup{})
				_, err := r.d.Pause(t.Context(), api.PauseRequest{Seconds: 60, By: "ada\x07", Why: test.why})
				s := r.d.Status()
				if err != nil {
					if !strings.Contains(err.Error(), test.want) || s.Paused {
						t.Errorf("paused: %t, %v; want %q", s.Paused, err, test.want)
					}
					return
				}
				if d := cmp.Diff([]string{`ada\a`, test.want}, []string{s.PausedBy, s.PausedWhy}); d != "" {
					t.Errorf("by and why (-want +got)\n%s", d)
				}
				r.wantLog("Paused on request")
			})
		})
	}
}

// TestPauseSurvivesARestart: a pause lasts until its end, over a restart of canaryd, and its
// losses are replayed then.
func TestPauseSurvivesARestart(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, id := t.TempDir(), identity(backend)
		first := start(t, backend, setup{store: openStore(t, dir, id)})
		before, left := first.tables(), leftBy(t, backend, "flush-nat")
		first.pause(5 * time.Minute)
		first.flushNat()
		lost := without(first.tables())
		first.after(time.Minute)
		first.wantHeld(lost)
		first.stop()
		first.wantLog("The pause continues after a restart")
		if diff := cmp.Diff(lost, without(first.tables())); diff != "" {
			t.Errorf("SIGTERM in a pause wrote (-lost +now):\n%s", diff)
		}
		r := run(t, first.fake, setup{store: openStore(t, dir, id)})
		r.settled()
		r.wantHeld(lost)
		r.wantLog("the pause of the last run continues")
		r.after(3 * time.Minute)
		r.wantHeld(lost)
		r.after(time.Minute)
		r.wantNotHeld()
		r.wantBack(before, left)
		r.wantOnlyNat()
		r.stop()
		r = run(t, r.fake, setup{store: openStore(t, dir, id)})
		r.settled()
		r.wantNotHeld()
	})
}

// TestPauseAndRequests: canaryd obeys requests in a pause too, and refuses nonsense.
func TestPauseAndRequests(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		before, left := r.tables(), leftBy(t, backend, "flush-nat")
		for _, length := range []float64{0, -1, 0.5, 86401, 1e300, -1e300} {
			if reply, err := r.d.Pause(t.Context(), api.PauseRequest{Seconds: length}); err == nil {
				t.Errorf("a pause of %g s: %+v", length, reply)
			}
			r.wantNotHeld()
		}
		r.pause(time.Hour)
		r.flushNat()
		r.after(time.Second)
		reply, err := r.d.Restore(t.Context(), api.RestoreRequest{})
		must(t, err)
		if !reply.Proved() {
			t.Errorf("restore in a pause: %+v", reply)
		}
		r.after(time.Second)
		r.wantTables(before, left)
		r.wantNotReady("paused")
		r.flushNat()
		lost := without(r.tables())
		r.after(time.Second)
		r.wantHeld(lost)
		must(t, r.d.Cleanup(t.Context(), api.CleanupRequest{}))
		r.wantNotReady("stopped by a cleanup")
		r.wantNotHeld()
		if _, err := r.d.Pause(t.Context(), api.PauseRequest{Seconds: 60}); err == nil {
			t.Error("a pause after a cleanup did not fail")
		}
		if _, err := r.d.Resume(t.Context()); err == nil {
			t.Error("a resume after a cleanup did not fail")
		}
	})
}

// TestPauseHoldsDeclarations: canaryd writes a changed manifest when the pause ends.
func TestPauseHoldsDeclarations(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		first, second := medium(t), small(t)
		r := startDeclared(t, backend, setup{declared: first})
		r.pause(time.Hour)
		held := without(r.tables())
		r.declare <- Declaration{Generation: second, Claims: claims}
		r.after(time.Minute)
		r.wantHeld(held)
		r.wantDeclared(first)
		r.resume()
		r.settled()
		r.wantReady()
		r.wantDeclared(second)
	})
}

// TestOwnersPutBackInAPause: owners put back all rules that a flush took in a pause. Its record
// ends, no table is lost, and the next flush has a record of its own. A part is not
// enough, and a flush right before the marks are written is recorded, too.
func TestOwnersPutBackInAPause(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		before := r.tables()
		owner := func() { r.write(rules.Nat, sectionOf(before[rules.IPv4][rules.Nat])...) }
		r.pause(10 * time.Minute)
		outcomes := func(want ...api.Outcome) {
			t.Helper()
			var got []api.Outcome
			for _, f := range r.d.Status().Flushes {
				got = append(got, f.Outcome)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("outcomes (-want +got):\n%s", diff)
			}
		}
		r.flushNat()
		r.after(10 * time.Second)
		r.write(rules.Nat, ":KUBE-MARK-MASQ - [0:0]", "-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000")
		r.after(10 * time.Second)
		outcomes(api.WaitingPaused)
		r.wantNotReady("ipv4 nat")

		owner()
		r.after(10 * time.Second)
		outcomes(reload.Skipped)
		if s := r.d.Status(); !s.LossSince.IsZero() || s.Families[rules.IPv4][rules.Nat] != canary.Intact {
			t.Errorf("loss since %s, verdicts %v", s.LossSince, s.Families)
		}
		if f := r.oneRecord(); !f.AbsentAtMost || f.AbsentSeconds < 20 || f.AbsentSeconds > 25 {
			t.Errorf("the record is %+v", f)
		}

		r.flushNat()
		r.after(10 * time.Second)
		outcomes(api.WaitingPaused, reload.Skipped)
		owner()
		r.after(20 * time.Millisecond)
		r.flushNat()
		r.after(10 * time.Second)
		outcomes(api.WaitingPaused, reload.Skipped)
		r.wantNotReady("ipv4 nat")
		r.resume()
		r.after(10 * time.Second)
		outcomes(reload.Proved, reload.Skipped)
		r.wantBack(before, leftBy(t, backend, "flush-nat"))
	})
}
