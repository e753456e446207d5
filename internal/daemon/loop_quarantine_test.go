package daemon

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ipvsText is a short form of the rules of kube-proxy in ipvs mode. Some depend on ipsets. One
// depends on the canary of another owner, and only that owner may restore the canary.
const ipvsText = `*nat
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-SERVICES -m comment --comment "Kubernetes service lb portal" -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
-A KUBE-SERVICES -m comment --comment "Kubernetes service cluster ip" -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
COMMIT
*filter
:KUBE-FORWARD - [0:0]
:CORP-CANARY - [0:0]
-A FORWARD -j KUBE-FORWARD
-A KUBE-FORWARD -j CORP-CANARY
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A CORP-CANARY -s 203.0.113.0/24 -j ACCEPT
COMMIT
`

var (
	clusterIPs    = iptables.Set{Name: "KUBE-CLUSTER-IP", Create: "hash:ip,port family inet", Members: []string{"10.96.0.1,tcp:443"}}
	loadBalancers = iptables.Set{Name: "KUBE-LOAD-BALANCER", Create: "hash:ip,port family inet"}
)

func ipvsFake(t *testing.T, backend iptables.Backend) *iptablestest.Fake {
	t.Helper()
	fake := iptablestest.NewFake(backend, rules.IPv4)
	fake.Sets().Put(clusterIPs)
	fake.Sets().Put(loadBalancers)
	must(t, fake.RestoreNoflush(rules.IPv4, ipvsText))
	return fake
}

// flushDelete does iptables -F and -X in every table.
func flushDelete(t *testing.T, fake *iptablestest.Fake) {
	t.Helper()
	for _, table := range protect.Always() {
		must(t, fake.Flush(rules.IPv4, table, ""))
	}
	for _, table := range protect.Always() {
		must(t, fake.DeleteChains(rules.IPv4, table))
	}
}

// wantQuarantine fails unless so many rules are in quarantine, and all faces say so.
func (r *rig) wantQuarantine(want int) {
	r.t.Helper()
	s := r.d.Status()
	if len(s.Quarantined) != want {
		r.t.Fatalf("status names %d rules in quarantine, want %d: %v", len(s.Quarantined), want, s.Quarantined)
	}
	gauge, parts, partial := 0.0, 0, len(s.Tally().Lost) > 0
	for _, value := range r.metrics("quarantined_rules") {
		gauge += value
	}
	for _, row := range s.Native {
		parts += row.QuarantinedParts
	}
	if gauge != float64(want) || partial != (want > 0) || parts > 0 && parts != want {
		r.t.Errorf("canaryd_quarantined_rules is %v, a table is partial: %t, rows have %d; want %d", gauge, partial, parts, want)
	}
	// A lost rule in quarantine makes the node unhealthy, and all faces say so.
	words := map[bool]string{true: "healthy", false: "NOT healthy: " + s.PartialCount() + ": "}[want == 0]
	if !strings.HasPrefix(s.Headline, words) || (s.Ready() == nil) != (want == 0) || r.metrics("healthy")["healthy"] != map[bool]float64{true: 1}[want == 0] {
		r.t.Errorf("with %d rules in quarantine: %q, ready: %v, metric %v", want, s.Headline, s.Ready(), r.metrics("healthy"))
	}
	title := ">Healthy</h1>"
	if want > 0 {
		title = ">" + api.Upper(s.PartialCount()) + "</h1>"
	}
	if page := pageOf(r.t, s); !strings.Contains(page, title) {
		r.t.Errorf("with %d rules in quarantine the page is %s", want, page)
	}
	for _, q := range s.Public().Quarantined {
		if q.Rule != "" || q.Reason != "" || q.Chain == "" {
			r.t.Errorf("TCP would tell %+v", q)
		}
	}
}

// A heldNode is a node whose stories are about a rule of one kind of table, b, that cannot be put
// back. The table's chain has the rules a and b.
type heldNode struct {
	*rig
	k       *fakeNative // nil: the stories are about a table of iptables
	next    func() setup
	flush   func()
	refuse  func(bool) // b cannot be written from now on, or can
	sync    func(rules ...string)
	rules   func() []string // of the chain
	commits func() int      // writes of canaryd so far
}

var ipvsRules = map[string]string{
	"a": `-m comment --comment "Kubernetes service lb portal" -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER`,
	"b": `-m comment --comment "Kubernetes service cluster ip" -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT`,
	"c": "-d 10.9.9.9/32 -j KUBE-MARK-MASQ",
}

// eachKind runs a story for each kind of table.
func eachKind(t *testing.T, story func(t *testing.T, n *heldNode)) {
	t.Helper()
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, records, id := t.TempDir(), t.TempDir(), identity(backend)
		n := &heldNode{next: func() setup { return setup{store: openStore(t, dir, id), journal: records} }}
		n.rig = run(t, ipvsFake(t, backend), n.next())
		n.flush = func() {
			must(t, n.fake.Flush(rules.IPv4, rules.Nat, ""))
			n.fake.Sets().Destroy(clusterIPs.Name)
		}
		n.refuse = func(is bool) {
			if is {
				n.fake.Sets().Refuse(clusterIPs.Name, nft.ErrPermission)
			} else {
				n.fake.Sets().Refuse(clusterIPs.Name, nil)
				n.fake.Sets().Put(clusterIPs)
			}
		}
		n.sync = func(list ...string) {
			lines := []string{":KUBE-SERVICES - [0:0]"}
			for _, r := range list {
				if r == "b" {
					n.fake.Sets().Put(clusterIPs)
				}
				lines = append(lines, "-A KUBE-SERVICES "+ipvsRules[r])
			}
			n.write(rules.Nat, lines...)
		}
		n.rules = func() (list []string) {
			for _, r := range n.chain(rules.IPv4, rules.Nat, "KUBE-SERVICES") {
				for name, spec := range ipvsRules {
					if r == spec {
						list = append(list, name)
					}
				}
			}
			return list
		}
		n.commits = func() int { return n.fake.Restores() }
		story(t, n)
	})
	t.Run("native", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			dir, records, stored := t.TempDir(), t.TempDir(), nativestore.New(t.TempDir(), nativestore.Identity{})
			k := newFakeNative(tableOf(proxyTable, "a", "b"))
			n := &heldNode{k: k, flush: func() { k.flushTable(proxyTable) }, commits: func() int { return k.count().heals }}
			n.next = func() setup {
				return setup{guarded: k, store: openStore(t, dir, identity(iptables.NFT)), journal: records, nativeStore: stored}
			}
			n.rig = start(t, iptables.NFT, n.next())
			n.refuse = func(is bool) { k.with(func() { k.refusesRule = map[bool]string{true: "b"}[is] }) }
			n.sync = func(list ...string) { k.sync(tableOf(proxyTable, list...)) }
			n.rules = func() (list []string) {
				for _, name := range []string{"a", "b", "c"} {
					if slices.ContainsFunc(k.standing(proxyTable).Chain("services").Rules, func(r native.Rule) bool { return string(r.Attrs) == string(ruleOf(name).Attrs) }) {
						list = append(list, name)
					}
				}
				return list
			}
			story(t, n)
		})
	})
}

// wantHeld fails unless so many rules are in quarantine, all faces say so, and the chain has the
// others.
func (n *heldNode) wantHeld(want int, rules ...string) {
	n.t.Helper()
	n.wantQuarantine(want)
	if got := n.rules(); !slices.Equal(got, rules) {
		n.t.Errorf("the chain has the rules %v, want %v", got, rules)
	}
}

// wantEnds fails unless the flush records end so, the oldest first.
func (n *heldNode) wantEnds(want ...api.Outcome) {
	n.t.Helper()
	var got []api.Outcome
	for _, f := range n.records(0) {
		got = append(got, f.Outcome)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		n.t.Errorf("records (-want +got):\n%s", diff)
	}
}

// restart ends the run and begins the next one.
func (n *heldNode) restart() {
	n.stop()
	*n.rig = *run(n.t, n.fake, n.next())
	n.after(10 * time.Second)
}

// held begins a story: b cannot be put back after a flush.
func (n *heldNode) held() {
	n.t.Helper()
	n.after(10 * time.Second)
	n.refuse(true)
	n.flush()
	n.after(10 * time.Second)
	n.wantHeld(1, "a")
	n.wantEnds(reload.Partial)
}

// TestARefusedRuleCostsItself: after a flush one rule cannot be put back. canaryd restores the
// others, and tries that rule at growing intervals, without a commit. A second flush has a proved
// record, because it did not take the rule. Once the rule is back, the first record is proved.
func TestARefusedRuleCostsItself(t *testing.T) {
	eachKind(t, func(_ *testing.T, n *heldNode) {
		n.held()
		commits := n.commits()
		n.after(time.Minute)
		n.wantHeld(1, "a")
		if now := n.commits(); now != commits {
			n.t.Errorf("%d commits, want %d", now, commits)
		}
		n.flush()
		n.after(10 * time.Second)
		n.wantHeld(1, "a")
		n.wantEnds(reload.Partial, reload.Proved)
		n.refuse(false)
		n.after(time.Minute)
		n.wantHeld(0, "a", "b")
		n.wantReady()
		n.wantEnds(reload.Proved, reload.Proved)
		if f := n.records(0)[0]; f.AbsentSeconds < 60 {
			n.t.Errorf("the first record has an absence of %v s", f.AbsentSeconds)
		}
		for _, line := range []string{"A part of a table is in quarantine: it could not be put back", "Parts of a table were put back from quarantine",
			"Nothing that a flush took is missing any more"} {
			if got := strings.Count(n.log.String(), line); got != 1 {
				n.t.Errorf("the log has %d times %q", got, line)
			}
		}
	})
}

// TestADecisionEndsAQuarantine: a rule stays in quarantine until its owner writes it, or its chain,
// or an operator accepts its loss. The record says which.
func TestADecisionEndsAQuarantine(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(n *heldNode)
		left int
		want []string
		ends api.Outcome
	}{
		{"nothing", func(*heldNode) {}, 1, []string{"a"}, reload.Partial},
		{"its owner writes the rule", func(n *heldNode) { n.sync("a", "b") }, 0, []string{"a", "b"}, reload.Proved},
		{"its owner writes its chain", func(n *heldNode) { n.sync("c") }, 0, []string{"c"}, reload.Proved},
		{"an operator", func(n *heldNode) {
			for _, want := range []int{1, 0} {
				if reply, err := n.d.Dismiss(n.t.Context()); err != nil || reply.Quarantined != want || reply.Waiting != 0 {
					n.t.Errorf("%+v, %v; want %d", reply, err, want)
				}
			}
		}, 0, []string{"a"}, api.Dismissed},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachKind(t, func(_ *testing.T, n *heldNode) {
				n.held()
				test.do(n)
				n.after(time.Minute)
				n.wantHeld(test.left, test.want...)
				n.wantEnds(test.ends)
				if test.left > 0 {
					return
				}
				n.refuse(false)
				n.restart()
				n.flush() // the decision holds after it, too
				n.after(time.Minute)
				n.wantHeld(0, test.want...)
				n.wantEnds(test.ends, reload.Proved)
			})
		})
	}
}

// TestAQuarantineSurvivesARestart: the next run knows the quarantine and its flush, also if the
// table was flushed in between.
func TestAQuarantineSurvivesARestart(t *testing.T) {
	for _, flushed := range []bool{false, true} {
		t.Run(fmt.Sprintf("flushed between them: %t", flushed), func(t *testing.T) {
			eachKind(t, func(_ *testing.T, n *heldNode) {
				n.held()
				n.after(time.Minute)
				n.stop()
				if flushed {
					n.flush()
				}
				n.restart()
				n.wantHeld(1, "a")
				n.refuse(false)
				n.after(time.Minute)
				n.wantHeld(0, "a", "b")
				if f := n.records(0)[0]; f.Outcome != reload.Proved {
					n.t.Errorf("the record ends %s", f.Outcome)
				}
			})
		})
	}
}

// TestALearnedRuleThatDependsOnAMissingChainComesBackWithIt: the rule stays in the generation, and
// is back at once when the chain is.
func TestALearnedRuleThatDependsOnAMissingChainComesBackWithIt(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := run(t, ipvsFake(t, backend), setup{})
		r.settled()
		before, id := r.fake.SaveTable(rules.IPv4, rules.Filter), r.d.Status().Generation.ID
		flushDelete(t, r.fake)
		r.after(time.Minute)
		r.wantQuarantine(2) // the rule, and the rule behind it
		must(t, r.fake.RestoreNoflush(rules.IPv4, "*filter\n:CORP-CANARY - [0:0]\n-A CORP-CANARY -s 203.0.113.0/24 -j ACCEPT\nCOMMIT\n"))
		r.settled()
		r.wantReady()
		r.wantQuarantine(0)
		if got := unmarked(r.fake.SaveTable(rules.IPv4, rules.Filter)); got != unmarked(before) || r.d.Status().Generation.ID != id {
			t.Errorf("the generation is %s, want %s; filter is\n%s\nwant\n%s", r.d.Status().Generation.ID, id, got, unmarked(before))
		}
	})
}

// TestRulesThatWaitAreNeverDismissed: waiting rules are not lost. They stay in quarantine while
// canaryd may not write, in a pause or while their owner may be about to write. More dismissals
// do not change that.
func TestRulesThatWaitAreNeverDismissed(t *testing.T) {
	tests := []struct {
		name string
		hold func(r *rig) // keeps canaryd from writing
		ends func(r *rig)
		lost int // rules that the first dismissal drops
	}{
		{"paused", func(r *rig) { r.pause(time.Hour) }, func(r *rig) {
			_, err := r.d.Resume(r.t.Context())
			must(r.t, err)
		}, 1},
		{"its owner writes", func(r *rig) {
			r.write(rules.Filter, "-A KUBE-FORWARD "+orderOdd)
			r.after(time.Second)
		}, func(*rig) {}, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				fake := iptablestest.NewFake(backend, rules.IPv4)
				must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Filter, ":KUBE-FIREWALL - [0:0]", ":KUBE-FORWARD - [0:0]",
					"-A OUTPUT -j KUBE-FIREWALL", "-A FORWARD -j KUBE-FORWARD", "-A KUBE-FIREWALL -j DROP", "-A KUBE-FORWARD "+orderOdd, "-A KUBE-FORWARD "+orderThird)))
				r := run(t, fake, setup{})
				r.settled()
				fake.Misread(orderOdd, "-p tcp -j ACCEPT")
				must(t, fake.Flush(rules.IPv4, rules.Filter, ""))
				r.settled()
				r.wantQuarantine(2)
				test.hold(r)
				for try := range 3 {
					reply, err := r.d.Dismiss(t.Context())
					must(t, err)
					if lost := []int{test.lost, 0, 0}[try]; reply.Quarantined != lost || reply.Waiting != 1 {
						t.Errorf("dismissal %d: %+v, want %d lost and one that waits", try, reply, lost)
					}
				}
				test.ends(r)
				r.after(time.Minute)
				r.wantQuarantine(0)
				r.wantReady()
				want := []string{orderOdd, orderThird}[test.lost:]
				if got := r.chain(rules.IPv4, rules.Filter, "KUBE-FORWARD"); !slices.Equal(got, want) {
					t.Errorf("KUBE-FORWARD is %q, want %q", got, want)
				}
			})
		})
	}
}

// TestAReturnedChainIsNoReasonToTryForEver: the missing chain is back, and its rule is refused
// anyway. A busy writer does not make canaryd try it more often.
func TestAReturnedChainIsNoReasonToTryForEver(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := run(t, ipvsFake(t, backend), setup{})
		r.settled()
		flushDelete(t, r.fake)
		r.after(10 * time.Second)
		r.wantQuarantine(2)
		r.fake.FailRestores(-1, iptables.ReasonOther)
		must(t, r.fake.RestoreNoflush(rules.IPv4, "*filter\n:CORP-CANARY - [0:0]\nCOMMIT\n"))
		tries := r.fake.Restores()
		for range 60 {
			must(t, r.fake.RestoreNoflush(rules.IPv4, "*filter\n-A CORP-CANARY -s 203.0.113.0/24 -j ACCEPT\nCOMMIT\n"))
			r.after(time.Second)
		}
		// A try has two restores: with the rules and without.
		if tried := (r.fake.Restores() - tries) / 2; tried < 2 || tried > 12 {
			t.Errorf("it was tried %d times in a minute, want about 10", tried)
		}
		r.wantQuarantine(2)
		r.fake.FailRestores(0, "")
		r.after(pace.LastTry + time.Second)
		r.wantQuarantine(0)
	})
}

// unmarked removes canaryd's marks, whose nonce changes, from a text.
func unmarked(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if !strings.Contains(line, "canaryd-") {
			b.WriteString(line)
		}
	}
	return b.String()
}

func TestCapturedSetsComeBackWithTheirMembers(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := run(t, ipvsFake(t, backend), setup{})
		r.settled()
		newer := clusterIPs
		newer.Members = append(newer.Members, "10.96.0.10,udp:53")
		r.fake.Sets().Put(newer) // as kube-proxy does; no rule changes
		r.after(confirmEvery)
		before := r.fake.SaveTable(rules.IPv4, rules.Nat)
		for _, table := range protect.Always() {
			must(t, r.fake.Flush(rules.IPv4, table, ""))
		}
		r.fake.Sets().Destroy(clusterIPs.Name)
		r.fake.Sets().Destroy(loadBalancers.Name)
		r.settled()
		r.wantReady()
		r.wantQuarantine(0)
		if got := unmarked(r.fake.SaveTable(rules.IPv4, rules.Nat)); got != unmarked(before) {
			t.Errorf("nat is\n%s\nwant\n%s", got, unmarked(before))
		}
		sets, err := r.fake.Sets().Save(t.Context(), []string{clusterIPs.Name})
		must(t, err)
		if got := sets[clusterIPs.Name]; !equalSets(got, newer) {
			t.Errorf("the set came back as %v, want %v", got, newer)
		}
	})
}
