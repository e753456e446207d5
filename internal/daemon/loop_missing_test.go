package daemon

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// wantLeft fails unless the node is not healthy since then, because rules wait for their owner, and
// no metric counts that as a flush.
func (r *rig) wantLeft(kind canary.Verdict, since time.Time) {
	r.t.Helper()
	s := r.d.Status()
	problem := fmt.Sprintf("ipv4 nat is %s; canaryd leaves that to its owner until %s", kind, since.Add(r.d.cfg.JumpGrace).UTC().Format(time.RFC3339))
	if err := s.Ready(); err == nil || s.Healthy || err.Error() != problem || s.Headline != "NOT healthy: "+problem {
		r.t.Errorf("ready: %v, headline %q, want %q", err, s.Headline, problem)
	}
	record := r.oneRecord()
	if got := s.Families[rules.IPv4][rules.Nat]; got != kind || !s.LossSince.Equal(since) || !record.Time.Equal(since) {
		r.t.Errorf("ipv4 nat is %s since %s, and the record since %s; want %s since %s", got, s.LossSince, record.Time, kind, since)
	}
	if record.Outcome != api.WaitingOwner || !record.Open() || record.Kind != kind || record.NoticedSeconds > 0.2 || record.Lost.Rules == 0 {
		r.t.Errorf("the record is %+v", record)
	}
	if got := r.metrics("flush_events", "flushes_total", "rules_absent"); len(got) > 0 {
		r.t.Errorf("it is counted as a flush before the grace is over: %v", got)
	}
	if got := r.metrics("loss_since_timestamp_seconds")["loss_since_timestamp_seconds"]; int64(got) != since.Unix() {
		r.t.Errorf("the metric says %.0f, want %d", got, since.Unix())
	}
}

// wantCounted fails unless the record counts from the deletion on. On legacy it has a bound: when
// the table was last known to be complete.
func (r *rig) wantCounted(record api.Flush, deleted time.Time, backend iptables.Backend) {
	r.t.Helper()
	absent := time.Duration(record.AbsentSeconds * float64(time.Second))
	least, most := r.d.cfg.JumpGrace, r.d.cfg.JumpGrace+time.Second
	if backend == iptables.Legacy {
		most += quietWalk
	}
	if !record.Time.Equal(deleted) || absent < least || absent > most || record.AbsentAtMost != (backend == iptables.Legacy) {
		r.t.Errorf("the record begins at %s, the deletion at %s; absent for %s, at most: %t", record.Time, deleted, absent, record.AbsentAtMost)
	}
	if record.AbsentAtMost && !record.LastInForce.Before(deleted) {
		r.t.Errorf("last in force at %s, deleted at %s", record.LastInForce, deleted)
	}
	if record.NoticedSeconds <= 0 || record.NoticedSeconds > 0.2 || record.Outcome != reload.Proved {
		r.t.Errorf("the record says noticed after %gs, and %s", record.NoticedSeconds, record.Outcome)
	}
}

// natChains returns the rules of these chains of nat.
func (r *rig) natChains(chains ...string) map[string][]string {
	r.t.Helper()
	all := map[string][]string{}
	for _, name := range chains {
		all[name] = r.chain(rules.IPv4, rules.Nat, name)
	}
	return all
}

// TestJumpDeletedOnABusyNode: the grace ends although other processes keep writing. Until then
// the node is not healthy, and the record of the replay counts from the deletion on.
func TestJumpDeletedOnABusyNode(t *testing.T) {
	const pod = "CNI-DN-31c7af326e67a1a733e30"
	for name, delete := range map[string]func(r *rig){
		"jumps_missing": func(r *rig) { r.write(rules.Nat, "-D PREROUTING "+portals) },
		"emptied":       func(r *rig) { r.write(rules.Nat, "-F "+pod) },
	} {
		kind := canary.Verdict(name)
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{journal: t.TempDir()})
				r.after(20 * time.Second)
				before := r.natChains("PREROUTING", pod)
				deleted := time.Now()
				delete(r)
				owner := r.fake.As(900, "kube-proxy")
				for i := range 7 { // until 14 s after the deletion
					r.after(2 * time.Second)
					r.wantLeft(kind, deleted)
					if i%2 == 1 {
						must(t, owner.RestoreNoflush(rules.IPv4, section(rules.Nat, ":KUBE-SVC-CHURNCHURNCHURN2 - [0:0]", "-F KUBE-SVC-CHURNCHURNCHURN2", fmt.Sprintf("-A KUBE-SVC-CHURNCHURNCHURN2 -p tcp --dport %d -j RETURN", i+1))))
					}
				}
				r.after(3 * time.Second)
				r.wantReady()
				r.wantCounted(r.oneRecord(), deleted, backend)
				if d := cmp.Diff(before, r.natChains("PREROUTING", pod)); d != "" {
					t.Errorf("after the grace (-want +got):\n%s", d)
				}
				if kept := r.full("1").Flush; kept.ID != r.oneRecord().ID || !kept.Time.Equal(deleted) {
					t.Errorf("the journal says %+v", kept)
				}
			})
		})
	}
}

// TestOwnerIsDoneInTheGrace: an owner deletes a rule, and within the grace writes it again or
// deletes the rest. There is no record. A later deletion has a full grace again.
func TestOwnerIsDoneInTheGrace(t *testing.T) {
	for name, end := range map[string]func(r *rig){
		"it is back": func(r *rig) { r.write(rules.Nat, "-I PREROUTING "+portals) },
		"its owner ends": func(r *rig) {
			r.deleteKubeProxysJumps(50 * time.Millisecond)
			r.deleteKubeProxysChains()
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir := t.TempDir()
				r := start(t, backend, setup{journal: dir})
				r.after(20 * time.Second)
				moved := r.moved(func() {
					deleted := time.Now()
					r.write(rules.Nat, "-D PREROUTING "+portals)
					r.after(10 * time.Second)
					r.wantLeft(canary.JumpsMissing, deleted)
					end(r)
					r.after(time.Minute)
				}, lossMetrics...)
				r.wantNoLoss(moved)
				if s := r.d.Status(); s.Ready() != nil || len(s.Flushes) > 0 {
					t.Errorf("ready: %v, records %+v", s.Ready(), s.Flushes)
				}
				r.wantNothingPending()
				r.wantLog("Rules that were deleted by name are back, or their owner deleted the rest")
			})
		})
	}
}

// TestGraceBeginsAnew: an owner restores a jump and deletes it again. Its grace begins with the
// last deletion, even if no read showed the jump in between.
func TestGraceBeginsAnew(t *testing.T) {
	for _, between := range []time.Duration{time.Millisecond, time.Second} {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			if between < captureQuiet && backend == iptables.Legacy {
				return // legacy's kernel does not report it
			}
			r := start(t, backend, setup{})
			r.after(20 * time.Second)
			r.write(rules.Nat, "-D PREROUTING "+portals)
			r.after(10 * time.Second)
			r.write(rules.Nat, "-I PREROUTING "+portals)
			r.after(between)
			deleted := time.Now()
			r.write(rules.Nat, "-D PREROUTING "+portals)
			r.after(14 * time.Second)
			r.wantLeft(canary.JumpsMissing, deleted)
			r.after(3 * time.Second)
			r.wantReady()
			r.wantCounted(r.oneRecord(), deleted, backend)
		})
	}
}

// TestMissingOverARestart: a canaryd that starts within the grace also leaves the jump to its
// owner. It knows only when the jump was last in force.
func TestMissingOverARestart(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, id := t.TempDir(), identity(backend)
		r := start(t, backend, setup{store: openStore(t, dir, id)})
		r.after(20 * time.Second)
		stopped := time.Now()
		r.stop()
		r.write(rules.Nat, "-D PREROUTING "+portals)
		r.after(5 * time.Second)
		r = run(t, r.fake, setup{store: openStore(t, dir, id)})
		r.after(5 * time.Second)
		if s := r.d.Status(); s.Healthy || len(s.Flushes) != 1 || s.Flushes[0].Outcome != api.WaitingOwner || !s.Flushes[0].Bound() {
			t.Errorf("%s, records %+v", s.Headline, s.Flushes)
		}
		r.after(15 * time.Second)
		r.wantReady()
		if record := r.oneRecord(); !record.AbsentAtMost || record.AbsentSeconds < 20 || record.LastInForce.After(stopped) {
			t.Errorf("stopped at %s, the record is %+v", stopped, record)
		}
	})
}

// TestMarksAreRenewedInTheGrace: canaryd renews marks while a jump waits for its owner. The
// renewal proves nothing about that jump, and canaryd still finds the process that deleted it.
func TestMarksAreRenewedInTheGrace(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.after(20 * time.Second)
		deleted := time.Now()
		if backend == iptables.Legacy {
			r.writers.Note(watch.Writer{Time: deleted, PID: 4711, Comm: "iptables", Command: "iptables -D"})
		}
		must(t, r.fake.As(4711, "evil").RestoreNoflush(rules.IPv4, section(rules.Nat, "-D PREROUTING "+portals)))
		mark := func() string { return r.tables()[rules.IPv4][rules.Nat].Chain(canary.DefaultChain).Rules[0].Spec }
		before := mark()
		for i := range 3 {
			must(t, r.fake.As(900, "kube-proxy").RestoreNoflush(rules.IPv4, section(rules.Nat, ":KUBE-SVC-CHURNCHURNCHURN2 - [0:0]", fmt.Sprintf("-A KUBE-SVC-CHURNCHURNCHURN2 -p tcp --dport %d -j RETURN", i+1))))
			r.after(4 * time.Second)
		}
		r.after(2 * time.Second)
		if mark() == before {
			t.Fatal("no marks were renewed in the grace")
		}
		r.wantLeft(canary.JumpsMissing, deleted)
		if got := r.metrics("jumps_missing")["jumps_missing{family=ipv4,table=nat}"]; got != 1 {
			t.Errorf("the metric says %g jumps", got)
		}
		r.after(3 * time.Second)
		record := r.oneRecord()
		r.wantCounted(record, deleted, backend)
		if record.Culprit.PID != 4711 {
			t.Errorf("the culprit is %+v", record.Culprit)
		}
	})
}
