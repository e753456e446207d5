package flushers

import (
	"fmt"
	"slices"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// standby is the flag that makes canaryd copy nat into tables of its own.
const standby = "--standby=on"

// TestFlushersNextToTheStandby runs the flushers that flush the whole ruleset or have base
// chains of their own. Their results are as on a node without canaryd, and once the rules are
// back no gate is open.
func TestFlushersNextToTheStandby(t *testing.T) {
	for _, f := range flushers() {
		if !f.standby {
			continue
		}
		t.Run(f.name, func(t *testing.T) {
			nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
				f.flags = append(slices.Clone(f.flags), standby)
				f.name += ", next to the standby" // the matrix has no such row
				endure(machineOf(n, f), f)
			})
		})
	}
}

// wasOpen checks that the standby translated in each family, and is shut again.
func wasOpen(m *machine) {
	m.Helper()
	metrics := m.Metrics()
	for _, family := range rules.Families() {
		if s := m.Status().Standby[family].State; s != "armed" {
			m.Errorf("%s: the standby is %s", family, s)
		}
		if open := metrics[fmt.Sprintf("standby_open_seconds_total{family=%q}", family)]; open <= 0 {
			m.Errorf("%s: the standby was open for %v s", family, open)
		}
	}
}
