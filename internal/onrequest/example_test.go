package onrequest_test

import (
	"context"
	"fmt"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/onrequest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An operator restores exactly this generation. It removes nothing, so it needs no agreement.
func ExampleRestore() {
	ctx := context.Background()
	kernel := iptablestest.NewFake(iptables.NFT, rules.IPv4)
	drop, err := rules.ParseRule("-s 192.0.2.0/24 -j DROP")
	if err != nil {
		panic(err)
	}
	replayer := reload.Replayer{
		Kernel: kernel, Canary: canary.DefaultChain,
		Protection: rules.Protection{Chain: func(chain string) bool { return chain == "MINE" }},
	}
	job := reload.Job{
		Families: []rules.Family{rules.IPv4},
		Generation: rules.Generation{rules.IPv4.Table(rules.Filter): rules.Section{
			Chains: []rules.Chain{{Name: "MINE", Rules: []rules.Rule{drop}}},
		}},
	}
	reply, _, err := onrequest.Restore(ctx, replayer, true, job, api.RestoreRequest{}, nil)
	fmt.Println(reply.Outcomes[rules.IPv4], reply.Proved(), err)
	// Output:
	// proved true <nil>
}
