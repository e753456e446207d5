package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A flushKind is one way to flush.
type flushKind struct {
	name string
	do   func(ctx context.Context, f scenario.Flusher) error
}

// savedFilter is an administrator's file that accepts all packets, so that the test measures
// canaryd's repair, and not an administrator's DROP.
const savedFilter = `*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT
COMMIT
`

// nativeKinds are the ways to flush kube-proxy's native table. Deleting it alone may be its
// owner's doing, so canaryd does not put it back.
func nativeKinds() []flushKind {
	var all []flushKind
	for _, k := range allKinds(iptables.NFT) {
		if k.name == "nft-flush-ruleset" {
			all = append(all, k)
		}
	}
	return append(all, flushKind{"nft-flush-kube-proxy", func(ctx context.Context, _ scenario.Flusher) error {
		return runNFT(ctx, "flush table ip kube-proxy\n")
	}})
}

// flushKinds returns the flushes that the plan names, or the most telling ones of its mode.
func (p plan) flushKinds() ([]flushKind, error) {
	names := p.Kinds
	switch {
	case p.Mode == inNFTables:
		return nativeKinds(), nil
	case p.Standby == both && len(names) == 0:
		names = []string{"flush-nat", "nft-flush-ruleset"}
	}
	return flushKinds(p.Backend, names)
}

// flushKinds returns the named flushes that are possible on the backend; without names, all.
// They are the scenarios, without the scenario of many flushes and scenarios that first add
// rules.
func flushKinds(backend iptables.Backend, names []string) ([]flushKind, error) {
	kinds := allKinds(backend)
	if len(names) == 0 {
		return kinds, nil
	}
	is := func(name string) func(flushKind) bool { return func(k flushKind) bool { return k.name == name } }
	var some []flushKind
	for _, name := range names {
		if i := slices.IndexFunc(kinds, is(name)); i >= 0 {
			some = append(some, kinds[i])
		} else if !slices.ContainsFunc(allKinds(iptables.NFT), is(name)) { // nft has them all
			return nil, fmt.Errorf("there is no flush %q", name)
		}
	}
	if len(some) == 0 {
		return nil, fmt.Errorf("%s has none of the flushes %q", backend, names)
	}
	return some, nil
}

func allKinds(backend iptables.Backend) []flushKind {
	var kinds []flushKind
	for _, s := range scenario.All() {
		if s.On(backend) && s.Prepare == nil && s.Times == 0 && s.Name != "restore-filter" {
			kinds = append(kinds, flushKind{s.Name, s.Do})
		}
	}
	return append(kinds, flushKind{"restore-filter", func(ctx context.Context, f scenario.Flusher) error {
		return f.Restore(ctx, rules.IPv4, savedFilter)
	}})
}
