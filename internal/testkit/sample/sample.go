// Package sample has values that tests of several packages print. [Status] returns a status with
// every field set.
package sample

import (
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Status returns a Status with every field set. Fields that may hold secrets hold one.
func Status() api.Status {
	at := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	writer := api.Culprit{
		Time: at, PID: 4242, Comm: "iptables", Command: "iptables -F SECRET", Ancestors: []string{"bash", "cron"}, Unit: "cron.service",
		ContainerID: "0123456789abcdef", ContainerName: "router", PodUID: "8d1f0a52-6c3e-4a8b-9d7e-2f1c0b9a8e7d",
	}
	return api.Status{
		Healthy: true, Mode: api.Heal, Paused: false,
		Backend: api.Backend{Name: iptables.NFT, Version: "1.8.9", Reason: "KUBE-IPTABLES-HINT stands in nft", Mixed: true, Mismatch: true},
		Families: map[rules.Family]api.Verdicts{
			rules.IPv4: {rules.Mangle: canary.Intact, rules.Nat: canary.Changed, rules.Filter: canary.Intact},
		},
		DisabledFamilies: map[rules.Family]string{rules.IPv6: "the kernel lacks it"},
		CanaryChain:      "KUBE-CANARYD-CANARY",
		Generation:       api.Generation{ID: "0123abcd", Source: "snapshot", Captured: at.Add(-time.Hour), Rules: 56, Chains: 20},
		LossSince:        at, LearningPendingSince: at, JournalError: "no space left on device",
		StateSaved:        at,
		RulesWithoutOwner: &api.OwnerlessRules{Since: at, Families: []rules.Family{rules.IPv4}, Choices: []api.Choice{{If: "kube-proxy belongs on this node", Command: "kubectl -n kube-system delete pod --selector=k8s-app=kube-proxy --field-selector=spec.nodeName=node-1"}, {If: "kube-proxy has left this node", Command: "canaryd cleanup --rules --protect=kube-proxy"}}},
		Baseline: &api.Baseline{
			BaselineName: api.BaselineName{Generation: "4567cdef", Confirmed: at.Add(-24 * time.Hour)},
			Rules:        50, Chains: 19, AppearedRules: 7, AppearedChains: 2, GoneRules: 1, ReorderedChains: 1,
		},
		Keeper:  map[rules.Family]api.FamilyKeeper{rules.IPv4: {State: api.KeeperUnavailable, Reason: "no nf_tables"}},
		Standby: map[rules.Family]api.FamilyStandby{rules.IPv4: {State: api.StandbyOpen, OpenSince: at, Chains: 18, Uncopied: 1, Outstanding: 2}},
		Flushes: []api.Flush{{
			ID: "f1", Time: at, Kind: canary.Emptied,
			Families: []rules.Family{rules.IPv4}, Tables: []rules.TableName{rules.Nat},
			Culprit: writer, Culprits: []api.Culprit{writer}, Writers: []api.Culprit{writer},
			Lost: api.Lost{
				Chains: 2, Rules: 30, Jumps: 4, Unprotected: 3,
				Tables: []api.TableLoss{{
					Family: rules.IPv4, Table: rules.Nat, Kind: canary.Emptied, Chains: 2, Rules: 30, Jumps: 4, Unprotected: 3, By: []uint32{4242},
					PerChain: []api.ChainLoss{{Chain: "KUBE-SERVICES", Rules: 25}, {Chain: "PREROUTING", Rules: 4, Jumps: 4}}, More: 1,
				}},
			},
			NotInBaseline: &api.NotInBaseline{
				BaselineName: api.BaselineName{Generation: "4567cdef", Confirmed: at.Add(-24 * time.Hour)},
				Rules:        3, Chains: []api.ChainName{{Family: rules.IPv4, Table: rules.Nat, Chain: "KUBE-SECRET", Rules: 2}}, More: 1,
			},
			Pods:           []api.LostPod{{Namespace: "default", Name: "web-0", Container: "5f1e", HostPorts: []string{"8080/tcp"}, Gone: true}},
			MorePods:       2,
			NoticedSeconds: 0.004, AbsentSeconds: 0.12, Outcome: reload.Proved, Standby: &api.StandbyUse{Families: []rules.Family{rules.IPv4}, AfterSeconds: 0.003, OpenSeconds: 0.117}, Attempts: 1, Detail: "-A SECRET", Earlier: true,
		}},
	}
}
