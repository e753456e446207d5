package daemon

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pods"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

const (
	webChain     = "CNI-DN-46d5e6e569f30aa7e18e0"
	gatewayChain = "CNI-DN-31c7af326e67a1a733e30"
	hostPorts    = "CNI-HOSTPORT-DNAT"
)

// deleteByName deletes the rules of a chain that name a container, by one command each, with
// pauses.
func (c criRuntime) deleteByName(by iptablestest.Writer, chain, id string, pause time.Duration) {
	c.t.Helper()
	for _, f := range rules.Families() {
		for _, rule := range c.chain(f, rules.Nat, chain) {
			if strings.Contains(rule, id) {
				must(c.t, by.RestoreNoflush(f, section(rules.Nat, "-D "+chain+" "+rule)))
				c.after(pause)
			}
		}
	}
}

func (c criRuntime) chainAway(by iptablestest.Writer, chain string, pause time.Duration) {
	c.t.Helper()
	for _, f := range rules.Families() {
		led := slices.ContainsFunc(c.chain(f, rules.Nat, hostPorts), func(r string) bool { return strings.Contains(r, chain) })
		if c.chain(f, rules.Nat, chain) != nil && !led { // led: it is back already
			for _, command := range []string{"-F ", "-X "} {
				_ = by.RestoreNoflush(f, section(rules.Nat, command+chain)) // it may be back between the two
				c.after(pause)
			}
		}
	}
}

// TestRulesOfPodsThatLive: another agent's cleanup deletes rules of host ports by name, with or
// without their chains and with pauses. canaryd restores all, once each and in their places.
func TestRulesOfPodsThatLive(t *testing.T) {
	for _, pause := range []time.Duration{0, 300 * time.Millisecond, 3 * time.Second, 11 * time.Second} {
		for _, chains := range []bool{false, true} {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				c := startPods(t, backend, setup{})
				before := c.tables()
				for _, id := range []string{webID, gatewayID} {
					c.deleteByName(c.fake.Writer, hostPorts, id, pause)
				}
				if chains {
					c.chainAway(c.fake.Writer, webChain, pause)
					c.chainAway(c.fake.Writer, gatewayChain, pause)
				}
				c.after(4 * time.Minute)
				c.wantReady()
				c.wantBack(before, before)
				if s := c.d.Status(); !s.LearningPendingSince.IsZero() {
					t.Errorf("pause %s: learning is pending since %s", pause, s.LearningPendingSince)
				}
				named := map[string]bool{}
				for _, r := range c.records(0) {
					if r.Outcome != reload.Proved {
						t.Errorf("a record is %s", r.Outcome)
					}
					for _, p := range r.Pods {
						named[p.Name] = true
					}
				}
				if d := cmp.Diff(map[string]bool{"web-0": true, "gateway-x7k2p": true}, named); d != "" {
					t.Errorf("pause %s, chains %t: the records name (-want +got):\n%s", pause, chains, d)
				}
			})
		}
	}
}

// robbedDuring runs body for steps of canaryd's writes during which another process deletes
// rules: meanwhile. The reads of such a write are the first that show these removals.
func robbedDuring(t *testing.T, body func(t *testing.T, backend iptables.Backend, startWith func(meanwhile func(criRuntime)) (c criRuntime, write func() map[rules.Family]rules.Ruleset))) {
	replay := func(c criRuntime) map[rules.Family]rules.Ruleset {
		want := c.tables()
		c.deleteByName(c.fake.Writer, hostPorts, webID, 0)
		return want
	}
	renewal := func(c criRuntime) map[rules.Family]rules.Ruleset {
		c.write(rules.Mangle, "-A KUBE-IPTABLES-HINT -j RETURN")
		return c.tables()
	}
	for _, test := range []struct {
		name  string
		write func(criRuntime) map[rules.Family]rules.Ruleset // leads to a write; returns the expected tables
		at    string
	}{
		{"before a replay's read", replay, "begin"},
		{"between a replay's read and its write", replay, "restore"},
		{"between a replay's write and its proof", replay, "restored"},
		{"behind a replay", replay, "closed"},
		{"before a renewal's read", renewal, "begin"},
		{"between a renewal's read and its write", renewal, "restore"},
		{"between a renewal's write and its proof", renewal, "restored"},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				if backend == iptables.Legacy && strings.HasPrefix(test.at, "restore") {
					return // the lock is held
				}
				body(t, backend, func(meanwhile func(criRuntime)) (criRuntime, func() map[rules.Family]rules.Ruleset) {
					fake, armed := loadedFake(t, backend), false
					var c criRuntime
					c = startPodsOn(t, fake, setup{kernel: stepping{fake, func(what string, _ iptables.Session) {
						if armed && what == test.at {
							armed = false
							meanwhile(c)
						}
					}}})
					return c, func() map[rules.Family]rules.Ruleset {
						armed = true
						want := test.write(c)
						c.after(17 * time.Second)
						if armed {
							t.Fatal("nothing was written")
						}
						return want
					}
				})
			})
		})
	}
}

// TestRulesOfAPodThatGoDuringAWrite: the agent deletes more rules while canaryd restores
// another pod's rules, or renews marks. canaryd restores them too, some with their chain.
func TestRulesOfAPodThatGoDuringAWrite(t *testing.T) {
	for _, chain := range []bool{false, true} {
		robbedDuring(t, func(t *testing.T, backend iptables.Backend, startWith func(func(criRuntime)) (criRuntime, func() map[rules.Family]rules.Ruleset)) {
			c, write := startWith(func(c criRuntime) {
				c.deleteByName(c.fake.Writer, hostPorts, gatewayID, 0)
				if chain {
					c.chainAway(c.fake.Writer, gatewayChain, 0)
				}
			})
			want := write()
			c.after(17 * time.Second)
			if backend == iptables.Legacy && chain { // legacy hides the order
				c.after(pods.DelLasts)
			}
			c.wantBack(want, want)
			c.wantNothingPending()
		})
	}
}

// TestADELDuringAWriteIsNotUndone: as TestRulesOfAPodThatGoDuringAWrite, but by the plugins'
// DEL. The pod's file is removed later.
func TestADELDuringAWriteIsNotUndone(t *testing.T) {
	robbedDuring(t, func(t *testing.T, backend iptables.Backend, startWith func(func(criRuntime)) (criRuntime, func() map[rules.Family]rules.Ruleset)) {
		c, write := startWith(func(c criRuntime) { c.slowDEL(c.fake.Writer, gatewayID, gatewayChain, 0) })
		write()
		c.after(time.Minute)
		c.wantPod("while its file stands", gatewayID, false)
		c.forget(gatewayID)
		c.after(5 * time.Minute)
		c.wantReady()
		c.wantPod("once its file is gone", gatewayID, false)
		c.wantPod("in the end", webID, true)
		c.wantNothingPending()
	})
}

// TestRulesOfOnePodOfTwo: an agent deletes one pod's rules, and a DEL removes the other pod.
// canaryd restores only the first one's rules.
func TestRulesOfOnePodOfTwo(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		c := startPods(t, backend, setup{})
		want := c.standsOf(webID)
		c.deleteByName(c.fake.Writer, hostPorts, webID, 0)
		c.del(gatewayID)
		c.forget(gatewayID)
		c.after(14 * time.Second)
		if record := c.oneRecord(); record.Outcome != api.WaitingOwner {
			t.Errorf("within the grace the record is %+v", record)
		}
		c.after(10 * time.Second)
		c.wantReady()
		c.wantPod("after the grace", gatewayID, false)
		if d := cmp.Diff(want, c.standsOf(webID)); d != "" {
			t.Errorf("of the pod that lives (-want +got):\n%s", d)
		}
		if r := c.oneRecord(); len(r.Pods) != 1 || r.Pods[0].Name != "web-0" || r.Lost.Rules != 2 {
			t.Errorf("the record says %+v of %+v", r.Lost, r.Pods)
		}
	})
}

// slowDEL is portmap's DEL on a very slow machine, and the next plugin's.
func (c criRuntime) slowDEL(by iptablestest.Writer, id, chain string, pause time.Duration) {
	c.t.Helper()
	for _, f := range rules.Families() {
		must(c.t, by.RestoreNoflush(f, section(rules.Nat, "-F "+chain)))
	}
	c.after(pause)
	c.deleteByName(by, hostPorts, id, pause)
	for _, f := range rules.Families() {
		must(c.t, by.RestoreNoflush(f, section(rules.Nat, "-X "+chain)))
	}
	c.after(pause)
	for _, f := range rules.Families() { // bridge's, with ipMasq
		for _, rule := range c.tables()[f][rules.Nat].Chain("POSTROUTING").Rules {
			if strings.Contains(rule.Spec, id) {
				must(c.t, by.RestoreNoflush(f, section(rules.Nat, "-D POSTROUTING "+rule.Spec, "-F "+rule.Target, "-X "+rule.Target)))
				c.after(pause)
			}
		}
	}
}

// TestADELIsNeverUndone: libcni removes its file after the last plugin's DEL, which may be long
// after portmap's.
func TestADELIsNeverUndone(t *testing.T) {
	for _, pause := range []time.Duration{0, 5 * time.Second} {
		for _, late := range []time.Duration{0, 20 * time.Second, 100 * time.Second} {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				c := startPods(t, backend, setup{})
				want := c.standsOf(webID)
				c.slowDEL(c.fake.Writer, gatewayID, gatewayChain, pause)
				c.after(late)
				c.forget(gatewayID)
				c.after(5 * time.Minute)
				c.wantNoFlush()
				c.wantReady()
				if d := cmp.Diff(want, c.standsOf(webID)); d != "" {
					t.Errorf("of the other pod (-want +got):\n%s", d)
				}
				c.flushAll()
				c.settled()
				c.wantPod("after a flush", webID, true)
				if left := c.line(rules.IPv4, "-A "+hostPorts, ""); strings.Contains(left, gatewayID) {
					t.Errorf("of the pod that is gone is back: %s", left)
				}
			})
		}
	}
}

// TestRulesOfAPodThatAreMissingAreSaid: an unknown process deletes rules of a pod in portmap's
// order, and the pod's file stays. For the jump grace that may be a DEL, and canaryd reports
// nothing. Then the node is not healthy, with a record that waits for the owner. Either canaryd
// restores the rules, and the record becomes that of the loss; or the file is removed, and no
// record stays.
func TestRulesOfAPodThatAreMissingAreSaid(t *testing.T) {
	for _, test := range []struct {
		name string
		dies bool // its file is removed
	}{{"the pod lives", false}, {"a long DEL", true}} {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				c := startPods(t, backend, setup{})
				before := c.standsOf(gatewayID)
				began := time.Now()
				c.slowDEL(c.fake.Writer, gatewayID, gatewayChain, 10*time.Millisecond)
				c.after(14 * time.Second)
				c.wantReady()
				c.wantNoFlush()
				c.after(3 * time.Second)
				c.wantNotReady("jumps_missing")
				waiting := c.oneRecord()
				s := c.d.Status()
				if len(waiting.Pods) != 1 || waiting.Pods[0].Name != "gateway-x7k2p" || waiting.Outcome != api.WaitingOwner || waiting.Lost.Rules == 0 {
					t.Errorf("the record that waits says %s of %+v, %+v", waiting.Outcome, waiting.Pods, waiting.Lost)
				}
				if at := waiting.Time.Sub(began); at > time.Second || !s.LossSince.Equal(waiting.Time) {
					t.Errorf("they are missing since %s, the status says %s; they were deleted at %s", waiting.Time, s.LossSince, began)
				}
				if until := s.OwnerUntil.Sub(began); until < pods.DelLasts || until > pods.DelLasts+time.Second {
					t.Errorf("canaryd waits for %s, want %s", until, pods.DelLasts)
				}
				c.wantLog("Rules of a running pod are missing")
				if test.dies {
					c.forget(gatewayID)
					c.after(4 * time.Minute)
					c.wantReady()
					c.wantNoFlush()
					c.wantPod("that is gone", gatewayID, false)
					c.wantLog("The rules of a pod are no longer missing")
					return
				}
				c.after(2 * time.Minute)
				c.wantNotReady("jumps_missing")
				c.after(time.Minute)
				c.wantReady()
				if d := cmp.Diff(before, c.standsOf(gatewayID)); d != "" {
					t.Errorf("of the pod (-want +got):\n%s", d)
				}
				r := c.oneRecord()
				most := pods.DelLasts + 5*time.Second
				if backend == iptables.Legacy { // the time of the deletion is a bound
					most += time.Minute
				}
				if r.ID != waiting.ID || r.Outcome != reload.Proved || r.AbsentSeconds < pods.DelLasts.Seconds() || r.AbsentSeconds > most.Seconds() || r.NoticedSeconds > 1 {
					t.Errorf("the record is %s, %s; absent for %v s, noticed after %v s; while it waited it was %s", r.ID, r.Outcome, r.AbsentSeconds, r.NoticedSeconds, waiting.ID)
				}
				if backend == iptables.Legacy && !r.AbsentAtMost {
					t.Error("the record does not say that the time is a bound")
				}
			})
		})
	}
}

// TestADELThatIsKnownIsNotSaid: the status reports nothing of a plugin's DEL, however long the
// pod's file stays.
func TestADELThatIsKnownIsNotSaid(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		c := startPods(t, backend, setup{})
		origin := watch.Origin{Ancestors: []string{"portmap", "containerd"}}
		by := c.fake.As(99, "portmap")
		if backend == iptables.Legacy {
			c.writers.Note(watch.Writer{Time: time.Now(), PID: 99, Comm: "iptables", Command: "iptables -t nat -F " + gatewayChain, Origin: origin})
		}
		c.slowDEL(by, gatewayID, gatewayChain, 10*time.Millisecond)
		for range 20 {
			c.after(15 * time.Second)
			c.wantReady()
			c.wantNoFlush()
		}
	})
}

// TestADELThatFailsForGood: the last plugin fails, libcni keeps its file, and the runtime
// repeats the DEL. If canaryd knows the plugin, it restores nothing. Otherwise it restores the
// rules once, until the next DEL.
func TestADELThatFailsForGood(t *testing.T) {
	for _, known := range []bool{true, false} {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			c := startPods(t, backend, setup{})
			by, origin := c.fake.Writer, watch.Origin{}
			if known {
				by, origin = by.As(99, "portmap"), watch.Origin{Ancestors: []string{"portmap", "containerd"}}
			}
			backs := 0
			for range 4 {
				if backend == iptables.Legacy {
					c.writers.Note(watch.Writer{Time: time.Now(), PID: 99, Comm: "iptables", Command: "iptables -t nat -F " + gatewayChain, Origin: origin})
				}
				if c.chain(rules.IPv4, rules.Nat, gatewayChain) != nil {
					c.slowDEL(by, gatewayID, gatewayChain, 10*time.Millisecond)
				}
				c.after(5 * time.Minute)
				if c.chain(rules.IPv4, rules.Nat, gatewayChain) != nil {
					backs++
				}
			}
			if want := map[bool]int{true: 0, false: 1}[known]; backs != want || len(c.records(0)) != want {
				t.Errorf("known %t: the rules came back %d times, with %d records; want %d", known, backs, len(c.records(0)), want)
			}
			c.wantReady()
		})
	}
}

// TestAnotherProcessIsKnown: a known agent deletes rules in portmap's order. They count as lost
// after the jump grace.
func TestAnotherProcessIsKnown(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		c := startPods(t, backend, setup{})
		before := c.tables()
		agent := watch.Writer{Time: time.Now(), PID: 77, Comm: "iptables", Command: "iptables -t nat -F " + gatewayChain, Origin: watch.Origin{Ancestors: []string{"cleanup.sh", "cron"}}}
		note := func() {
			agent.Time = time.Now()
			if agent.Genid = 0; backend == iptables.NFT {
				stamp, err := c.fake.Stamp(t.Context(), rules.IPv4)
				must(t, err)
				agent.Genid = uint32(stamp.Value) + 1
			}
			c.writers.Note(agent)
		}
		for _, f := range rules.Families() {
			lines := []string{"-F " + gatewayChain}
			for _, rule := range c.chain(f, rules.Nat, hostPorts) {
				if strings.Contains(rule, gatewayID) {
					lines = append(lines, "-D "+hostPorts+" "+rule)
				}
			}
			note()
			must(t, c.fake.RestoreNoflush(f, section(rules.Nat, append(lines, "-X "+gatewayChain)...)))
		}
		c.after(14 * time.Second)
		c.wantNoFlush()
		c.after(3 * time.Second)
		c.wantReady()
		c.wantBack(before, before)
	})
}

// TestInAPauseAPodsRulesMayGo: canaryd does not undo planned work.
func TestInAPauseAPodsRulesMayGo(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		c := startPods(t, backend, setup{})
		must(t, c.d.pauseFor(t, time.Minute))
		c.deleteByName(c.fake.Writer, hostPorts, webID, 0)
		c.after(10 * time.Minute)
		c.wantNoFlush()
		if rs := c.chain(rules.IPv4, rules.Nat, hostPorts); slices.ContainsFunc(rs, func(r string) bool { return strings.Contains(r, webID) }) {
			t.Errorf("a rule that was deleted in a pause is back: %q", rs)
		}
	})
}

// TestWithoutFilesNothingOfAPodComesBack: canaryd cannot use libcni's files. Then a rule that
// is deleted by name is its owner's decision.
func TestWithoutFilesNothingOfAPodComesBack(t *testing.T) {
	for name, first := range map[string]func(criRuntime){
		"none": func(c criRuntime) { c.forget(webID); c.forget(gatewayID) },
		"an old cniVersion": func(c criRuntime) {
			var kept map[string]any
			must(c.t, json.Unmarshal(c.files[webID], &kept))
			kept["config"] = []byte(`{"cniVersion":"0.3.1","name":"cbr0"}`)
			text, err := json.Marshal(kept)
			must(c.t, err)
			must(c.t, os.WriteFile(c.file(webID), text, 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				c := startPods(t, backend, setup{})
				first(c)
				c.after(5 * time.Second)
				c.deleteByName(c.fake.Writer, hostPorts, webID, 0)
				c.after(10 * time.Minute)
				c.wantNoFlush()
				for _, rule := range c.chain(rules.IPv4, rules.Nat, hostPorts) {
					if strings.Contains(rule, webID) {
						t.Errorf("%s is back", rule)
					}
				}
			})
		})
	}
}
