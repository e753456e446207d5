package iptables

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// BenchmarkTakings measures the cost of following a flush of 5,000 services:
// 40,000 rules in 16,000 chains.
func BenchmarkTakings(b *testing.B) {
	data := make([]byte, 600)
	var chains [][]byte
	for i := range 16_000 {
		chains = append(chains, fmt.Appendf(nil, "KUBE-SVC-%016d", i))
	}
	for b.Loop() {
		var log takingsLog
		for i := range 40_000 {
			log.note(nft.Event{Kind: unix.NFT_MSG_DELRULE, Family: rules.IPv4, Chain: chains[i*2/5], Data: data}, rules.Nat)
		}
		log.end(nft.Commit{Genid: 1, PID: 1}, time.Now())
	}
}
