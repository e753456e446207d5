package daemon

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	portals  = `-m comment --comment "kubernetes service portals" -j KUBE-SERVICES`
	hostport = `-m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT`
	latecome = "KUBE-SVC-LATECOMER2345672"
)

// removeService undoes scenario.NewService as kube-proxy does: one restore removes the rule and
// deletes the chains.
var removeService = section(rules.Nat,
	":KUBE-SVC-LATECOMER2345672 - [0:0]",
	":KUBE-SEP-LATECOMER2345673 - [0:0]",
	`-D KUBE-SERVICES -m comment --comment "demo/latecomer cluster IP" -m tcp -p tcp -d 10.96.77.1 --dport 80 -j KUBE-SVC-LATECOMER2345672`,
	"-X KUBE-SVC-LATECOMER2345672",
	"-X KUBE-SEP-LATECOMER2345673")

// wantNoLoss fails if canaryd recorded an owner's change as a loss, or wrote
// rules of the owner's.
func (r *rig) wantNoLoss(moved series) {
	r.t.Helper()
	wantMoved(r.t, moved, series{})
	if n := len(r.records(0)); n != 0 {
		r.t.Errorf("%d flush records: %+v", n, r.records(0))
	}
}

// wantNothingPending fails if canaryd has still to learn an owner's change.
func (r *rig) wantNothingPending() {
	r.t.Helper()
	if s := r.d.Status(); !s.LearningPendingSince.IsZero() {
		r.t.Errorf("capture is pending since %v", s.LearningPendingSince)
	}
}

// TestGrowthIsCapturedAtOnce: canaryd learns added rules after 15 ms on nft, and after 50 ms of
// quiet on legacy.
func TestGrowthIsCapturedAtOnce(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		before, wait := r.d.Status().Generation, captureSoon
		if backend == iptables.Legacy {
			wait = captureQuiet
		}
		moved := r.moved(func() {
			must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
			r.after(wait - 5*time.Millisecond)
			if s := r.d.Status(); s.Generation.ID != before.ID || s.LearningPendingSince.IsZero() {
				t.Errorf("before the quiet time: %+v, capture pending since %v", s.Generation, s.LearningPendingSince)
			}
			r.after(10 * time.Millisecond)
			if s := r.d.Status(); s.Generation.Rules != before.Rules+5 || s.Generation.Chains != before.Chains+2 || !s.LearningPendingSince.IsZero() {
				t.Errorf("after the quiet time: %+v, was %+v, capture pending since %v", s.Generation, before, s.LearningPendingSince)
			}
			r.settled()
		}, lossMetrics...)
		r.wantNoLoss(moved)
		r.wantReady()
	})
}

// TestBusyOwnerIsCaptured: an owner writes a rule each 10 ms. On nft canaryd learns it within 20
// ms, and reads once for several rules. On legacy it never sees 50 ms of quiet, and learns each
// 100 ms anyway.
func TestBusyOwnerIsCaptured(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		before, reads := r.d.Status().Generation, r.fake.Reads()
		behind, most := 2, 2*70 // rules that are not learned yet; reads of both families
		if backend == iptables.Legacy {
			behind, most = 10, 2*10
		}
		for i := range 100 {
			r.write(rules.Nat, fmt.Sprintf("-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport %d -j CNI-HOSTPORT-SETMARK", 20000+i))
			r.after(10 * time.Millisecond)
			if known := r.d.Status().Generation.Rules - before.Rules; known < i+1-behind {
				t.Fatalf("%d of %d rules are captured", known, i+1)
			}
		}
		if n := r.fake.Reads() - reads; n > most {
			t.Errorf("%d reads of both families in a busy second, want %d at most", n, most)
		}
		r.settled()
		if now := r.d.Status().Generation; now.Rules != before.Rules+100 {
			t.Errorf("%d of 100 rules captured at last", now.Rules-before.Rules)
		}
	})
}

// TestRemovalIsAdoptedAfterTwoSeconds: a removal may be the beginning of a flush. canaryd
// learns it after 2 s, and until then a flush brings the former content back.
func TestRemovalIsAdoptedAfterTwoSeconds(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		small := r.d.Status().Generation
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		r.settled()
		moved := r.moved(func() {
			must(t, r.fake.RestoreNoflush(rules.IPv4, removeService))
			r.after(1500 * time.Millisecond)
			if s := r.d.Status(); s.Generation.Chains != small.Chains+2 || s.LearningPendingSince.IsZero() {
				t.Errorf("within 2 s: %+v, capture pending since %v", s.Generation, s.LearningPendingSince)
			}
			r.wantReady()
			r.after(time.Second)
			if s := r.d.Status(); s.Generation.ID != small.ID || !s.LearningPendingSince.IsZero() {
				t.Errorf("after 2 s: %+v, want %+v; capture pending since %v", s.Generation, small, s.LearningPendingSince)
			}
		}, lossMetrics...)
		r.wantNoLoss(moved)
		r.settled()
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
		r.settled()
		if r.chain(rules.IPv4, rules.Nat, latecome) != nil {
			t.Error("a service that was removed long ago came back")
		}
	})
}

func TestFlushWithinTwoSecondsBringsTheFormerContentBack(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		r.settled()
		must(t, r.fake.RestoreNoflush(rules.IPv4, removeService))
		r.after(time.Second)
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
		must(t, r.fake.DeleteChains(rules.IPv4, rules.Nat))
		r.settled()
		r.wantReady()
		if rs := r.chain(rules.IPv4, rules.Nat, latecome); len(rs) != 2 {
			t.Errorf("the chain that was gone for 1 s before the flush holds %d rules, want 2", len(rs))
		}
	})
}

func ofKubeProxy(name string) bool {
	return strings.HasPrefix(name, "KUBE-") && !strings.Contains(name, "CANARYD")
}

// deleteKubeProxysChains flushes and deletes kube-proxy's chains, by one restore for each
// table.
func (r *rig) deleteKubeProxysChains() {
	r.t.Helper()
	for _, f := range rules.Families() {
		for _, table := range []rules.TableName{rules.Nat, rules.Filter} {
			var declare, remove []string
			for _, c := range r.tables()[f][table].Chains {
				if ofKubeProxy(c.Name) {
					declare = append(declare, ":"+c.Name+" - [0:0]")
					remove = append(remove, "-X "+c.Name)
				}
			}
			must(r.t, r.fake.RestoreNoflush(f, section(table, append(declare, remove...)...)))
			r.after(1500 * time.Millisecond)
		}
	}
}

// deleteKubeProxysJumps deletes kube-proxy's jumps one by one, with that pause after each.
func (r *rig) deleteKubeProxysJumps(pause time.Duration) {
	r.t.Helper()
	for _, f := range rules.Families() {
		for _, table := range []rules.TableName{rules.Filter, rules.Nat} {
			for _, c := range r.tables()[f][table].Chains {
				for _, rule := range c.Rules {
					if rules.Builtin(table, c.Name) && ofKubeProxy(rule.Target) {
						must(r.t, r.fake.RestoreNoflush(f, section(table, "-D "+c.Name+" "+rule.Spec)))
						r.after(pause)
					}
				}
			}
		}
	}
}

// TestCleanupOfKubeProxy: kube-proxy --cleanup deletes its jumps one by one, then flushes and
// deletes its chains, by one restore per table. canaryd restores none of them.
func TestCleanupOfKubeProxy(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		moved := r.moved(func() {
			r.after(20 * time.Second) // after a long quiet time
			r.deleteKubeProxysJumps(100 * time.Millisecond)
			r.deleteKubeProxysChains()
			r.after(time.Minute)
		}, lossMetrics...)
		r.wantNoLoss(moved)
		r.wantReady()
		for _, f := range rules.Families() {
			for table, set := range r.tables()[f] {
				for _, c := range set.Chains {
					if table != rules.Mangle && ofKubeProxy(c.Name) {
						t.Errorf("%s %s %s is back", f, table, c.Name)
					}
				}
			}
		}
		r.wantNothingPending()
		if r.chain(rules.IPv4, rules.Nat, "CNI-HOSTPORT-DNAT") == nil {
			t.Error("the chains of CNI are gone")
		}
	})
}

// TestJumpReinserted: Docker deletes a jump and inserts it again.
func TestJumpReinserted(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.after(20 * time.Second)
		moved := r.moved(func() {
			for range 3 {
				r.write(rules.Nat, "-D OUTPUT "+hostport)
				r.after(5 * time.Second)
				if s := r.d.Status(); s.LearningPendingSince.IsZero() {
					t.Error("a jump that waits is not pending")
				}
				r.write(rules.Nat, "-I OUTPUT "+hostport)
				r.after(time.Second)
			}
			r.after(time.Minute)
		}, lossMetrics...)
		r.wantNoLoss(moved)
		r.wantReady()
		r.wantNothingPending()
		if rs := r.chain(rules.IPv4, rules.Nat, "OUTPUT"); len(rs) != 2 || !strings.Contains(rs[0], "CNI-HOSTPORT-DNAT") {
			t.Errorf("OUTPUT holds %q", rs)
		}
	})
}

// TestJumpDeletedByName: a process deletes a jump, and its owner does not return it. canaryd
// restores it after the grace, because its target still has its rules.
func TestJumpDeletedByName(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.after(20 * time.Second)
		before := r.tables()
		moved := r.moved(func() {
			deleted := time.Now()
			r.write(rules.Nat, "-D PREROUTING "+portals)
			r.after(14 * time.Second)
			r.wantLeft(canary.JumpsMissing, deleted)
			if got := r.metrics("jumps_missing"); got["jumps_missing{family=ipv4,table=nat}"] != 1 || len(got) != 1 {
				t.Errorf("jumps missing: %v", got)
			}
			r.after(2 * time.Second)
			r.settled()
		}, lossMetrics...)
		wantMoved(t, moved, healed(scenario.Lost{rules.IPv4.Table(rules.Nat): scenario.JumpsMissing}, 1))
		r.wantBack(before, before)
		if got := r.metrics("jumps_missing", "capture_pending"); len(got) != 0 {
			t.Errorf("in the end: %v", got)
		}
	})
}

// TestJumpReworded: kube-proxy replaces its jump by another match, in one commit or in two.
// canaryd does not restore the old one, also after a flush.
func TestJumpReworded(t *testing.T) {
	for _, gap := range []time.Duration{0, 20 * time.Millisecond} {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			r := start(t, backend, setup{})
			r.after(20 * time.Second)
			moved := r.moved(func() {
				r.write(rules.Nat, "-I PREROUTING -m conntrack --ctstate NEW "+portals)
				r.after(gap)
				r.write(rules.Nat, "-D PREROUTING "+portals)
				r.after(time.Minute)
			}, lossMetrics...)
			r.wantNoLoss(moved)
			must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
			r.settled()
			r.wantReady()
			jumps := slices.DeleteFunc(r.chain(rules.IPv4, rules.Nat, "PREROUTING"), func(spec string) bool { return !strings.Contains(spec, "KUBE-SERVICES") })
			if len(jumps) != 1 || !strings.Contains(jumps[0], "ctstate NEW") {
				t.Errorf("PREROUTING jumps to KUBE-SERVICES by %q", jumps)
			}
		})
	}
}

// TestWitnessDeleted: a process deletes canaryd's witness by name, and flushes nothing. canaryd
// plants it again, because without it the next flush of the chain would look like an owner's
// decision.
func TestWitnessDeleted(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		before := r.tables()
		for _, rule := range before[rules.IPv4][rules.Filter].Chain("FORWARD").Rules {
			if canary.IsWitness(rule) {
				r.write(rules.Filter, "-D FORWARD "+rule.Spec)
			}
		}
		r.settled()
		r.wantBack(before, before)
		record := r.oneRecord()
		if record.Kind != canary.JumpsMissing || record.Lost.Jumps != 0 {
			t.Errorf("the record says %s and %d jumps", record.Kind, record.Lost.Jumps)
		}
	})
}

// TestOwnerEmptiesAndRefills: an owner rewrites a chain in two commits. canaryd does not
// interfere, and restores the last content after a flush.
func TestOwnerEmptiesAndRefills(t *testing.T) {
	const pod = "CNI-DN-46d5e6e569f30aa7e18e0"
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		moved := r.moved(func() {
			must(t, r.fake.Flush(rules.IPv4, rules.Filter, "CNI-ADMIN"))
			must(t, r.fake.Flush(rules.IPv4, rules.Nat, pod))
			r.after(time.Second)
			r.write(rules.Nat, "-A "+pod+" -p tcp -j DNAT --to-destination 10.244.0.77:80")
			r.after(10 * time.Second)
		}, lossMetrics...)
		r.wantNoLoss(moved)
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
		r.settled()
		if got := r.chain(rules.IPv4, rules.Nat, pod); len(got) != 1 || !strings.Contains(got[0], "10.244.0.77") {
			t.Errorf("%s holds %q", pod, got)
		}
	})
}

// TestAChainThatIsFlushedAlone: canaryd restores a chain at once if its owner never leaves it
// empty. If the owner flushes such a chain before it fills or deletes it, canaryd waits for the
// grace.
func TestAChainThatIsFlushedAlone(t *testing.T) {
	for chain, grace := range map[string]time.Duration{
		"KUBE-SEP-": 0, "KUBE-SVC-": 0, "CNI-HOSTPORT-SETMARK": 0, "CNI-HOSTPORT-MASQ": 0, "CNI-DN-": 15 * time.Second,
	} {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			r := start(t, backend, setup{})
			r.after(20 * time.Second)
			before := r.tables()
			i := slices.IndexFunc(before[rules.IPv4][rules.Nat].Chains, func(c rules.Chain) bool {
				return strings.HasPrefix(c.Name, chain) && len(c.Rules) > 0
			})
			moved := r.moved(func() {
				flushed := time.Now()
				must(t, r.fake.Flush(rules.IPv4, rules.Nat, before[rules.IPv4][rules.Nat].Chains[i].Name))
				if grace > 0 {
					r.after(grace - time.Second)
					r.wantLeft(canary.Emptied, flushed)
				}
				r.after(2 * time.Second)
			}, lossMetrics...)
			wantMoved(t, moved, healed(scenario.Lost{rules.IPv4.Table(rules.Nat): scenario.Emptied}, 1))
			r.wantBack(before, before)
			if record := r.oneRecord(); record.Lost.Chains != 1 || record.Kind != canary.Emptied {
				t.Errorf("%s: the record says %s and %d chains", chain, record.Kind, record.Lost.Chains)
			}
		})
	}
}

// TestTheLastHostPortIsRemovedInTwoCommands: portmap deletes its jump and then its chain, with
// other processes in between. After the first command the shared chain of all pods is empty,
// and full chains have no jump, as after a flush. If canaryd restored the jump, the second
// command would fail.
func TestTheLastHostPortIsRemovedInTwoCommands(t *testing.T) {
	const shared = "CNI-HOSTPORT-DNAT"
	remove := "-D " + shared + " " + podJump("last")
	begin := func(t *testing.T, backend iptables.Backend) *rig {
		r := start(t, backend, setup{})
		for _, rule := range r.chain(rules.IPv4, rules.Nat, shared) {
			r.write(rules.Nat, "-D "+shared+" "+rule)
		}
		r.addPod("last")
		r.after(20 * time.Second)
		return r
	}
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := begin(t, backend)
		moved := r.moved(func() {
			removed := time.Now()
			r.write(rules.Nat, remove)
			r.after(5 * time.Second)
			if s := r.d.Status(); s.LearningPendingSince.IsZero() {
				t.Error("a jump that waits is not pending")
			}
			r.wantLeft(canary.Emptied, removed)
			r.write(rules.Nat, "-F "+podChain("last"), "-X "+podChain("last"))
			r.after(time.Minute)
		}, lossMetrics...)
		r.wantNoLoss(moved)
		r.wantReady()
		r.wantNothingPending()
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
		r.settled()
		if rs := r.chain(rules.IPv4, rules.Nat, shared); len(rs) != 0 {
			t.Errorf("%s holds %q", shared, rs)
		}
	})
	// No owner deletes the chain: another process emptied the shared one.
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := begin(t, backend)
		before := r.tables()
		flushed := time.Now()
		r.write(rules.Nat, "-F "+shared)
		r.after(14 * time.Second)
		r.wantLeft(canary.Emptied, flushed)
		r.after(2 * time.Second)
		r.wantBack(before, before)
	})
	// The same while an owner keeps writing.
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := begin(t, backend)
		want := r.chain(rules.IPv4, rules.Nat, shared)
		flushed := time.Now()
		r.write(rules.Nat, "-F "+shared)
		for second := range 18 {
			r.write(rules.Nat, ":"+latecome+" - [0:0]", fmt.Sprintf("-A "+latecome+" -p tcp -m tcp --dport %d -j RETURN", 1+second))
			r.after(time.Second)
			if second < 14 {
				r.wantLeft(canary.Emptied, flushed)
			}
		}
		if d := cmp.Diff(want, r.chain(rules.IPv4, rules.Nat, shared)); d != "" {
			t.Errorf("%s (-want +got):\n%s", shared, d)
		}
	})
}
