package daemon

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/copies"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// bubble runs a story in virtual time.
func bubble(t *testing.T, name string, story func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, story) })
}

// TestStandbyOpensFirst: the gate opens at the first evidence, before canaryd waits, reads,
// writes or probes more than nat's marks. It is shut once nat is proved, and the record says
// so.
func TestStandbyOpensFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		r.wantStandby(s, api.StandbyArmed)
		flushed, reads, restores, probes := time.Now(), r.fake.Reads(), r.fake.Restores(), r.fake.Probes()
		r.flushNat()
		r.settled()
		r.wantReady()
		r.wantStandby(s, api.StandbyArmed)
		opened := s.named("open ipv4", flushed)
		if len(opened) == 0 {
			t.Fatal("the standby was not opened")
		}
		if diff := cmp.Diff([]int{0, 0, 0, 0}, []int{int(opened[0].at.Sub(flushed)), opened[0].reads - reads,
			opened[0].restores - restores, opened[0].probes - probes}); diff != "" {
			t.Errorf("nanoseconds, reads, writes and whole probes before it was opened (-want +got):\n%s", diff)
		}
		shut := s.named("shut ipv4", flushed)
		if len(shut) != 1 || shut[0].at.Sub(flushed) != 20*time.Millisecond {
			t.Errorf("shut: %+v, want once at the proof, 20 ms after the flush", shut)
		}
		record := r.records(0)[0]
		want := &api.StandbyUse{Families: []rules.Family{rules.IPv4}, OpenSeconds: record.AbsentSeconds}
		if diff := cmp.Diff(want, record.Standby); diff != "" {
			t.Errorf("the record says of the standby (-want +got):\n%s", diff)
		}
		if m := r.metrics("standby_after", "rules_absent"); m["standby_after_seconds"] != 1 || m["rules_absent_seconds"] != 1 {
			t.Errorf("%v, want one observation beside the absence", m)
		}
		r.wantLog("The standby translates until the rules are back")
	})
}

// TestStandbyInADrill: a drill opens the gate. Its reply has the log's line about that, with
// the table.
func TestStandbyInADrill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		reply := r.drill(api.DrillRequest{Kind: canary.ChainDeleted})
		r.settled()
		r.wantStandby(s, api.StandbyArmed)
		want := fmt.Sprintf(`"The standby translates until the rules are back" flush=%q table="ipv4 nat" after=`, reply.Flush)
		if log := strings.Join(reply.Log, "\n"); !strings.Contains(log, want) {
			t.Errorf("the reply's log lacks %s:\n%s", want, log)
		}
	})
}

// TestTablesBesideNatInAFlush: nat's marks alone open the gate. The log names all lost tables
// when the heal begins.
func TestTablesBesideNatInAFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, s := withStandby(t, nil)
		r.wantStandby(s, api.StandbyArmed)
		must(t, r.programs().FlushRuleset(t.Context()))
		r.settled()
		for _, line := range strings.Split(r.log.String(), "\n") {
			if !strings.Contains(line, "Rules are being flushed") {
				continue
			}
			for f := range r.d.Status().Families {
				for _, table := range protect.Always() {
					if want := fmt.Sprintf("%s %s table_deleted", f, table); !strings.Contains(line, want) {
						t.Errorf("the log does not name %q when the heal begins: %s", want, line)
					}
				}
			}
			return
		}
		t.Error("the log does not say that rules are being flushed")
	})
}

// TestStandbyInEachFlush: the gate opens for each kind of flush that takes nat rules, and for
// no other, and is shut in the end. Restored rules, times and records are the same as without a
// standby.
func TestStandbyInEachFlush(t *testing.T) {
	for _, way := range scenario.All() {
		if !way.On(iptables.NFT) {
			continue
		}
		t.Run(way.Name, func(t *testing.T) {
			absent := map[bool]float64{}
			for _, with := range []bool{false, true} {
				synctest.Test(t, func(t *testing.T) {
					fake := loadedFake(t, iptables.NFT)
					s, set := newFakeStandby(fake), setup{}
					if with {
						set.standby = s
					}
					r := run(t, fake, set)
					r.settled()
					if way.Prepare != nil {
						must(t, way.Prepare(t.Context(), r.programs()))
						r.settled()
					}
					before, foreign := r.tables(), leftBy(t, iptables.NFT, way.Name)
					flushed := time.Now()
					must(t, way.Do(t.Context(), r.programs()))
					r.settled()
					r.wantBack(before, foreign)
					absent[with] = r.records(0)[0].AbsentSeconds
					if !with {
						return
					}
					r.wantStandby(s, api.StandbyArmed)
					for _, f := range rules.Families() {
						lost := way.Lost[f.Table(rules.Nat)] != ""
						if got := len(s.named(fmt.Sprint("open ", f), flushed)) > 0; got != lost {
							t.Errorf("%s: opened: %t, nat lost: %t", f, got, lost)
						}
					}
				})
			}
			// Goroutines decide whether another table of the reload needs one more look.
			if late := absent[true] - absent[false]; late > 0.0011 {
				t.Errorf("the standby makes rules come back %v s later", late)
			}
		})
	}
}

// TestStandbyOpensMeanwhile: a flusher takes nat last. The gate opens within a millisecond, and
// not after canaryd's wait. canaryd's own commit does not prolong that wait.
func TestStandbyOpensMeanwhile(t *testing.T) {
	absent := map[bool]float64{}
	for _, with := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			fake := loadedFake(t, iptables.NFT)
			s, set := newFakeStandby(fake), setup{}
			if with {
				set.standby = s
			}
			r := run(t, fake, set)
			r.settled()
			must(t, r.fake.Flush(rules.IPv4, rules.Filter, ""))
			r.after(9500 * time.Microsecond)
			flushed := time.Now()
			r.flushNat()
			r.settled()
			r.wantReady()
			absent[with] = r.records(0)[0].AbsentSeconds
			if !with {
				return
			}
			opened := s.named("open ipv4", flushed)
			if len(opened) == 0 || opened[0].at.Sub(flushed) > time.Millisecond {
				t.Errorf("opened: %+v, want within 1 ms of %s", opened, flushed)
			}
			r.wantStandby(s, api.StandbyArmed)
		})
	}
	if diff := cmp.Diff(absent[false], absent[true]); diff != "" {
		t.Errorf("seconds without rules (-without +with a standby):\n%s", diff)
	}
}

// TestStandbyStaysShut: observe mode has no copy. The gate stays shut in a pause, while nat
// cannot be read, and during the grace of jumps that were deleted by name.
func TestStandbyStaysShut(t *testing.T) {
	bubble(t, "observe", func(t *testing.T) {
		r, s := withStandby(t, func(s *setup) { s.mode = api.Observe })
		r.flushNat()
		r.after(time.Minute)
		r.wantStandby(s, api.StandbyOff)
		if calls := s.since(time.Time{}); len(calls) > 0 {
			t.Errorf("asked for %+v", calls)
		}
	})
	bubble(t, "pause", func(t *testing.T) {
		r, s := withStandby(t, nil)
		r.pause(time.Minute)
		paused := time.Now()
		r.flushNat()
		r.after(30 * time.Second)
		r.wantStandby(s, api.StandbyArmed)
		if calls := s.since(paused); len(calls) > 0 {
			t.Errorf("asked for %+v", calls)
		}
		resumed := paused.Add(time.Minute)
		r.after(40 * time.Second)
		r.wantReady()
		if opened := s.named("open ipv4", paused); len(opened) == 0 || opened[0].at.Before(resumed) {
			t.Errorf("opened: %+v, want when the pause ended", opened)
		}
		r.wantStandby(s, api.StandbyArmed)
	})
	bubble(t, "unknown", func(t *testing.T) {
		r, s := withStandby(t, nil)
		r.fake.FailProbes(errors.New("the kernel does not answer"))
		r.fake.FailReads(errors.New("the kernel does not answer"))
		broken := time.Now()
		r.flushNat()
		r.after(20 * time.Second)
		if opened := s.named("open ipv4", broken); len(opened) > 0 {
			t.Errorf("opened although nothing is known: %+v", opened)
		}
		r.wantNotReady("unknown")
	})
	bubble(t, "grace", func(t *testing.T) {
		r, s := withStandby(t, nil)
		deleted := time.Now()
		r.write(rules.Nat, `-D PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`)
		r.after(14 * time.Second)
		if opened := s.named("open ipv4", deleted); len(opened) > 0 {
			t.Errorf("opened in the jump's grace: %+v", opened)
		}
		r.after(10 * time.Second)
		r.wantReady()
		if opened := s.named("open ipv4", deleted); len(opened) == 0 || opened[0].at.Sub(deleted) < 15*time.Second {
			t.Errorf("opened: %+v, want after the grace of 15 s", opened)
		}
		r.wantStandby(s, api.StandbyArmed)
	})
}

// TestStandbyShuts: a pause, the owner's decision, a cleanup, and 30 s shut an open gate for
// good. The next loss opens it again.
func TestStandbyShuts(t *testing.T) {
	lost := func(t *testing.T) (*rig, *fakeStandby) {
		r, s := withStandby(t, nil)
		r.fake.FailRestores(-1, iptables.ReasonMissingSet)
		r.flushNat()
		r.after(100 * time.Millisecond)
		if !s.anyOpen() || r.d.Status().Standby[rules.IPv4].State != api.StandbyOpen {
			t.Fatalf("not open while rules are missing: %+v", r.d.Status().Standby)
		}
		return r, s
	}
	bubble(t, "pause", func(t *testing.T) {
		r, s := lost(t)
		r.pause(time.Hour)
		r.after(0)
		r.wantStandby(s, api.StandbyArmed)
	})
	bubble(t, "owner", func(t *testing.T) {
		r, s := lost(t)
		r.fake.FailRestores(0, iptables.ReasonMissingSet)
		must(t, scenario.Load(t.Context(), r.programs(), rules.IPv4))
		r.after(5 * time.Second)
		r.wantReady()
		r.wantStandby(s, api.StandbyArmed)
	})
	bubble(t, "cleanup", func(t *testing.T) {
		r, s := lost(t)
		r.fake.FailRestores(0, iptables.ReasonMissingSet)
		moved := r.moved(func() {
			must(t, r.d.Cleanup(t.Context(), api.CleanupRequest{}))
			r.after(time.Minute)
		}, "standby_open")
		if len(moved) != 1 {
			t.Errorf("the metrics say of how long it was open: %v", moved)
		}
		r.wantStandby(s, api.StandbyOff)
		if n := len(s.named("release ipv4", time.Time{})); n != 1 {
			t.Errorf("released %d times", n)
		}
	})
	bubble(t, "limit", func(t *testing.T) {
		r, s := lost(t)
		opened := s.named("open ipv4", time.Time{})[0].at
		r.after(time.Minute)
		if s.anyOpen() {
			t.Error("open for more than a minute")
		}
		if shut := s.named("shut ipv4", opened); len(shut) != 1 || shut[0].at.Sub(opened) != copies.Most {
			t.Errorf("shut: %+v, want once after %s", shut, copies.Most)
		}
		r.wantLog("The standby stopped translating while rules are missing")
		again := time.Now()
		r.after(time.Minute)
		if opened := s.named("open ipv4", again); len(opened) > 0 {
			t.Errorf("opened again for the same loss: %+v", opened)
		}
		r.fake.FailRestores(0, iptables.ReasonMissingSet)
		r.after(5 * time.Minute)
		r.wantReady()
		next := time.Now()
		r.flushNat()
		r.settled()
		if len(s.named("open ipv4", next)) == 0 {
			t.Error("not opened for the next loss")
		}
		r.wantStandby(s, api.StandbyArmed)
	})
	bubble(t, "a table that had to go", func(t *testing.T) {
		r, s := lost(t)
		broken := errors.New("the kernel has no memory")
		s.set(func(s *fakeStandby) { s.shutErr, s.followErr = broken, broken })
		r.fake.FailRestores(0, iptables.ReasonMissingSet)
		r.after(10 * time.Second)
		r.wantReady()
		if now := r.d.Status().Standby[rules.IPv4]; now.State != api.StandbyUnavailable || !now.OpenSince.IsZero() {
			t.Errorf("the status says %+v of a table that is gone", now)
		}
		s.set(func(s *fakeStandby) { s.shutErr, s.followErr = nil, nil })
		r.after(pace.MakeAgain)
		r.wantStandby(s, api.StandbyArmed)
	})
}

// TestStandbyFollows: the copy follows the learned rules, once a second at most, and never a
// flushed table. canaryd's own commits cause no work.
func TestStandbyFollows(t *testing.T) {
	bubble(t, "changes", func(t *testing.T) {
		r, s := withStandby(t, nil)
		r.after(10 * time.Second)
		quiet := time.Now()
		r.after(10 * time.Minute)
		if calls := s.since(quiet); len(calls) > 0 {
			t.Errorf("in a quiet time %d calls, the first %+v", len(calls), calls[0])
		}
		busy := time.Now()
		for n := range 200 {
			r.endpoint(n, true)
			r.after(50 * time.Millisecond)
		}
		r.after(3 * time.Second)
		if n := len(s.named("write ipv4", busy)); n < 5 || n > 14 {
			t.Errorf("written %d times in 13 s with 20 changes a second, want about once a second", n)
		}
		want := r.d.Status().Generation
		section := s.copied(rules.IPv4)
		if r.chain(rules.IPv4, rules.Nat, "KUBE-SERVICES") == nil || len(section.Chains) == 0 || want.Rules == 0 {
			t.Fatal("nothing was copied")
		}
		if diff := cmp.Diff(r.chain(rules.IPv4, rules.Nat, "KUBE-SEP-BUSYBUSYBUSYBUSY"), specsOf(section, "KUBE-SEP-BUSYBUSYBUSYBUSY")); diff != "" {
			t.Errorf("the copy lacks the last change (-want +got):\n%s", diff)
		}
	})
	bubble(t, "a slow machine", func(t *testing.T) {
		fake := loadedFake(t, iptables.NFT)
		s := newFakeStandby(fake)
		s.takes = 5 * time.Second // for each build
		r := run(t, fake, setup{standby: s})
		r.after(time.Minute)
		r.wantStandby(s, api.StandbyArmed)
		s.set(func(s *fakeStandby) { s.takes = 100 * time.Millisecond })
		r.endpoint(1, true)
		r.after(3 * time.Second)
		r.wantStandby(s, api.StandbyArmed)
		r.endpoint(2, true)
		r.after(3 * time.Second)
		r.wantStandby(s, api.StandbyArmed)
	})
	bubble(t, "losses", func(t *testing.T) {
		r, s := withStandby(t, nil)
		before := s.copied(rules.IPv4)
		r.fake.FailRestores(-1, iptables.ReasonMissingSet)
		flushed := time.Now()
		r.flushNat()
		r.after(time.Minute)
		edition := r.d.Status().Generation.ID
		r.write(rules.Filter, "-A KUBE-FORWARD -s 203.0.113.7/32 -j ACCEPT")
		r.after(4 * time.Minute)
		if r.d.Status().Generation.ID == edition {
			t.Error("the change of filter was not learned, so that nothing was to be followed")
		}
		if calls := s.named("follow ipv4", flushed); len(calls) > 0 {
			t.Errorf("followed while rules were missing: %+v", calls)
		}
		if !s.copied(rules.IPv4).Equal(before) {
			t.Error("the copy is another one")
		}
	})
}

// TestStandbyWhereItIsNeeded: with auto a node has a standby only if a replay takes long. On
// legacy, and without a rule that translates, there is none.
func TestStandbyWhereItIsNeeded(t *testing.T) {
	bubble(t, "small", func(t *testing.T) {
		r, s := withStandby(t, func(s *setup) { s.standbyAuto = true })
		r.wantStandby(s, api.StandbyIdle)
		r.flushNat()
		r.settled()
		r.wantReady()
	})
	bubble(t, "nothing translates", func(t *testing.T) {
		fake := iptablestest.NewFake(iptables.NFT)
		must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Nat, ":KUBE-SERVICES - [0:0]", "-A PREROUTING -j KUBE-SERVICES", "-A KUBE-SERVICES -d 10.0.0.9/32 -j RETURN")))
		s := newFakeStandby(fake)
		r := run(t, fake, setup{standby: s})
		r.settled()
		r.wantStandby(s, api.StandbyIdle)
	})
	bubble(t, "none", func(t *testing.T) {
		r := start(t, iptables.Legacy, setup{})
		r.wantStandby(nil, api.StandbyOff)
	})
}

// TestStandbyAfterARestart: a new run makes the copy once it has learned the rules. Before that
// it heals a flush without one.
func TestStandbyAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := withStandby(t, nil)
		r.stop()
		next := newFakeStandby(r.fake)
		again := run(t, r.fake, setup{standby: next})
		again.settled()
		again.wantReady()
		again.wantStandby(next, api.StandbyArmed)
		flushed := time.Now()
		again.flushNat()
		again.settled()
		if len(next.named("open ipv4", flushed)) == 0 {
			t.Error("not opened")
		}
		again.wantStandby(next, api.StandbyArmed)
	})
}

// specsOf returns the rules of a section's chain.
func specsOf(s rules.Section, name string) []string {
	for _, c := range s.Chains {
		if c.Name == name {
			specs := []string{}
			for _, rule := range c.Rules {
				specs = append(specs, rule.Spec)
			}
			return specs
		}
	}
	return nil
}
