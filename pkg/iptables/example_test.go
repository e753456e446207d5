package iptables_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Open the kernel and read its tables. This example needs root, so it is compiled
// and not run.
func ExampleOpen() {
	ctx := context.Background()
	kernel, err := iptables.Open(ctx, iptables.Config{})
	if err != nil {
		panic(err)
	}
	defer kernel.Close()
	info := kernel.Info()
	fmt.Println(info.Backend, info.Version, "because", info.Reason)
	for _, family := range kernel.Families() {
		snapshot, err := kernel.Read(ctx, family)
		if err != nil { // unknown, not empty
			panic(err)
		}
		for name, table := range snapshot.Tables {
			fmt.Println(family.Table(name), len(table.Chains), "chains")
		}
		for name, err := range snapshot.Unreadable {
			fmt.Println(family.Table(name), "exists and cannot be read:", err)
		}
	}
}

// A session's write depends on its read. If another process writes in between,
// the write is stale and changes nothing. After another read it succeeds.
func ExampleSession() {
	ctx := context.Background()
	kernel := iptablestest.NewFake(iptables.NFT, rules.IPv4) // an *iptables.Kernel works alike
	session, err := kernel.Begin(ctx)
	if err != nil {
		panic(err)
	}
	defer session.Close()
	drop := iptables.Step{Verb: iptables.Append, Chain: "MINE", Rule: rules.Rule{Spec: "-j DROP", Target: "DROP"}}
	payload := iptables.Payload{rules.IPv4: {{Table: rules.Filter, Declare: []string{"MINE"}, Steps: []iptables.Step{drop}}}}

	if _, err := session.Read(ctx, rules.IPv4); err != nil {
		panic(err)
	}
	if err := kernel.RestoreNoflush(rules.IPv4, "*filter\n:ANOTHERS - [0:0]\nCOMMIT\n"); err != nil {
		panic(err)
	}
	written := session.Restore(ctx, payload)[rules.IPv4]
	fmt.Println("stale:", errors.Is(written.Err, nft.ErrStale))

	if _, err := session.Read(ctx, rules.IPv4); err != nil {
		panic(err)
	}
	written = session.Restore(ctx, payload)[rules.IPv4]
	fmt.Println("written:", written.Err == nil, "raced:", written.Raced)
	fmt.Print(kernel.SaveTable(rules.IPv4, rules.Filter))
	// Output:
	// stale: true
	// written: true raced: false
	// *filter
	// :INPUT ACCEPT [0:0]
	// :FORWARD ACCEPT [0:0]
	// :OUTPUT ACCEPT [0:0]
	// :ANOTHERS - [0:0]
	// :MINE - [0:0]
	// -A MINE -j DROP
	// COMMIT
}

// A stamp is the cheapest look, and a probe looks at a few chains. Neither reads
// a rule.
func ExampleKernel_Probe() {
	ctx := context.Background()
	kernel := iptablestest.NewFake(iptables.NFT, rules.IPv4) // an *iptables.Kernel works alike
	mine := iptables.Place{Table: rules.Filter, Chain: "MINE"}
	before, err := kernel.Stamp(ctx, rules.IPv4)
	if err != nil {
		panic(err)
	}
	if err := kernel.RestoreNoflush(rules.IPv4, "*filter\n:MINE - [0:0]\n-A MINE -m comment --comment here\nCOMMIT\n"); err != nil {
		panic(err)
	}
	now, err := kernel.Stamp(ctx, rules.IPv4)
	if err != nil {
		panic(err)
	}
	seen, err := kernel.Probe(ctx, rules.IPv4, []iptables.Place{mine})
	if err != nil {
		panic(err)
	}
	fmt.Println("moved:", now != before)
	fmt.Println("there:", seen.Holdings[mine].Presence == iptables.Present, seen.Holdings[mine].Comments)
	// Output:
	// moved: true
	// there: true [here]
}
