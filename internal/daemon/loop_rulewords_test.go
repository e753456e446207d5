package daemon

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ownChainless are rules that programs write to built-in chains, among others' rules.
const ownChainless = `*mangle
-A FORWARD -o wg0 -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu
COMMIT
*nat
:MINE - [0:0]
-A PREROUTING -i eth9 -j MINE
-A PREROUTING -d 169.254.169.254/32 -i cali+ -p tcp -m tcp --dport 80 -j DNAT --to-destination 192.0.2.10:8181
-A PREROUTING -m comment --comment "AWS, CONNMARK" -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80
-A POSTROUTING -s 10.66.66.0/24 -o eth0 -j MASQUERADE
-A MINE -j RETURN
COMMIT
*filter
:MY-WG-FWD - [0:0]
-A FORWARD -i eth9 -j DROP
-A FORWARD -i wg0 -j ACCEPT
-A FORWARD -j MY-WG-FWD
-A FORWARD -s 10.1.0.0/16 -m comment --comment "generated for MicroK8s pods" -j ACCEPT
-A FORWARD -s 10.1.0.0/16 -m comment --comment "generated for MicroK8s pods" -j ACCEPT
-A FORWARD -j REJECT --reject-with icmp-port-unreachable
-A MY-WG-FWD -i wg0 -j ACCEPT
COMMIT
`

// ruleWords names all of them. inVain names a jump to a chain that no word names.
var ruleWords = []string{
	"kube", "cni",
	"rule:mangle:FORWARD:-o wg0 *--clamp-mss-to-pmtu",
	"rule:nat:PREROUTING:*--to-destination 192.0.2.10:8181",
	"rule:nat:PREROUTING:AWS, *",
	"rule:nat:POSTROUTING:-s 10.66.66.0/24 -o eth0 -j MASQUERADE",
	"rule:filter:FORWARD:*wg0*",
	"rule:filter:FORWARD:generated for MicroK8s pods",
}

const inVain = "rule:filter:FORWARD:-j MY-WG-FWD"

func chainlessFake(t *testing.T, backend iptables.Backend) *iptablestest.Fake {
	t.Helper()
	fake := iptablestest.NewFake(backend)
	p := scenario.FakePrograms{Fake: fake}
	must(t, scenario.Load(t.Context(), p, rules.Families()...))
	must(t, fake.RestoreNoflush(rules.IPv4, ownChainless))
	return fake
}

// TestRulesThatAWordNamesComeBack: after a flush of each kind the named rules are back in their
// former number, among the remaining rules of others.
func TestRulesThatAWordNamesComeBack(t *testing.T) {
	kinds := []string{"flush-all", "flush-delete-all", "flush-delete-nat", "flush-forward", "flush-prerouting", "flush-postrouting", "restore-filter", "nft-flush-ruleset"}
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		for _, s := range scenario.All() {
			if !s.On(backend) || !slices.Contains(kinds, s.Name) {
				continue
			}
			t.Run(string(backend)+"/"+s.Name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					control := &rig{t: t, fake: chainlessFake(t, backend)}
					must(t, s.Do(t.Context(), control.programs()))
					foreign := control.tables()

					r := run(t, chainlessFake(t, backend), setup{protect: ruleWords})
					r.settled()
					before := r.tables()
					must(t, s.Do(t.Context(), r.programs()))
					r.settled()
					r.wantBack(before, foreign)
				})
			})
		}
	}
}

// TestWhatAWordNamesIsItsOwners: canaryd never restores a rule that was deleted by name, not
// even after a flush. A rule that its owner appends right after a replay exists once.
func TestWhatAWordNamesIsItsOwners(t *testing.T) {
	const wireguard, metadata = "FORWARD -i wg0 -j ACCEPT", "PREROUTING -d 169.254.169.254/32 -i cali+ -p tcp -m tcp --dport 80 -j DNAT --to-destination 192.0.2.10:8181"
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := run(t, chainlessFake(t, backend), setup{protect: ruleWords})
		r.settled()
		r.write(rules.Filter, "-D "+wireguard) // wg-quick down
		r.after(2 * r.d.cfg.JumpGrace)
		r.wantNoFlush()
		r.wantReady()
		must(t, scenario.All()[0].Do(t.Context(), r.programs()))
		r.settled()
		if n := strings.Count(r.fake.SaveTable(rules.IPv4, rules.Filter), "-A "+wireguard+"\n"); n != 0 {
			t.Errorf("a rule that its owner deleted is back %d times", n)
		}
		must(t, r.fake.RestoreNoflush(rules.IPv4, section(rules.Nat, "-A "+metadata))) // kube2iam starts again
		r.after(2 * r.d.cfg.JumpGrace)
		if n := strings.Count(r.fake.SaveTable(rules.IPv4, rules.Nat), "-A "+metadata+"\n"); n != 1 {
			t.Errorf("a rule that its owner wrote behind the replay is there %d times", n)
		}
		r.wantReady()
	})
}

// TestARuleThatLeadsIntoAnUnguardedChainIsSaid: log and status say that a word names such a
// rule in vain, until the chain is named too or the rule is gone.
func TestARuleThatLeadsIntoAnUnguardedChainIsSaid(t *testing.T) {
	out := func(r *rig) (list []string) {
		for _, l := range r.d.Status().LeadsOut {
			list = append(list, l.String())
		}
		return list
	}
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := run(t, chainlessFake(t, backend), setup{protect: append([]string{inVain}, ruleWords...)})
		r.settled()
		if d := cmp.Diff([]string{"ipv4 filter: rules of FORWARD that lead to MY-WG-FWD"}, out(r)); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
		r.wantLog("Rules that --protect names are NOT guarded")
		r.after(time.Minute)
		if n := strings.Count(r.log.String(), "are NOT guarded"); n != 1 {
			t.Errorf("the log says it %d times", n)
		}
		r.wantReady()
		r.write(rules.Filter, "-D FORWARD -j MY-WG-FWD")
		r.settled()
		r.after(2 * time.Second)
		if d := cmp.Diff([]string(nil), out(r)); d != "" {
			t.Errorf("without the rule (-want +got):\n%s", d)
		}
	})
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := run(t, chainlessFake(t, backend), setup{protect: append([]string{"MY-WG-*", inVain}, ruleWords...)})
		r.settled()
		if d := cmp.Diff([]string(nil), out(r)); d != "" {
			t.Errorf("with the chain named (-want +got):\n%s", d)
		}
		before := r.tables()
		must(t, scenario.All()[0].Do(t.Context(), r.programs()))
		r.settled()
		r.wantBack(before, r.onlyForeign(before))
	})
}
