package daemon

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestAWrongWriteIsNeverLearned: iptables-restore makes an accepting rule of a text that
// accepts nothing. canaryd removes it, names the missing rule and keeps the generation. It
// never writes that text again, whatever is flushed later.
func TestAWrongWriteIsNeverLearned(t *testing.T) {
	const odd, chain = "-p esp -m esp --espspi 7 -j ACCEPT", "KUBE-FORWARD"
	text := strings.Replace(ipvsText, "-A KUBE-FORWARD -m mark", "-A KUBE-FORWARD "+odd+"\n-A KUBE-FORWARD -m mark", 1)
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake := iptablestest.NewFake(backend, rules.IPv4)
		fake.Sets().Put(clusterIPs)
		fake.Sets().Put(loadBalancers)
		must(t, fake.RestoreNoflush(rules.IPv4, text))
		r := run(t, fake, setup{})
		r.settled()
		id, before := r.d.Status().Generation.ID, r.chain(rules.IPv4, rules.Filter, chain)
		want := before[:slices.Index(before, odd)] // the rule behind odd waits
		if len(want) != len(before)-2 {
			t.Fatalf("%s is %q", chain, before)
		}
		fake.Misread(odd, "-p tcp -j ACCEPT")
		payloads := func() int {
			n := 0
			for _, payload := range fake.Payloads(rules.IPv4) {
				n += strings.Count(payload, odd)
			}
			return n
		}
		for flushes := range 3 {
			must(t, fake.Flush(rules.IPv4, rules.Filter, ""))
			r.after(time.Minute)
			if got := r.chain(rules.IPv4, rules.Filter, chain); !slices.Equal(got, want) {
				t.Errorf("after %d flushes %s is %q, want %q", flushes+1, chain, got, want)
			}
			if got := r.d.Status().Generation.ID; got != id {
				t.Errorf("the wrong write was learned: the generation is %s, want %s", got, id)
			}
			r.wantQuarantine(2)
			first := r.records(0)[0]
			if f := r.d.Status().Flushes[0]; first.Outcome != reload.Partial || !strings.Contains(first.Detail, "another rule of its text") || flushes > 0 && f.Outcome != reload.Proved {
				t.Errorf("the first flush ended %s: %s, and this one %s: it took no rule in quarantine", first.Outcome, first.Detail, f.Outcome)
			}
		}
		if got := payloads(); got != 1 {
			t.Errorf("the text was written %d times, want once", got)
		}
		// The owner restores its rule, and canaryd the rule that waited.
		r.write(rules.Filter, "-I KUBE-FORWARD 2 "+odd)
		r.after(time.Minute)
		r.wantQuarantine(0)
		if got := r.chain(rules.IPv4, rules.Filter, chain); !slices.Equal(got, before) {
			t.Errorf("in the end %s is %q, want %q", chain, got, before)
		}
	})
}

// TestAMisreadRuleSurvivesAFlushChainByChain: a flush first empties or deletes the chain that
// lacks the misread rule, canaryd looks, and the rest follows. canaryd does not write the text
// again. If nothing follows, the chain's owner has decided, and the quarantine ends.
func TestAMisreadRuleSurvivesAFlushChainByChain(t *testing.T) {
	const odd, chain = "-p udp -j ACCEPT", "KUBE-SVC-A"
	for _, first := range [][]string{{"-F " + chain}, {"-D FORWARD -j " + chain, "-F " + chain, "-X " + chain}} {
		for _, follows := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, follows %t", strings.Join(first, " "), follows), func(t *testing.T) {
				eachBackend(t, func(t *testing.T, backend iptables.Backend) {
					fake := iptablestest.NewFake(backend, rules.IPv4)
					must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Filter, ":"+chain+" - [0:0]", ":KUBE-SVC-B - [0:0]", ":KUBE-SVC-C - [0:0]",
						"-A FORWARD -j "+chain, "-A "+chain+" -p icmp -j DROP", "-A "+chain+" "+odd, "-A KUBE-SVC-B -j ACCEPT", "-A KUBE-SVC-C -j ACCEPT")))
					r := run(t, fake, setup{protect: []string{"KUBE-*"}})
					r.settled()
					fake.Misread(odd, "-j ACCEPT")
					must(t, fake.Flush(rules.IPv4, rules.Filter, ""))
					r.after(time.Minute)
					r.wantQuarantine(1)
					r.write(rules.Filter, first...)
					r.after(time.Second)
					r.wantQuarantine(1)
					if !follows {
						r.after(time.Minute)
						r.wantQuarantine(0)
						return
					}
					written := len(fake.Payloads(rules.IPv4))
					must(t, fake.Flush(rules.IPv4, rules.Filter, ""))
					if len(first) > 1 {
						must(t, fake.DeleteChains(rules.IPv4, rules.Filter))
					}
					r.after(time.Minute)
					r.wantQuarantine(1)
					for _, payload := range fake.Payloads(rules.IPv4)[written:] {
						if strings.Contains(payload, odd) {
							t.Errorf("it is written again:\n%s", payload)
						}
					}
					if got, want := r.chain(rules.IPv4, rules.Filter, chain), []string{"-p icmp -j DROP"}; !slices.Equal(got, want) {
						t.Errorf("%s is %q, want %q", chain, got, want)
					}
				})
			})
		}
	}
}
