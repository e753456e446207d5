package daemon

import (
	"slices"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// opaqueRules are the rules of the generation that have no text. They are in force. After a
// flush canaryd puts back the opaque rules that hold their bytes, and no others.
type opaqueRules struct {
	edition    int // of the generation; see state
	generation rules.Generation
	found      map[rules.TableID][]rules.TextlessRule
}

// in returns the opaque rules of a generation, given those of an earlier one: unchanged chains
// are not searched again.
func (l opaqueRules) in(edition int, generation rules.Generation) opaqueRules {
	now := opaqueRules{edition, generation, map[rules.TableID][]rules.TextlessRule{}}
	for id, section := range generation {
		now.found[id] = section.Opaque(l.generation[id], l.found[id])
	}
	return now
}

// opaqueNow returns for the status the opaque rules without bytes that are in force and not
// quarantined, at most QuarantinedShown of them. A metric has the number of all.
func (d *Daemon) opaqueNow(st *state) []api.Quarantined {
	if st.opaque.generation == nil || st.opaque.edition != st.generation.edition {
		st.opaque = st.opaque.in(st.generation.edition, st.want())
	}
	var list []api.Quarantined
	quarantined := st.quarantine.Rules()
	for id := range st.tables() {
		d.cfg.Metrics.SetQuarantined(id.Family, id.Name, len(quarantined[id]))
		standing := 0
		for _, r := range st.opaque.found[id] {
			reason, _ := r.Rule.Opaque()
			is := func(h reload.QuarantinedRule) bool { return h.Chain == r.Chain && h.Rule == r.Rule }
			if r.Rule.HasBytes() || slices.ContainsFunc(quarantined[id], is) {
				continue
			}
			if standing++; len(list) < api.QuarantinedShown {
				list = append(list, api.Quarantined{Family: id.Family, Table: id.Name, Chain: r.Chain, Rule: r.Rule.Label(), Reason: reason})
			}
		}
		d.cfg.Metrics.SetOpaque(id.Family, id.Name, standing)
	}
	return list
}
