package api_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A node is healthy only if everything protected is in force. The worst problem is said first.
// A loss that nothing brings back is a problem. A rule that is in force but could not be put
// back is a warning.
func TestHealth(t *testing.T) {
	nat := api.Quarantined{Family: rules.IPv4, Table: rules.Nat, Chain: "KUBE-SERVICES"}
	filter := api.Quarantined{Family: rules.IPv4, Table: rules.Filter, Chain: "FORWARD"}
	const partial = "one rule was lost and could not be put back: ipv4 nat is partial"
	type health struct {
		State    api.HealthState
		Headline string
		Ready    string // the answer of a ready node
	}
	no := func(state api.HealthState, problem string) health {
		return health{State: state, Headline: "NOT healthy: " + problem}
	}
	but := func(warning string) health {
		return health{api.StateHealthy, "healthy, but " + warning, "ok, but " + warning}
	}
	for _, tt := range []struct {
		name   string
		change func(s *api.Status)
		want   health
	}{
		{"all is in force", func(*api.Status) {}, health{api.StateHealthy, "healthy", "ok"}},
		{"a rule in quarantine", func(s *api.Status) {
			s.Families[rules.IPv4][rules.Nat], s.Quarantined = canary.Partial, []api.Quarantined{nat}
		}, no(api.StatePartial, partial)},
		{"of an older daemon, which has no such verdict", func(s *api.Status) { s.Quarantined = []api.Quarantined{nat} }, no(api.StatePartial, partial)},
		{"rules in two tables", func(s *api.Status) { s.Quarantined = []api.Quarantined{nat, filter, filter} },
			no(api.StatePartial, "3 rules were lost and could not be put back: ipv4 nat is partial, ipv4 filter is partial")},
		{"and their table cannot be read", func(s *api.Status) {
			s.Families[rules.IPv4][rules.Nat], s.Quarantined = canary.Unknown, []api.Quarantined{nat}
		}, no(api.StatePartial, partial)},
		{"and replays are paused", func(s *api.Status) { s.Quarantined, s.Paused = []api.Quarantined{nat}, true },
			no(api.StatePartial, partial+"; replays are paused")},
		{"and another table was flushed", func(s *api.Status) {
			s.Quarantined, s.Families[rules.IPv4][rules.Filter] = []api.Quarantined{nat}, canary.Emptied
		}, no(api.StateLost, "ipv4 filter is emptied; "+partial)},
		{"a native table was deleted", func(s *api.Status) {
			s.Native = []api.NativeTable{{Table: "ip kube-proxy", Verdict: canary.TableDeleted}}
		}, no(api.StateLost, "table ip kube-proxy is table_deleted")},
		{"native tables cannot be read", func(s *api.Status) { s.NativeError = "no\nmemory" }, no(api.StateUnknown, "native tables are unknown: no memory")},
		{"a loss waits for a decision", func(s *api.Status) {
			s.Decision = &api.Decision{Tables: map[rules.Family]api.Verdicts{rules.IPv4: {rules.Nat: canary.Emptied}}, Restore: "A", Dismiss: "B"}
			s.Quarantined = []api.Quarantined{filter}
		}, no(api.StateLost, "rules were lost while canaryd did not run (ipv4 nat emptied): `A` puts them back, `B` accepts the loss; "+
			"one rule was lost and could not be put back: ipv4 filter is partial")},
		{"a declared rule is refused", func(s *api.Status) {
			s.Families[rules.IPv4][rules.Filter] = canary.Refused
			s.DeclaredRefused = []api.Refused{{Family: rules.IPv4, Table: rules.Filter, Where: "/etc/x.v4:7", Meaning: "iptables does not understand it"}}
		}, no(api.StateRefused, "ipv4 filter is not as declared: /etc/x.v4:7 is refused: iptables does not understand it")},
		{"nothing is protected", func(s *api.Status) { s.NothingProtected = &api.Nothing{Kubelet: true} },
			health{api.StateNothing, "NOT healthy: nothing is protected but kubelet's own rules, and no others were found", "ok, but nothing is protected but kubelet's own rules, and no others were found"}},
		{"one rule would not come back", func(s *api.Status) { s.Opaque = []api.Quarantined{nat} }, but("one rule could not be put back if it were lost")},
		{"three would not", func(s *api.Status) { s.Opaque = []api.Quarantined{nat, filter, filter} }, but("3 rules could not be put back if they were lost")},
		{"chains are left out", func(s *api.Status) { s.LeftOut = make([]api.LeftOut, 2) }, but("the rules of 2 chains are not guarded")},
		{"the kernel would refuse a native table", func(s *api.Status) {
			s.Native = []api.NativeTable{{Table: "ip a", Verdict: canary.Intact, Unreplayable: "no"}}
		}, but("one native table could not be put back if it were lost")},
		{"the kernel would refuse parts of native tables", func(s *api.Status) {
			s.Native = []api.NativeTable{{Table: "ip a", Verdict: canary.Intact, Unreplayable: "no", UnreplayableParts: 2},
				{Table: "ip b", Verdict: canary.Intact, Unreplayable: "no"}}
		}, but("one native table could not be put back if it were lost, and 2 parts of native tables could not be put back if they were lost")},
		{"a part of a native table is in quarantine", func(s *api.Status) {
			s.Native = []api.NativeTable{{Table: "ip a", Verdict: canary.Partial, QuarantinedParts: 1}}
		}, no(api.StatePartial, "one part of a native table was lost and could not be put back: table ip a is partial")},
		{"rules and parts are in quarantine", func(s *api.Status) {
			s.Quarantined = []api.Quarantined{filter}
			s.Native = []api.NativeTable{{Table: "ip a", Verdict: canary.Partial, QuarantinedParts: 3}}
		}, no(api.StatePartial, "one rule and 3 parts of native tables were lost and could not be put back: ipv4 filter is partial, table ip a is partial")},
		{"several warnings", func(s *api.Status) {
			s.Opaque, s.LeftOut, s.RulesWithoutOwner = []api.Quarantined{nat}, make([]api.LeftOut, 1), &api.OwnerlessRules{}
		}, but("the rules of one chain are not guarded, and one rule could not be put back if it were lost, and kube-proxy's rules have no owner")},
		{"a cleanup", func(s *api.Status) { s.Stopped, s.Quarantined = true, []api.Quarantined{nat} }, no(api.StateStopped, "stopped by a cleanup")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := api.Status{Families: map[rules.Family]api.Verdicts{
				rules.IPv4: {rules.Mangle: canary.Intact, rules.Nat: canary.Changed, rules.Filter: canary.Intact},
			}, LastKnown: time.Now()}
			tt.change(&s)
			h := s.Health()
			got := health{State: h.State, Headline: h.String()}
			if s.Ready() == nil {
				got.Ready = s.ReadyText()
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
			if h.Healthy() != (tt.want.State == api.StateHealthy) || h.Ready() != (tt.want.Ready != "") {
				t.Errorf("healthy %t, ready %t", h.Healthy(), h.Ready())
			}
		})
	}
}
