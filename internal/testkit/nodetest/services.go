package nodetest

import (
	"fmt"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// Services returns the rules that kube-proxy wrote to IPv4's nat and filter for 100, 1,000 or
// 5,000 services, as input of iptables-restore --noflush. It reads the data of the
// measurements, by a path from a package in test.
func (n *Node) Services(count int) string {
	n.Helper()
	return testkit.Unpacked(n.T, fmt.Sprintf("../../hack/bench/heal/testdata/services-%d.rules.gz", count))
}

// LoadNative writes the tables that kube-proxy in nftables mode makes for 100, 1,000 or 5,000
// services. Like Services it is for packages in test.
func (n *Node) LoadNative(count int) {
	n.Helper()
	nstest.CommandInput(n.T, testkit.Unpacked(n.T, fmt.Sprintf("../../hack/bench/heal/testdata/services-%d.nft.gz", count)), "nft", "-f", "-")
}
