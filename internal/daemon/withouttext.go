package daemon

import (
	"github.com/canaryd/canaryd/pkg/tableid"
	"slices"

	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A textless is what was found of the generation's rules that have no text: they stand, and are not
// put back if they are lost.
type textless struct {
	edition    int // of the generation; see state
	generation rules.Generation
	found      map[rules.TableID][]rules.TextlessRule
}

// in returns what is found in a generation, given what was found in the one before.
func (l textless) in(edition int, generation rules.Generation) textless {
	now := textless{edition, generation, map[rules.TableID][]rules.TextlessRule{}}
	for f, tables := range tableid.ByFamily(generation) {
		now.found[f] = map[rules.TableName][]rules.TextlessRule{}
		for t, section := range tables {
			now.found[f.Table(t)] = section.Opaque(l.generation[f.Table(t)], l.found[f.Table(t)])
		}
	}
	return now
}

// withoutText returns the rules of the generation that have no text and are not in quarantine yet, at
// most quarantinedShown.
func (st *state) withoutText() []Quarantined {
	if st.textless.generation == nil || st.textless.edition != st.edition {
		st.textless = st.textless.in(st.edition, st.want())
	}
	var list []Quarantined
	for _, f := range rules.Families() {
		for _, t := range rules.Guarded() {
			for _, r := range st.textless.found[f.Table(t)] {
				reason, _ := r.Rule.Opaque()
				is := func(h reload.Held) bool { return h.Chain == r.Chain && h.Rule == r.Rule }
				if len(list) < quarantinedShown && !slices.ContainsFunc(st.quarantine[f.Table(t)], is) {
					list = append(list, Quarantined{f, t, r.Chain, r.Rule.Spec, reason})
				}
			}
		}
	}
	return list
}
