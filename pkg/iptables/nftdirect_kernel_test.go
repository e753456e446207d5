package iptables

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// directSeed returns the seed of random flushes and scripts. CANARYD_SEED sets
// another.
func directSeed(t *testing.T) uint64 {
	t.Helper()
	text := os.Getenv("CANARYD_SEED")
	if text == "" {
		return 1
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("CANARYD_SEED: %v", err)
	}
	return n
}

// onNFT runs body in a namespace of its own for each family.
func onNFT(t *testing.T, body func(t *testing.T, family rules.Family)) {
	for _, family := range rules.Families() {
		t.Run(family.String(), func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, program(NFT, family, "-save"), program(NFT, family, "-restore"), "nft")
				body(t, family)
			})
		})
	}
}

// flushRandomly removes rules in one of many ways, and names the way.
func flushRandomly(t *testing.T, r *rand.Rand, family rules.Family, set rules.Ruleset) string {
	t.Helper()
	tool, nft := program(NFT, family, ""), map[rules.Family]string{rules.IPv4: "ip", rules.IPv6: "ip6"}[family]
	tables := slices.Sorted(maps.Keys(set))
	table := tables[r.IntN(len(tables))]
	switch r.IntN(6) {
	case 0:
		flushRuleset(t)
		return "nft flush ruleset"
	case 1:
		runTool(t, fmt.Sprintf("delete table %s %s", nft, table), "nft", "-f", "-")
		return "nft delete table " + string(table)
	case 2:
		runTool(t, "", tool, "-t", string(table), "-F")
		runTool(t, "", tool, "-t", string(table), "-X")
		return "-F and -X in " + string(table)
	case 3:
		for _, table := range tables {
			runTool(t, "", tool, "-t", string(table), "-F")
		}
		return "-F everywhere"
	default:
		text := ""
		for _, chain := range set[table].Chains {
			for i := len(chain.Rules); i > 0; i-- {
				if r.IntN(3) == 0 {
					text += fmt.Sprintf("-D %s %d\n", chain.Name, i)
				}
			}
		}
		runTool(t, fmt.Sprintf("*%s\n%sCOMMIT\n", table, text), tool+"-restore", "--noflush")
		return "a third of the rules of " + string(table)
	}
}

// scriptsFor makes the scripts that turn seen, which lacks some rules of want,
// into want. They make the user's chains again, and put the missing rules of
// built-in chains into their old places by various commands.
func scriptsFor(r *rand.Rand, want, seen rules.Ruleset) []Script {
	var scripts []Script
	for _, table := range slices.Sorted(maps.Keys(want)) {
		s := Script{Table: table}
		for _, chain := range want[table].Chains {
			if !rules.Builtin(table, chain.Name) {
				s.Declare = append(s.Declare, chain.Name)
				for _, rule := range chain.Rules {
					s.Steps = append(s.Steps, Step{Verb: Append, Chain: chain.Name, Rule: rule})
				}
				continue
			}
			var standing []rules.Rule
			if c := seen[table].Chain(chain.Name); c != nil {
				standing = c.Rules
			}
			s.Steps = append(s.Steps, mend(r, chain, standing)...)
		}
		scripts = append(scripts, s)
	}
	return scripts
}

// mend makes the steps that turn standing, a part of the chain's rules, into all
// of them.
func mend(r *rand.Rand, chain rules.Chain, standing []rules.Rule) []Step {
	var steps []Step
	standing = slices.Clone(standing)
	for len(standing) > 0 && r.IntN(3) == 0 { // some are deleted and added again
		i := r.IntN(len(standing))
		first := slices.IndexFunc(standing, func(s rules.Rule) bool { return s.Spec == standing[i].Spec })
		step := Step{Verb: Delete, Chain: chain.Name, Rule: standing[i]}
		if r.IntN(2) == 0 {
			first, step = i, Step{Verb: Delete, Chain: chain.Name, Index: i + 1}
		}
		standing = slices.Delete(standing, first, first+1)
		steps = append(steps, step)
	}
	for i, rule := range chain.Rules {
		if i < len(standing) && standing[i].Spec == rule.Spec {
			continue
		}
		step := Step{Verb: Insert, Chain: chain.Name, Index: i + 1, Rule: rule}
		switch {
		case i == len(standing) && r.IntN(2) == 0:
			step.Verb, step.Index = Append, 0
		case i == 0 && r.IntN(2) == 0:
			step.Index = 0
		}
		standing = slices.Insert(standing, i, rule)
		steps = append(steps, step)
	}
	return steps
}
