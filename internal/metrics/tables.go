package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ofTables returns the gauges of each guarded table.
func (m *Metrics) ofTables() []tableGauges {
	return []tableGauges{m.canaryPresent, m.jumpsMissing, m.generationRules, m.quarantined, m.declaredRefused, m.leftOut, m.opaque, m.policyDrops}
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

// SetOpaque records how many rules of a table are in force and could not be put back.
func (m *Metrics) SetOpaque(family rules.Family, table rules.TableName, n int) {
	m.opaque.set(family.Table(table), float64(n))
}

// SetLeftOut records how many chains of a table are left out.
func (m *Metrics) SetLeftOut(family rules.Family, table rules.TableName, n int) {
	m.leftOut.set(family.Table(table), float64(n))
}

// setPolicyDrops records how many built-in chains of each table have a policy of DROP that was
// different before. SetStatus calls it with the whole list; other tables have 0.
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

// setNative sets the gauges of guarded native tables, and creates the counters of their replays
// that alerts read. closed has the chains with a new policy of DROP. Tables that are no longer
// guarded keep their counters.
func (m *Metrics) setNative(tables []api.NativeTable, closed []api.PolicyDrop) {
	drops := map[string]int{}
	for _, p := range closed {
		if p.Native {
			drops[p.Family.Table(p.Table).NFT()]++
		}
	}
	known := map[string]nativeSeries{}
	for _, t := range tables {
		if t.Immune {
			continue
		}
		shown, before := m.native[t.Table]
		if !before {
			shown = nativeSeries{family: t.Family}
			create(m.replays, vainOutcomes(), t.Family)
		}
		delete(m.native, t.Table)
		m.nativeInForce.WithLabelValues(t.Family, t.Table).Set(truth(t.Verdict == canary.Intact || t.Verdict == canary.Changed))
		m.nativeWitness.WithLabelValues(t.Family, t.Table).Set(truth(t.Witness != ""))
		m.generationRules.WithLabelValues(t.Family, t.Table).Set(float64(t.Rules))
		m.nativeElements.WithLabelValues(t.Family, t.Table).Set(float64(t.Elements))
		if t.Standby != nil && t.Standby.State != shown.standby {
			m.nativeStandby.set(string(t.Standby.State), t.Family, t.Table)
			shown.standby = t.Standby.State
		}
		for _, gauge := range []struct {
			vec   *prometheus.GaugeVec
			value float64
		}{{m.nativeRefused, truth(t.Unreplayable != "")}, {m.quarantined.GaugeVec, float64(t.QuarantinedParts)}, {m.policyDrops.GaugeVec, float64(drops[t.Table])}} {
			if gauge.value != 0 || shown.wrong {
				gauge.vec.WithLabelValues(t.Family, t.Table).Set(gauge.value)
				shown.wrong = true
			}
		}
		known[t.Table] = shown
	}
	for table, shown := range m.native {
		for _, vec := range []*prometheus.GaugeVec{m.nativeInForce, m.nativeRefused, m.nativeWitness, m.quarantined.GaugeVec, m.generationRules.GaugeVec, m.nativeElements, m.policyDrops.GaugeVec} {
			vec.DeleteLabelValues(shown.family, table)
		}
		m.nativeStandby.forget(table)
	}
	m.native = known
}

// A nativeSeries records which series of a native table exist.
type nativeSeries struct {
	family  string
	standby api.StandbyState // the last one set
	wrong   bool             // a gauge that is 0 on a healthy node was not
}
