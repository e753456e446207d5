package daemon

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
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

func (r *rig) wantQuarantine(want int) {
	r.t.Helper()
	s := r.d.Status()
	if len(s.Quarantined) != want {
		r.t.Fatalf("status names %d rules in quarantine, want %d: %v", len(s.Quarantined), want, s.Quarantined)
	}
	gauge := 0.0
	for _, value := range r.metrics("quarantined_rules") {
		gauge += value
	}
	if gauge != float64(want) {
		r.t.Errorf("canaryd_quarantined_rules is %v, want %d", gauge, want)
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

// TestALearnedRuleThatDependsOnAMissingChainComesBackWithIt: the rule stays in the generation
// and is reported. canaryd restores it once the chain exists.
func TestALearnedRuleThatDependsOnAMissingChainComesBackWithIt(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, id0 := t.TempDir(), identity(backend)
		r := run(t, ipvsFake(t, backend), setup{store: openStore(t, dir, id0)})
		r.settled()
		before, id := r.fake.SaveTable(rules.IPv4, rules.Filter), r.d.Status().Generation.ID
		flushDelete(t, r.fake)
		r.settled()
		r.wantQuarantine(2) // the rule, and the rule behind it
		if f := r.d.Status().Flushes[0]; f.Outcome != reload.Partial || !strings.Contains(f.Detail, "chain CORP-CANARY is missing") {
			t.Errorf("the flush ended %s: %s", f.Outcome, f.Detail)
		}
		r.after(time.Minute)
		r.wantQuarantine(2)
		if got := r.d.Status().Generation.ID; got != id {
			t.Errorf("the generation is %s, want %s: what is in quarantine belongs to it", got, id)
		}
		// The next run knows the quarantine.
		r.stop()
		r = run(t, r.fake, setup{store: openStore(t, dir, id0)})
		r.settled()
		r.wantQuarantine(2)
		must(t, r.fake.RestoreNoflush(rules.IPv4, "*filter\n:CORP-CANARY - [0:0]\n-A CORP-CANARY -s 203.0.113.0/24 -j ACCEPT\nCOMMIT\n"))
		r.settled()
		r.wantReady()
		r.wantQuarantine(0)
		if got := unmarked(r.fake.SaveTable(rules.IPv4, rules.Filter)); got != unmarked(before) {
			t.Errorf("filter is\n%s\nwant\n%s", got, unmarked(before))
		}
		if got := r.d.Status().Generation.ID; got != id {
			t.Errorf("the generation is %s, want %s", got, id)
		}
	})
}

// TestAQuarantinedRuleIsDismissed: an operator accepts the loss of a rule. The node is healthy
// then, and canaryd restores the rule neither with its chain nor after a flush. It restores at
// once the rule that waited behind it.
func TestAQuarantinedRuleIsDismissed(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, id0 := t.TempDir(), identity(backend)
		r := run(t, ipvsFake(t, backend), setup{store: openStore(t, dir, id0)})
		r.settled()
		flushDelete(t, r.fake)
		r.settled()
		r.wantQuarantine(2)
		reply, err := r.d.Dismiss(t.Context())
		must(t, err)
		if reply.Quarantined != 1 || reply.Waiting != 1 {
			t.Errorf("the reply is %+v, want one rule, and one that waited", reply)
		}
		r.settled()
		r.wantReady()
		r.wantQuarantine(0)
		r.stop()
		r = run(t, r.fake, setup{store: openStore(t, dir, id0)})
		r.settled()
		r.wantQuarantine(0)
		flushDelete(t, r.fake)
		must(t, r.fake.RestoreNoflush(rules.IPv4, "*filter\n:CORP-CANARY - [0:0]\n-A CORP-CANARY -s 203.0.113.0/24 -j ACCEPT\nCOMMIT\n"))
		r.settled()
		r.wantReady()
		r.wantQuarantine(0)
		if saved := r.fake.SaveTable(rules.IPv4, rules.Filter); strings.Contains(saved, "-A KUBE-FORWARD -j CORP-CANARY") || !strings.Contains(saved, "-A KUBE-FORWARD -m mark") {
			t.Errorf("filter is\n%s", saved)
		}
		if again, err := r.d.Dismiss(t.Context()); err != nil || again.Quarantined != 0 {
			t.Errorf("asked again: %+v, %v", again, err)
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

// TestASetThatNobodyCanMakeHoldsBackItsRuleAlone: an ipset cannot be made, and only its rule
// waits. canaryd tries at growing distances, until the owner makes the set.
func TestASetThatNobodyCanMakeHoldsBackItsRuleAlone(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := run(t, ipvsFake(t, backend), setup{})
		r.settled()
		r.fake.Sets().Refuse(clusterIPs.Name, nft.ErrPermission)
		for _, table := range protect.Always() {
			must(t, r.fake.Flush(rules.IPv4, table, ""))
		}
		r.fake.Sets().Destroy(clusterIPs.Name)
		r.settled()
		r.wantQuarantine(1)
		tries := r.fake.Begins()
		r.after(10 * time.Minute)
		r.wantQuarantine(1)
		if tried := r.fake.Begins() - tries; tried < 10 || tried > 60 {
			t.Errorf("it was tried %d times in 10 minutes, want about 25", tried)
		}
		r.fake.Sets().Put(clusterIPs) // as its owner does
		r.after(pace.LastTry + time.Second)
		r.wantReady()
		r.wantQuarantine(0)
		if saved := r.fake.SaveTable(rules.IPv4, rules.Nat); strings.Count(saved, "-A KUBE-SERVICES ") != 2 {
			t.Errorf("nat is\n%s", saved)
		}
		if text := r.log.String(); !strings.Contains(text, "A part of a table is in quarantine") || !strings.Contains(text, "Parts of a table were put back from quarantine") {
			t.Error("the log does not tell")
		}
	})
}
