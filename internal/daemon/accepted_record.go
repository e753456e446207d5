package daemon

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/reload"
)

// removalsJoin is how close removals of several tables by one process must be for one record.
const removalsJoin = 10 * time.Second

// recordRemoval records that most of a table, or of a large set of a native one, was removed by
// name, and that its owner is not known to have done it. Nothing is put back; the record names the
// process.
func (d *Daemon) recordRemoval(ctx context.Context, st *state, a acceptance) {
	largeSet := a.Set != "" && a.Rules >= muchOfTable
	if a.Chain+a.Set+a.Rule != "" && !largeSet || a.NotGuarded || st.removedByOwner(a) {
		return
	}
	r := api.Flush{Time: cmp.Or(a.seen, a.Time), Outcome: api.TakenForOwners}
	if len(st.journal) > 0 {
		if last := st.journal[0]; last.Kind == api.RemovedByOwner && a.By != nil && last.Culprit.PID == a.By.PID && r.Time.Sub(last.Time).Abs() < removalsJoin {
			r = last
		}
	}
	if r.ID == "" {
		r.ID = st.newFlushID(r.Time)
	}
	var by []uint32
	if a.By != nil {
		flushes.AddCulprit(&r, *a.By)
		r.CulpritsLikely = r.CulpritsLikely || a.steps
		by = []uint32{a.By.PID}
	}
	if a.Native {
		id := a.Family.Table(a.Table)
		loss := api.NativeLoss{Family: id.Family.NFT(), Table: id.NFT(), Kind: api.RemovedByOwner, By: by}
		if largeSet {
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
	st.journal.Rewrite(r)
	d.write(ctx, r, nil)
}

// removedByOwner reports whether a removal is known to be that of the owner of all that lost rules,
// or is that of a kube-proxy that leaves: its last step takes its canary, too. A program that owns
// rules may remove others', as kube-router does that restores a whole table.
func (st *state) removedByOwner(a acceptance) bool {
	if a.By != nil && len(a.By.Ancestors) > 0 {
		names := append([]string{a.By.Comm}, a.By.Ancestors...)
		by := func(writes func(comm string) bool) bool { return slices.ContainsFunc(names, writes) }
		if a.Native {
			return by(func(comm string) bool { return owners.WritesTable(comm, a.Family.Table(a.Table)) })
		}
		return by(owners.Writes) && !slices.ContainsFunc(a.finding.Emptied, func(chain string) bool {
			return !by(func(comm string) bool { return owners.WritesChain(comm, chain) })
		})
	}
	section := st.generation.learned.Generation[a.Family.Table(a.Table)]
	_, stands := section.Chain(owners.ProxyCanary)
	return !a.Native && !stands
}
