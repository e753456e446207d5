package flushes_test

import (
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A record gets the losses of each table and the processes that caused them. It ends with the absence.
func Example() {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	record := api.Flush{ID: "6a5f", Time: start, Outcome: api.Pending}
	lost := reload.Lost{Rules: 1, Chains: []reload.LostChain{{Name: "KUBE-SERVICES", Was: []rules.Rule{{Spec: "-j RETURN", Target: "RETURN"}}, Stands: true}}}
	flushes.AddLoss(&record, rules.IPv4.Table(rules.Nat), flushes.Hit{Verdict: canary.Emptied, Lost: lost})
	flushes.AddCulprit(&record, api.Culprit{PID: 4711, Comm: "iptables"})
	flushes.SettleCulprit(&record)
	absent := flushes.EndAbsence(&record, start.Add(80*time.Millisecond))

	var history flushes.History
	history.Remember(record)
	fmt.Println(history[history.Find("6a5f")].Kind, record.Lost.Rules, flushes.CulpritsText(record), absent)
	// Output:
	// emptied 1 pid 4711 (iptables) 80ms
}
