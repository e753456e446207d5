package daemon

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ownersFake returns a Fake with all owners' rules among those of others.
func ownersFake(t *testing.T, backend iptables.Backend) *iptablestest.Fake {
	t.Helper()
	fake := iptablestest.NewFake(backend)
	must(t, scenario.LoadOwners(t.Context(), scenario.FakePrograms{Fake: fake}, rules.Families()...))
	return fake
}

var ownersSetup = setup{protect: append([]string{"kube", "cni"}, scenario.Owners()...)}

// TestOwnersThatWriteOnceGetTheirRulesBack: after each kind of flush canaryd restores the rules
// of Docker, podman, libvirt and tailscaled as they were, each once and in its place. That
// includes Docker's rules in built-in chains.
func TestOwnersThatWriteOnceGetTheirRulesBack(t *testing.T) {
	oneOfEachScenario(t, func(t *testing.T, backend iptables.Backend, s scenario.Scenario) {
		if s.Prepare != nil {
			return // it changes kube-proxy's rules, which this node lacks
		}
		control := &rig{t: t, fake: ownersFake(t, backend)}
		must(t, s.Do(t.Context(), control.programs()))
		foreign := control.tables()

		r := run(t, ownersFake(t, backend), ownersSetup)
		r.settled()
		before := r.tables()
		for range max(s.Times, 1) {
			must(t, s.Do(t.Context(), r.programs()))
			r.settled()
			r.wantBack(before, foreign)
		}
	})
}

// TestWhatAnOwnerRemovedStaysRemoved: the deletion of a network deletes its rules by name.
// Neither the grace nor a later flush brings them back.
func TestWhatAnOwnerRemovedStaysRemoved(t *testing.T) {
	const bridge = "br-4f5a6b7c8d9e"
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := run(t, ownersFake(t, backend), ownersSetup)
		r.settled()
		for table, text := range r.tables()[rules.IPv4] {
			for _, c := range text.Chains {
				for _, rule := range c.Rules {
					if strings.Contains(rule.Spec, bridge) { // docker network rm
						must(t, r.fake.RestoreNoflush(rules.IPv4, "*"+string(table)+"\n-D "+c.Name+" "+rule.Spec+"\nCOMMIT\n"))
					}
				}
			}
		}
		gone := func(when string) {
			t.Helper()
			if saved := r.fake.Save(rules.IPv4); strings.Contains(saved, bridge) {
				t.Errorf("%s, rules of the deleted network stand:\n%s", when, saved)
			}
		}
		r.settled()
		gone("after the removal")
		r.after(2 * r.d.cfg.JumpGrace)
		gone("after the grace")
		before := r.tables()
		if flushes := len(r.d.Status().Flushes); flushes != 0 {
			t.Errorf("the removal made %d flush records", flushes)
		}
		must(t, scenario.All()[0].Do(t.Context(), r.programs()))
		r.settled()
		gone("after a flush")
		r.wantBack(before, r.onlyForeign(before))
	})
}

// onlyForeign returns the rest of the tables after iptables -F everywhere.
func (r *rig) onlyForeign(before map[rules.Family]rules.Ruleset) map[rules.Family]rules.Ruleset {
	left := map[rules.Family]rules.Ruleset{}
	for f, set := range before {
		left[f] = rules.Ruleset{}
		for name, table := range set {
			left[f][name] = rules.NewTable(name)
			for _, c := range table.Chains {
				c.Rules = nil
				left[f][name].Add(c)
			}
		}
	}
	return left
}

// TestAnotherNetworksRuleDoesNotStandForTheLostOne: after a flush of POSTROUTING, a firewall
// writes a MASQUERADE of its own before canaryd looks. canaryd still restores Docker's.
func TestAnotherNetworksRuleDoesNotStandForTheLostOne(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := run(t, ownersFake(t, backend), ownersSetup)
		r.settled()
		before := r.tables()
		synctest.Wait()
		must(t, r.fake.RestoreNoflush(rules.IPv4, "*nat\n-F POSTROUTING\n-A POSTROUTING -o eth7 -j MASQUERADE\nCOMMIT\n"))
		foreign := r.tables()
		r.settled()
		saved := r.fake.SaveTable(rules.IPv4, rules.Nat)
		for _, rule := range []string{"-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE\n", "-A POSTROUTING -o eth7 -j MASQUERADE\n", "-A POSTROUTING -j LIBVIRT_PRT\n"} {
			if n := strings.Count(saved, rule); n != 1 {
				t.Errorf("%q stands %d times:\n%s", rule, n, saved)
			}
		}
		r.wantBack(before, map[rules.Family]rules.Ruleset{rules.IPv4: foreign[rules.IPv4], rules.IPv6: before[rules.IPv6]})
	})
}
