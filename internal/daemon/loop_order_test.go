package daemon

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	orderFirst  = "-s 192.0.2.1/32 -j ACCEPT"
	orderOdd    = "-p esp -m esp --espspi 7 -j RETURN" // only its owner can write it
	orderSecond = "-s 192.0.2.2/32 -j CNI-DN-0123"
	orderThird  = "-s 192.0.2.3/32 -j ACCEPT"
	orderNew    = "-s 192.0.2.4/32 -j ACCEPT"
)

// TestRulesThatWaitComeBackInTheirPlaces: after a flush a RETURN cannot be put back, and two
// rules wait behind it. The owner's next write decides about the RETURN, and about the others
// only if it writes or removes them.
func TestRulesThatWaitComeBackInTheirPlaces(t *testing.T) {
	all := []string{orderFirst, orderOdd, orderSecond, orderThird}
	const whole, piecewise = "KUBE-FORWARD", "CNI-HOSTPORT-DNAT" // how owners write to a chain
	tests := []struct {
		name  string
		chain string
		write []string // CHAIN is the chain
		want  []string // the chain's rules in the end
		left  int      // rules in quarantine then
		ends  api.Outcome
	}{
		{"the owner inserts the rule in its place", whole, []string{"-I CHAIN 2 " + orderOdd}, all, 0, reload.Proved},
		{"it appends the rule", whole, []string{"-A CHAIN " + orderOdd}, all, 0, reload.Proved},
		{
			"it writes its whole chain", whole,
			[]string{":CHAIN - [0:0]", "-A CHAIN " + orderFirst, "-A CHAIN " + orderOdd, "-A CHAIN " + orderSecond, "-A CHAIN " + orderThird},
			all, 0, reload.Proved,
		},
		{
			"it writes its chain without one of them", whole, []string{":CHAIN - [0:0]", "-A CHAIN " + orderFirst, "-A CHAIN " + orderOdd, "-A CHAIN " + orderThird},
			[]string{orderFirst, orderOdd, orderThird}, 0, reload.Proved,
		},
		{"it writes another chain", whole, []string{":CHAIN - [0:0]", "-A CHAIN " + orderNew}, []string{orderNew}, 0, reload.Proved},
		{"it removes its chain", whole, []string{"-F CHAIN", "-D FORWARD -j CHAIN", "-X CHAIN"}, nil, 0, reload.Proved},
		{"the owner of another rule adds one", piecewise, []string{"-A CHAIN " + orderNew}, []string{orderFirst, orderNew}, 3, reload.Partial},
		{"the owner of another rule deletes it", piecewise, []string{"-D CHAIN " + orderFirst}, []string{}, 3, reload.Partial},
		{"the owner of the rule puts it back", piecewise, []string{"-A CHAIN " + orderOdd}, all, 0, reload.Proved},
		{"an owner removes the chain that a rule leads to", piecewise, []string{"-F CNI-DN-0123", "-X CNI-DN-0123"}, []string{orderFirst}, 2, reload.Partial},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				chain := func(lines ...string) []string {
					for i := range lines {
						lines[i] = strings.ReplaceAll(lines[i], "CHAIN", test.chain)
					}
					return lines
				}
				fake := iptablestest.NewFake(backend, rules.IPv4)
				must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Filter, chain(":KUBE-FIREWALL - [0:0]", ":CNI-DN-0123 - [0:0]", ":CHAIN - [0:0]",
					"-A OUTPUT -j KUBE-FIREWALL", "-A FORWARD -j CHAIN", "-A KUBE-FIREWALL -j DROP", "-A CNI-DN-0123 -j DROP",
					"-A CHAIN "+orderFirst, "-A CHAIN "+orderOdd, "-A CHAIN "+orderSecond, "-A CHAIN "+orderThird)...)))
				r := run(t, fake, setup{protect: []string{"kube", "cni"}})
				r.settled()
				id := r.d.Status().Generation.ID
				fake.Misread(orderOdd, "-p tcp -j ACCEPT")
				must(t, fake.Flush(rules.IPv4, rules.Filter, ""))
				r.settled()
				r.wantQuarantine(3)
				if got := r.chain(rules.IPv4, rules.Filter, test.chain); !slices.Equal(got, all[:1]) {
					t.Fatalf("after the replay %s is %q, want %q", test.chain, got, all[:1])
				}
				r.write(rules.Filter, chain(slices.Clone(test.write)...)...)
				r.after(time.Minute)
				if got := r.chain(rules.IPv4, rules.Filter, test.chain); !slices.Equal(got, test.want) {
					t.Errorf("in the end %s is %q, want %q", test.chain, got, test.want)
				}
				r.wantQuarantine(test.left)
				s := r.d.Status()
				if f := s.Flushes[0]; f.Outcome != test.ends || len(s.Flushes) != 1 {
					t.Errorf("of %d records the last one ends %s: %s; want %s", len(s.Flushes), f.Outcome, f.Detail, test.ends)
				}
				if slices.Equal(test.want, all) && s.Generation.ID != id {
					t.Errorf("all is back as it was, and the generation is %s, want %s", s.Generation.ID, id)
				}
			})
		})
	}
}

// TestAChainThatWaitsIsNamed: log and status name the waiting chain, the rule that it waits
// behind, and the number of waiting rules.
func TestAChainThatWaitsIsNamed(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake := iptablestest.NewFake(backend, rules.IPv4)
		lines := []string{":KUBE-FORWARD - [0:0]", "-A FORWARD -j KUBE-FORWARD", "-A KUBE-FORWARD " + orderOdd}
		for range 150 {
			lines = append(lines, "-A KUBE-FORWARD "+orderThird)
		}
		must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Filter, lines...)))
		r := run(t, fake, setup{})
		r.settled()
		fake.Misread(orderOdd, "-p tcp -j ACCEPT")
		must(t, fake.Flush(rules.IPv4, rules.Filter, ""))
		r.settled()
		if got := r.chain(rules.IPv4, rules.Filter, "KUBE-FORWARD"); len(got) > 0 {
			t.Errorf("KUBE-FORWARD has %d rules without the first one", len(got))
		}
		s := r.d.Status()
		if first := s.Quarantined[0]; first.Waits || first.Rule != orderOdd || !s.Quarantined[1].Waits {
			t.Errorf("status names %+v first", first)
		}
		if w := s.WaitingChains; len(w) != 1 || w[0].Chain != "KUBE-FORWARD" || w[0].Rules != 150 {
			t.Errorf("the status counts %+v", w)
		}
		for _, w := range s.Public().WaitingChains {
			if w.Reason != "" {
				t.Errorf("other users read the rule: %s", w.Reason)
			}
		}
		const reason = `waits behind \"` + orderOdd + `\" of KUBE-FORWARD, which cannot be put back`
		said := 0
		for line := range strings.Lines(r.log.String()) {
			if strings.Contains(line, "Rules of a chain wait") {
				said++
				for _, part := range []string{`chain="KUBE-FORWARD"`, "rules=150", reason} {
					if !strings.Contains(line, part) {
						t.Errorf("the log lacks %s: %s", part, line)
					}
				}
			}
		}
		if said != 1 {
			t.Errorf("the log says it %d times", said)
		}
	})
}
