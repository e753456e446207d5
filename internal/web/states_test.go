package web

import (
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/sample"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// pageStates returns a status for each state in which the page looks different.
func pageStates() map[string]api.Status {
	states := map[string]api.Status{"empty": {}, "sample": sample.Status()}
	add := func(name string, status func() api.Status, change func(*api.Status)) {
		s := status()
		change(&s)
		states[name] = s
	}
	add("healthy", healthyNode, func(*api.Status) {})
	add("history", busyNode, func(*api.Status) {})
	add("lost", outage, func(*api.Status) {})
	add("lost without a record", healthyNode, func(s *api.Status) { s.LossSince = pageTime.Add(-time.Second) })
	add("observed", outage, func(s *api.Status) { s.Mode = api.Observe })
	add("lost in a pause", outage, func(s *api.Status) { s.Paused, s.PausedUntil = true, pageTime.Add(time.Hour) })
	add("failing", outage, func(s *api.Status) {
		s.Failing = []api.Failing{{Flush: "f0", Attempts: 3, Retry: pageTime.Add(time.Minute), Reason: "a rule names an ipset", Advice: "create the set"}}
	})
	add("decision", outage, func(s *api.Status) {
		s.Decision = &api.Decision{Reason: "they were <lost>", Restore: "canaryd restore", Dismiss: "canaryd dismiss"}
	})
	add("partial", busyNode, func(s *api.Status) {
		s.Families[rules.IPv4][rules.Nat] = canary.Partial
		s.Quarantined = outage().Quarantined[:1]
	})
	add("paused", healthyNode, func(s *api.Status) {
		s.Paused, s.PausedUntil, s.PausedBy, s.PausedWhy, s.PausedSince = true, pageTime.Add(time.Hour), "ada", "OPS-12: a <new> firewall", pageTime.Add(-time.Hour)
	})
	add("stopped", healthyNode, func(s *api.Status) { s.Stopped = true })
	add("unknown", healthyNode, func(s *api.Status) { s.Families[rules.IPv6][rules.Filter] = canary.Unknown })
	add("unread", healthyNode, func(s *api.Status) {
		s.StateUnread = []api.UnreadState{{File: "/var/lib/canaryd/state.json", Reason: "no JSON", Dismiss: "canaryd dismiss"}}
	})
	add("long unknown", healthyNode, func(s *api.Status) { s.LastKnown = pageTime.Add(-5 * time.Minute) })
	add("disabled", healthyNode, func(s *api.Status) {
		delete(s.Families, rules.IPv6)
		s.DisabledFamilies = map[rules.Family]string{rules.IPv6: "the kernel lacks <it>"}
	})
	native := func(s *api.Status) {
		s.Native = []api.NativeTable{
			{Family: "ip", Table: "ip kube-proxy", Verdict: canary.Intact, Chains: 1410, Rules: 1890, Elements: 2210},
			{Family: "ip6", Table: "ip6 <b>", Verdict: canary.Emptied, Chains: 1402, Rules: 1811, Elements: 2200, Why: "rules were <flushed>"},
			{Family: "inet", Table: "inet firewalld", Verdict: canary.Intact, Immune: true, Why: "firewalld owns it: no other process can flush it"},
		}
	}
	add("native tables behind", busyNode, native)
	add("native tables first", busyNode, func(s *api.Status) { native(s); s.Generation.Rules = 12 })
	add("native tables only", busyNode, func(s *api.Status) {
		native(s)
		s.Native = append(s.Native[:1], s.Native[2], s.Native[2])
		s.Generation.Rules, s.Generation.Chains = 0, 0
	})
	add("warnings", outage, func(s *api.Status) {
		native(s)
		s.Native[0].Awaiting, s.Native[1].Unreplayable, s.Native[1].QuarantinedParts = true, "a part", 2
		s.NativeOverLimit, s.Contended, s.Backend.Mismatch, s.Backend.Mixed = 3, true, true, true
		s.RulesWithoutOwner = sample.Status().RulesWithoutOwner
		s.SourceErrors = make([]api.SourceError, 7)
		s.PolicyDrops = []api.PolicyDrop{{Family: rules.IPv4, Table: "filter", Chain: "INPUT", Was: "ACCEPT", Since: pageTime.Add(-time.Hour)}}
		s.LeftOut = []api.LeftOut{{Family: rules.IPv4, Table: rules.Nat, Chain: "<script>"}}
		s.NativeLeftOut = []api.NativeLeftOut{{Family: "ip", Table: "ip <i>", Rules: 100001}}
		s.Native = append(s.Native, api.NativeTable{Family: "ip", Table: "ip gone", Verdict: canary.TableDeleted, Awaiting: true, LeftOut: true})
		s.LastDrill = &api.DrillEnd{Time: pageTime.Add(-time.Hour), Result: api.DrillFailed}
		s.StateError, s.JournalError = "read-only <file> system", "no space left on device"
		s.LearningPendingSince = pageTime.Add(-3 * time.Minute)
	})
	add("records", busyNode, func(s *api.Status) { s.Flushes = append(oddRecords(), s.Flushes...) })
	add("more records than shown", busyNode, func(s *api.Status) {
		for i := range recordsShown {
			s.Flushes = append(s.Flushes, record(fmt.Sprintf("m%d", i), 5*time.Hour, canary.Emptied, reload.Proved))
		}
	})
	return states
}

// healthyNode returns the status of a node on which nothing has happened since the start.
func healthyNode() api.Status {
	s := api.Status{
		Mode: api.Heal, CanaryChain: "KUBE-CANARYD-CANARY", Protect: "auto", Healthy: true,
		Backend:    api.Backend{Name: iptables.NFT, Version: "1.8.9", Reason: "kubelet's hint chain is in nft only"},
		Families:   map[rules.Family]api.Verdicts{},
		Generation: api.Generation{ID: "af31f3a40aee", Source: "snapshot", Captured: pageTime.Add(-26 * time.Minute), Rules: 12460, Chains: 4147},
		Stored:     []api.StoredGeneration{{ID: "af31f3a40aee", Saved: pageTime.Add(-26 * time.Minute)}},
		LastKnown:  pageTime.Add(-time.Second),
	}
	for _, f := range rules.Families() {
		s.Families[f] = api.Verdicts{}
		for _, t := range protect.Always() {
			s.Families[f][t] = canary.Intact
		}
	}
	return s
}

// record returns a record of that age.
func record(id string, ago time.Duration, kind canary.Verdict, outcome api.Outcome) api.Flush {
	culprit := api.Culprit{PID: 13626, Comm: "iptables-nft"}
	loss := api.TableLoss{Family: rules.IPv4, Table: rules.Nat, Kind: kind, Chains: 61, Rules: 174, Jumps: 8, More: 41,
		PerChain: []api.ChainLoss{{Chain: "KUBE-SERVICES", Rules: 34}, {Chain: "PREROUTING", Rules: 3, Jumps: 3}}}
	return api.Flush{
		ID: id, Time: pageTime.Add(-ago), Kind: kind, Outcome: outcome,
		Families: []rules.Family{rules.IPv4}, Tables: []rules.TableName{rules.Nat},
		Culprit: culprit, Writers: []api.Culprit{culprit, {PID: 902}},
		Lost:           api.Lost{Chains: 61, Rules: 174, Jumps: 8, Tables: []api.TableLoss{loss}},
		NoticedSeconds: 0.00032, AbsentSeconds: 0.04786,
	}
}

// busyNode returns a healthy node with a history.
func busyNode() api.Status {
	s := healthyNode()
	s.Flushes = []api.Flush{
		record("660c8b90ccb7b", 2*time.Minute, canary.Emptied, reload.Proved),
		record("660c8b8e00911", 95*time.Minute, canary.Replaced, reload.Raced),
		record("660c8b8d3e5f1", 4*time.Hour, canary.JumpsMissing, reload.Skipped),
	}
	s.Flushes[2].Culprit, s.Flushes[2].Policies = api.Culprit{}, []string{"ipv4 filter FORWARD: DROP, was ACCEPT"}
	return s
}

// outage returns a node whose nat rules are missing.
func outage() api.Status {
	s := busyNode()
	s.Families[rules.IPv4][rules.Nat], s.Families[rules.IPv6][rules.Nat] = canary.Emptied, canary.Unknown
	s.LossSince = pageTime.Add(-12 * time.Second)
	s.Quarantined = []api.Quarantined{{Family: rules.IPv4, Table: rules.Filter, Chain: "KUBE-ROUTER-INPUT"}, {Family: rules.IPv4, Table: rules.Nat, Chain: "CNI-HOSTPORT-DNAT"}}
	s.Flushes = append([]api.Flush{record("660c8b9111111", 12*time.Second, canary.Emptied, api.Pending)}, s.Flushes...)
	return s
}

// oddRecords returns records with every optional field.
func oddRecords() []api.Flush {
	list := sample.Status().Flushes
	repeated := record("r1", time.Minute, canary.TableDeleted, api.WaitingLock)
	repeated.LockedBy, repeated.Attempts, repeated.Repeated = "pid 3 (<nft>)", 4, &api.Repeated{Times: 37, Last: pageTime.Add(-time.Second)}
	repeated.Culprits = []api.Culprit{{PID: 7, Comm: "a<b>"}, {PID: 8}, {PID: 9, Comm: "nft", Unit: "cron.service"}}
	drill := record("r2", time.Minute, canary.Emptied, api.Drilled)
	drill.Culprit, drill.Drill = api.Culprit{}, "canary"
	native := record("r3", time.Minute, canary.Emptied, reload.Partial)
	native.Native = []api.NativeLoss{{Family: "ip", Table: "ip <b>", Kind: canary.Emptied, Why: "rules were flushed", Rules: 3, Elements: 1020, Parts: []string{"chain <i>", "set &"}, More: 2}}
	native.Lost.Unprotected, native.Lost.UnprotectedUnknown = 3, true
	native.Lost.Tables[0].UnprotectedUnknown = true
	long := record("r4", time.Minute, canary.ChainDeleted, reload.Failed)
	for i := range 70 {
		long.Lost.Tables[0].PerChain = append(long.Lost.Tables[0].PerChain, api.ChainLoss{Chain: fmt.Sprintf("KUBE-SVC-%d", i), Rules: 4})
	}
	list = append(list, repeated, drill, native, long)
	return list
}
