package iptables

import (
	"fmt"

	"github.com/canaryd/canaryd/pkg/rules"
)

// hintWeight is the weight of a kubelet hint chain, in rules. Kubelet writes the chain on the
// backend that it uses. So the chain must outweigh the 50 or so rules that a firewall or Docker
// keeps on the other backend. But no program deletes the chain when a node changes its backend.
// It is stale if nothing uses its backend and kube-proxy keeps hundreds of rules on the other
// one (300 for some ten services).
const hintWeight = 100

// A Count holds the size of one backend's content for one family, without canaryd's own chains
// and rules.
type Count struct {
	Rules int  `json:"rules"`
	Hint  bool `json:"hint"` // one of kubelet's hint chains exists
}

// Evidence is the result of Choose. The weight of a backend is its number of rules in both
// families, plus 100 if it has one of kubelet's hint chains. The heavier backend wins, and nft
// wins a tie.
type Evidence struct {
	Backend Backend `json:"backend"`
	// Reason is half a sentence for people, without a full stop.
	Reason string `json:"reason"`
	// Mixed reports that both backends hold rules of other programs.
	Mixed bool `json:"mixed"`
	// Counts has an entry for every requested family. The entry has a Count for each backend
	// that the kernel has for that family.
	Counts map[rules.Family]map[Backend]Count `json:"counts"`

	stamps map[Backend]uint64 // from before the count; see Kernel.Moved
}

// Decide chooses the backend by the counts alone, and sets Backend, Reason and Mixed; Choose
// calls it. hasNFT says that the kernel has nf_tables, which decides a tie.
func (e *Evidence) Decide(hasNFT bool) {
	nft, legacy := e.Total(NFT), e.Total(Legacy)
	e.Mixed = nft.Rules > 0 && legacy.Rules > 0
	e.Backend = NFT
	switch nftWeight, legacyWeight := nft.weight(), legacy.weight(); {
	case legacyWeight > nftWeight:
		e.Backend = Legacy
		e.Reason = reason(Legacy, legacy, NFT, nft)
	case nftWeight > legacyWeight:
		e.Reason = reason(NFT, nft, Legacy, legacy)
	case !hasNFT:
		e.Backend = Legacy
		e.Reason = "the kernel has no nf_tables"
	case nftWeight == 0:
		e.Reason = "iptables' tables hold no rules, and nft is the default"
	case nft == legacy:
		e.Reason = fmt.Sprintf("both backends hold %s, and nft is the default", counted(nft.Rules))
	default:
		e.Reason = fmt.Sprintf("kubelet's hint chain is worth %d rules: a tie, and nft is the default", hintWeight)
	}
}

// reason returns the decisive fact for the winner, as Evidence.Reason; Decide calls it. won and
// lost are the totals of the two backends.
func reason(winner Backend, won Count, loser Backend, lost Count) string {
	switch {
	case won.Hint == lost.Hint:
		return fmt.Sprintf("%s holds more rules: %s %d, %s %d", winner, winner, won.Rules, loser, lost.Rules)
	case lost.Hint:
		return fmt.Sprintf("%s holds %s, so kubelet's hint chain in %s is stale", winner, counted(won.Rules), loser)
	case won.Rules < lost.Rules:
		return fmt.Sprintf("kubelet's hint chain is in %s and outweighs %s in %s", winner, counted(lost.Rules), loser)
	default:
		return fmt.Sprintf("kubelet's hint chain is in %s only", winner)
	}
}

// counted returns a number of rules in words, for Evidence.Reason.
func counted(n int) string {
	if n == 1 {
		return "1 rule"
	}
	return fmt.Sprintf("%d rules", n)
}

// weight returns the weight of a backend, in rules: see Evidence.
func (c Count) weight() int {
	if c.Hint {
		return c.Rules + hintWeight
	}
	return c.Rules
}

// Total returns the sum of a backend's Counts in all families. Its Hint is true if one of them
// has a hint chain.
func (e Evidence) Total(backend Backend) Count {
	var total Count
	for _, counts := range e.Counts {
		total.Rules += counts[backend].Rules
		total.Hint = total.Hint || counts[backend].Hint
	}
	return total
}

// Empty reports that no rules or hints of other programs were found. Then the first program that
// writes may still decide the backend.
func (e Evidence) Empty() bool { return e.Total(NFT).weight() == 0 && e.Total(Legacy).weight() == 0 }

// Prefer returns evidence for the backend that canaryd guarded before in this boot, if the
// tables are empty. A flush deleted the rules that showed the backend. An empty before changes
// nothing. Open calls it unless a backend is forced.
func (e Evidence) Prefer(before Backend) Evidence {
	if before != "" && e.Empty() {
		e.Backend, e.Reason = before, fmt.Sprintf("iptables' tables hold no rules, and canaryd guarded %s before in this boot", before)
	}
	return e
}

// Force returns the evidence with a backend that the user requested (--backend). The counts
// stay, and the reason says whether they contradict it.
func (e Evidence) Force(backend Backend) Evidence {
	const asked = "it was asked for"
	if e.Backend == backend || e.Backend == "" || e.Empty() {
		e.Reason = asked
	} else {
		e.Reason = fmt.Sprintf("%s, against the evidence: %s", asked, e.Reason)
	}
	e.Backend = backend
	return e
}
