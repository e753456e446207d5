package daemon

import (
	"cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/canary"
)

// publishNative puts the native tables into a status.
func (d *Daemon) publishNative(st *state, s *api.Status) {
	r := &st.native
	if !d.guardsNative() || st.removed {
		return
	}
	s.Native = []api.NativeTable{}
	for _, id := range r.ids() {
		t := r.tables[id]
		held := st.quarantine.Count(id)
		if t.drill && !t.lost() || t.out != nil && !t.lost() && held == 0 {
			continue
		}
		row := api.NativeTable{Family: id.Family.NFT(), Table: id.NFT(), Verdict: canary.Verdict(t.finding.Verdict), Why: t.finding.Why, Captured: t.read}
		row.Chains, row.Rules, row.Elements = t.want.Counts()
		if !t.lost() && (!r.begun || r.all || r.unknown() != "") {
			row.Verdict, row.Why = canary.Unknown, "it could not be read yet"
		}
		if row.QuarantinedParts = held; held > 0 && !t.lost() {
			row.Verdict, row.Why = canary.Partial, nativestore.PartOfIt
		}
		row.UnreplayableParts = len(t.refusedParts)
		row.Generation = nativestore.IDOf(t.digest)
		row.Unreplayable, row.Awaiting = t.refused.What, r.waiting[id] != nil
		row.LeftOut = t.out != nil
		row.Standby, row.Witness = d.nativeStandbyOf(st, id), r.witness[id.Family].Table
		s.Native = append(s.Native, row)
	}
	for id := range r.immune {
		s.Native = append(s.Native, api.NativeTable{Family: id.Family.NFT(), Table: id.NFT(), Verdict: canary.Intact, Immune: true,
			Why: "one process owns it, and no other can flush it"})
	}
	sorting.Stable(s.Native, func(a, b api.NativeTable) int { return cmp.Compare(a.Table, b.Table) })
	switch {
	case r.unknown() != "":
		s.NativeError = r.unknown()
	case !r.begun:
		s.NativeError = "they were not read yet"
	}
	s.NativeOverLimit, s.NativeLeftOut = r.overLimit, r.leftOut()
	for _, k := range r.disk.kept {
		s.NativeStored = append(s.NativeStored, api.StoredNativeGeneration{ID: k.ID, Family: k.Family, Table: k.Name, Captured: k.Captured,
			Made: k.Made, Chains: k.Chains, Rules: k.Rules, Elements: k.Elements, Foreign: k.Foreign})
	}
	for _, w := range r.waitingRecords() {
		s.LossSince = pace.Earliest(s.LossSince, w.Time)
		s.Flushes = insertRecord(s.Flushes, w)
	}
	if !r.known.IsZero() {
		s.LastKnown = pace.Earliest(s.LastKnown, r.known)
	}
}
