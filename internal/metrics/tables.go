package metrics

import (
	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// SetQuarantined records how many rules of a table are quarantined.
func (m *Metrics) SetQuarantined(family rules.Family, table rules.TableName, n int) {
	m.quarantined.set(family.Table(table), float64(n))
}

// SetDeclaredRefused records how many declared rules of a table are refused.
func (m *Metrics) SetDeclaredRefused(family rules.Family, table rules.TableName, n int) {
	m.declaredRefused.set(family.Table(table), float64(n))
}

// SetOpaque records how many rules of a table stand and could not be put back.
func (m *Metrics) SetOpaque(family rules.Family, table rules.TableName, n int) {
	m.opaque.set(family.Table(table), float64(n))
}

// SetLeftOut records how many chains of a table are left out.
func (m *Metrics) SetLeftOut(family rules.Family, table rules.TableName, n int) {
	m.leftOut.set(family.Table(table), float64(n))
}

// setPolicyDrops records how many built-in chains of each table have a policy of DROP that they had
// not before.
func (m *Metrics) setPolicyDrops(list []api.PolicyDrop) {
	counts := map[rules.TableID]int{}
	for _, p := range list {
		if !p.Native {
			counts[p.Family.Table(p.Table)]++
		}
	}
	for _, family := range m.families {
		for _, table := range protect.Tables() {
			m.policyDrops.set(family.Table(table), float64(counts[family.Table(table)]))
		}
	}
}
