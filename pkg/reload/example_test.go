package reload_test

import (
	"context"
	"fmt"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Learn the rules in force, plant marks, and put back the rules that a flush removes, on a kernel
// in memory. With an *iptables.Kernel it is the same.
func ExampleReplayer_Heal() {
	ctx := context.Background()
	kernel := iptablestest.NewFake(iptables.NFT, rules.IPv4)
	if err := kernel.RestoreNoflush(rules.IPv4, "*nat\n:MY-DNAT - [0:0]\n-A PREROUTING -j MY-DNAT\n"+
		"-A MY-DNAT -d 192.0.2.1/32 -j DNAT --to-destination 10.1.0.1\nCOMMIT\n"); err != nil {
		panic(err)
	}
	selector, err := protect.NewSelector([]string{"MY-*"})
	if err != nil {
		panic(err)
	}

	// The rules in force are the generation.
	snapshot, err := kernel.Read(ctx, rules.IPv4)
	if err != nil {
		panic(err)
	}
	job := reload.Job{Families: []rules.Family{rules.IPv4}, Generation: rules.Generation{}}
	for name, table := range snapshot.Tables {
		section := selector.Protection().Extract(table, canary.IsMark)
		job.Generation = job.Generation.With(rules.IPv4.Table(name), section)
	}

	// Marks distinguish a flush from its owner's changes.
	replayer := reload.Replayer{Kernel: kernel, Canary: canary.DefaultChain, Protection: rules.Protection{Chain: selector.Protects}}
	planted, err := replayer.Plant(ctx, job)
	if err != nil {
		panic(err)
	}
	keepMarks := func(result reload.Result) {
		for name, table := range result[rules.IPv4].Tables {
			job.Marks = job.Marks.With(rules.IPv4.Table(name), table.Mark)
		}
	}
	keepMarks(planted)

	if err := kernel.As(4711, "nft").FlushRuleset(); err != nil {
		panic(err)
	}

	healed, err := replayer.Heal(ctx, job)
	if err != nil { // no session could begin: nothing was read or written
		panic(err)
	}
	result := healed[rules.IPv4]
	nat := result.Tables[rules.Nat]
	fmt.Println(result.Outcome, result.Outcome.Done(), result.Err)
	fmt.Println(nat.Finding.Verdict, "lost", nat.Lost.Rules, "rules")

	keepMarks(healed) // the replay planted new ones
	again, err := replayer.Heal(ctx, job)
	fmt.Println(again[rules.IPv4].Outcome, err)
	// Output:
	// proved true <nil>
	// table_deleted lost 2 rules
	// skipped <nil>
}

// A preview shows the changes that a forced restore would make, and writes nothing.
func ExampleReplayer_PreviewForce() {
	ctx := context.Background()
	kernel := iptablestest.NewFake(iptables.Legacy, rules.IPv4)
	if err := kernel.RestoreNoflush(rules.IPv4, "*filter\n:MINE - [0:0]\n-A INPUT -j MINE\n-A MINE -j DROP\nCOMMIT\n"); err != nil {
		panic(err)
	}
	drop, err := rules.ParseRule("-s 192.0.2.0/24 -j DROP")
	if err != nil {
		panic(err)
	}
	filter := rules.IPv4.Table(rules.Filter)
	replayer := reload.Replayer{
		Kernel: kernel, Canary: canary.DefaultChain,
		Protection: rules.Protection{Chain: func(chain string) bool { return chain == "MINE" }},
	}
	preview, err := replayer.PreviewForce(ctx, reload.Job{
		Families: []rules.Family{rules.IPv4},
		Generation: rules.Generation{filter: rules.Section{
			Chains: []rules.Chain{{Name: "MINE", Rules: []rules.Rule{drop}}},
		}},
	})
	if err != nil {
		panic(err)
	}
	for _, r := range preview.Changes[filter].Added.Rules {
		fmt.Println("+", r)
	}
	for _, r := range preview.Changes[filter].Removed.Rules {
		fmt.Println("-", r)
	}
	// Output:
	// + -A MINE -s 192.0.2.0/24 -j DROP
	// - -A MINE -j DROP
	// - -A INPUT -j MINE
}
