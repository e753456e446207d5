package culprit_test

import (
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// The kernel reported which commit took rules of nat. The process behind it is the culprit.
func ExampleInquiry_Answer() {
	nat, now := rules.IPv4.Table(rules.Nat), time.Now()
	var writers watch.Writers
	writers.Note(watch.Writer{Time: now, Genid: 7, PID: 4711, Comm: "iptables"})
	writers.Note(watch.Writer{Time: now, Genid: 8, PID: 815, Comm: "kubelet"})
	q := culprit.Inquiry{
		Writers: &writers,
		Takings: iptables.Takings{Known: true, Since: 5, List: []iptables.Taking{{
			Commit: nft.Commit{Genid: 7, PID: 4711, Comm: "iptables"},
			Family: nat.Family, Table: nat.Name, Chains: []string{"KUBE-SERVICES"}, Count: 40,
		}}},
		Own: func(uint32) bool { return false },
	}
	guilty, missed := q.Answer(culprit.Charge{ID: nat, Finding: canary.Finding{Verdict: canary.Emptied, Emptied: []string{"KUBE-SERVICES"}}, Intact: 6, Sound: 6, InForce: 6, Upto: 8})
	for _, w := range guilty {
		fmt.Println(w.PID, w.Comm)
	}
	fmt.Println("there may be more:", missed)
	// Output:
	// 4711 iptables
	// there may be more: false
}
