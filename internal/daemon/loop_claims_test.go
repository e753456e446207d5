package daemon

import (
	"slices"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestClaimsGrowAndShrink: a declaration that claims learned chains takes them over. A later
// one without the claim removes them, and leaves the chains of others alone.
func TestClaimsGrowAndShrink(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		first := medium(t)
		r := startDeclared(t, backend, setup{declared: first})
		r.write(rules.Nat, "-A CNI-HOSTPORT-SETMARK -m comment --comment theirs -j RETURN")
		r.settled()

		ours := rules.Chain{Name: "CNI-HOSTPORT-SETMARK", Rules: []rules.Rule{{Spec: "-j MARK --set-xmark 0x2000/0x2000", Target: "MARK"}}}
		nat := first[rules.IPv4.Table(rules.Nat)]
		nat.Chains = append(slices.Clip(nat.Chains), ours)
		wider := func(chain string) bool { return claims(chain) || chain == ours.Name }
		r.declare <- Declaration{Generation: first.With(rules.IPv4.Table(rules.Nat), nat), Claims: wider}
		r.settled()
		if got := r.chain(rules.IPv4, rules.Nat, ours.Name); len(got) != 1 {
			t.Errorf("the chain that is claimed now holds %q", got)
		}
		r.wantReady()
		r.write(rules.Nat, "-A CNI-HOSTPORT-SETMARK -j RETURN")
		r.settled()
		if got := r.chain(rules.IPv4, rules.Nat, ours.Name); len(got) != 1 || len(r.records(0)) != 1 {
			t.Errorf("after a drift it holds %q; %d records", got, len(r.records(0)))
		}

		// Without the claim canaryd would delete the chain, but CNI's rules lead to it.
		r.declare <- Declaration{Generation: first, Claims: claims}
		r.after(time.Minute)
		r.wantDeclared(first)
		if r.chain(rules.IPv4, rules.Nat, "CNI-HOSTPORT-DNAT") == nil || r.chain(rules.IPv4, rules.Nat, ours.Name) == nil {
			t.Error("a chain of CNI's is gone")
		}
		r.wantReady()
	})
}
