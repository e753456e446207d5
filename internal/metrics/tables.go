package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ofTables returns the gauges that each guarded table has.
func (m *Metrics) ofTables() []tableGauges {
	return []tableGauges{m.canaryPresent, m.jumpsMissing, m.generationRules, m.quarantined, m.declaredRefused, m.leftOut, m.opaque, m.policyDrops}
}

// zeroLosses makes the counters of a table's losses exist before the first one.
func (m *Metrics) zeroLosses(id rules.TableID) {
	f, t := id.Family.String(), id.Name
	m.flushedUnprotected.WithLabelValues(f, t)
	m.unprotectedUnknown.WithLabelValues(f, t)
	create(m.flushes, canary.LossKinds(), f, t)
}

// ForgetTable removes the gauges of a table that is guarded on demand and holds nothing protected.
// Its counters stay.
func (m *Metrics) ForgetTable(id rules.TableID) {
	for _, g := range m.ofTables() {
		g.forget(id)
	}
}

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

// setNative sets the gauges of guarded native tables, and makes the counters of their losses exist
// before the first one. Tables that are guarded no more keep the latter.
func (m *Metrics) setNative(tables []api.NativeTable, closed []api.PolicyDrop) {
	drops := map[string]int{}
	for _, p := range closed {
		if p.Native {
			drops[p.Family.Table(p.Table).NFT()]++
		}
	}
	known := map[string]string{}
	for _, t := range tables {
		if t.Immune {
			continue
		}
		known[t.Table] = t.Family
		delete(m.native, t.Table)
		m.nativeInForce.WithLabelValues(t.Family, t.Table).Set(truth(t.Verdict == canary.Intact || t.Verdict == canary.Changed))
		m.nativeRefused.WithLabelValues(t.Family, t.Table).Set(truth(t.Unreplayable != ""))
		m.nativeWitness.WithLabelValues(t.Family, t.Table).Set(truth(t.Witness != ""))
		m.quarantined.WithLabelValues(t.Family, t.Table).Set(float64(t.QuarantinedParts))
		if t.Standby != nil {
			setState(m.nativeStandby, api.StandbyStates(), t.Standby.State, t.Family, t.Table)
		}
		m.generationRules.WithLabelValues(t.Family, t.Table).Set(float64(t.Rules))
		m.nativeElements.WithLabelValues(t.Family, t.Table).Set(float64(t.Elements))
		m.policyDrops.WithLabelValues(t.Family, t.Table).Set(float64(drops[t.Table]))
		create(m.flushes, api.NativeLossKinds(), t.Family, t.Table)
	}
	for table, family := range m.native {
		m.nativeInForce.DeleteLabelValues(family, table)
		m.nativeRefused.DeleteLabelValues(family, table)
		m.nativeWitness.DeleteLabelValues(family, table)
		m.quarantined.DeleteLabelValues(family, table)
		m.nativeStandby.DeletePartialMatch(prometheus.Labels{"family": family, "table": table})
		m.generationRules.DeleteLabelValues(family, table)
		m.nativeElements.DeleteLabelValues(family, table)
		m.policyDrops.DeleteLabelValues(family, table)
	}
	m.native = known
}
