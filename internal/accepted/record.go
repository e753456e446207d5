package accepted

import (
	"cmp"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/reload"
)

// removalsJoin is how close removals of several tables by one process must be for one record.
const removalsJoin = 10 * time.Second

// IsRemoval reports whether it has a record, unless its owner has done it: most of a guarded table
// is gone, or of a large set of a native one.
func (a Removal) IsRemoval() bool {
	return (a.Chain+a.Set+a.Rule == "" || a.largeSet()) && !a.NotGuarded
}

func (a Removal) largeSet() bool { return a.Set != "" && a.Rules >= muchOfTable }

// Record returns its record: the last one, if the same process has just removed other rules.
func (a Removal) Record(journal flushes.History, newID func(time.Time) string) api.Flush {
	r := api.Flush{Time: cmp.Or(a.Seen, a.Time), Outcome: api.TakenForOwners}
	if len(journal) > 0 {
		if last := journal[0]; last.Kind == api.RemovedByOwner && a.By != nil && last.Culprit.PID == a.By.PID && r.Time.Sub(last.Time).Abs() < removalsJoin {
			r = last
		}
	}
	if r.ID == "" {
		r.ID = newID(r.Time)
	}
	var by []uint32
	if a.By != nil {
		flushes.AddCulprit(&r, *a.By)
		r.CulpritsLikely = r.CulpritsLikely || a.Steps
		by = []uint32{a.By.PID}
	}
	if a.Native {
		id := a.Family.Table(a.Table)
		loss := api.NativeLoss{Family: id.Family.NFT(), Table: id.NFT(), Kind: api.RemovedByOwner, By: by}
		if a.largeSet() {
			loss.Elements = a.Rules
		} else {
			loss.Chains, loss.Rules, loss.Elements = a.chains, a.Rules, a.elements
		}
		r.Native = append(slices.Clone(r.Native), loss)
		r.Lost.Chains, r.Lost.Rules, r.Lost.Elements = r.Lost.Chains+loss.Chains, r.Lost.Rules+loss.Rules, r.Lost.Elements+loss.Elements
	} else {
		r.Lost.Tables = slices.Clone(r.Lost.Tables)
		flushes.AddLoss(&r, a.Family.Table(a.Table), flushes.Hit{Verdict: api.RemovedByOwner, Lost: reload.Lost{Rules: a.Rules}})
		r.Lost.Tables[len(r.Lost.Tables)-1].By = by
	}
	r.Kind = api.RemovedByOwner
	flushes.SettleCulprit(&r)
	return r
}

// ByOwner reports whether a removal is known to be that of the owner of all that lost rules, or is
// that of a kube-proxy that leaves: its last step takes its canary, too, which stands else. A
// program that owns rules may remove others', as kube-router does that restores a whole table.
func (a Removal) ByOwner(proxyStands bool) bool {
	if a.By != nil && len(a.By.Ancestors) > 0 {
		names := append([]string{a.By.Comm}, a.By.Ancestors...)
		by := func(writes func(comm string) bool) bool { return slices.ContainsFunc(names, writes) }
		if a.Native {
			return by(func(comm string) bool { return owners.WritesTable(comm, a.Family.Table(a.Table)) })
		}
		return by(owners.Writes) && !slices.ContainsFunc(a.Finding.Emptied, func(chain string) bool {
			return !by(func(comm string) bool { return owners.WritesChain(comm, chain) })
		})
	}
	return !a.Native && !proxyStands
}
