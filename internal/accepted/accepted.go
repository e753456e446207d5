// Package accepted decides which accepted changes by a rule's owner are reported. These are
// large removals, also in several steps, and policies of built-in chains that become DROP.
//
// The loop passes each learned removal to [List.Learn], and logs the removals that [List.Due]
// returns at [List.At]. [List.Lately] lists them for a status. [Policies.Follow] compares the
// policies of one table with those of the last read, and [Closings] logs the new ones. A
// [Removal] counts the losses of a table, and makes the flush record of a large removal.
//
// No function fails. The values belong to the loop's goroutine.
package accepted

import (
	"cmp"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	// acceptedFor is how long a status has an accepted removal.
	acceptedFor = time.Hour
	// So many rules of a table, or of a chain that keeps some, must be gone. The removal of a
	// single endpoint is not reported.
	muchOfChain = native.MuchOfPart
	muchOfTable = native.MuchOfTable
)

// A List holds the removals that were accepted lately.
type List struct {
	said  []api.Accepted // logged ones, the newest first
	fresh []Removal
	At    time.Time // when fresh ones are logged; zero: there are none
	// shrinking are tables that have lost rules lately.
	shrinking map[rules.TableID]*shrinking
}

// A Removal is a removal that was just learned.
type Removal struct {
	api.Accepted
	Finding canary.Finding // the finding, as if it were a loss
	Seen    time.Time      // the time of the first read that showed it
	Upto    uint64         // the digest of the read when it was learned
	Commit  nft.Commit     // of a native table
	// Steps means that it was learned in several steps, and that By may have done only the last
	// one.
	Steps bool
	// chains and elements also count losses of the table, if most of it is gone.
	chains, elements int
}

// Learn notes a removal by a table's owners, if it must be reported. before and after are the
// generation's sections. read is the first read that showed after, and learned the result of
// learning.
func (a *List) Learn(id rules.TableID, before, after rules.Section, read culprit.Read, learned reload.Learned, now time.Time) {
	for _, x := range a.shrink(id, now).take(before, after, now) {
		x.Time, x.Family, x.Table, x.Upto, x.Seen = now, id.Family, id.Name, read.Digest, read.At
		if at := learned.Shrunk(id.Family, id.Name, x.Chain); !at.IsZero() {
			x.Seen = at
		}
		a.Add(x, now)
	}
}

// Add plans the report of a removal.
func (a *List) Add(x Removal, now time.Time) { a.fresh, a.At = append(a.fresh, x), now }

// chainsByName returns the rules of a section's chains by the chains' names.
func chainsByName(s rules.Section) map[string][]rules.Rule {
	by := make(map[string][]rules.Rule, len(s.Chains))
	for _, c := range s.Chains {
		by[c.Name] = c.Rules
	}
	return by
}

// allGone reports whether each rule of a chain led to a chain that is gone now. An emptied
// chain then is part of the owner's cleaning. before and left are the chains before and after.
func allGone(c rules.Chain, before, left map[string][]rules.Rule) bool {
	return !slices.ContainsFunc(c.Rules, func(r rules.Rule) bool {
		_, stood := before[r.Target]
		_, stands := left[r.Target]
		return !stood || stands
	})
}

func jumpsTo(s rules.Section, chain string) bool {
	return slices.ContainsFunc(s.Jumps, func(h rules.Jump) bool { return h.Into() == chain })
}

// leadsTo reports whether a rule or a jump of the section has the chain as its target.
func leadsTo(s rules.Section, chain string) bool {
	return jumpsTo(s, chain) || slices.ContainsFunc(s.Chains, func(c rules.Chain) bool {
		return slices.ContainsFunc(c.Rules, func(r rules.Rule) bool { return r.Target == chain })
	})
}

// Due returns the removals to report now, and ends the wait (At). Daemon.sayAccepted logs them,
// and shows them in the status.
func (a *List) Due(now time.Time) (fresh []Removal) {
	a.said = a.Lately(now)
	fresh = a.fresh
	a.fresh, a.At = nil, time.Time{}
	return fresh
}

// Counts reports whether a removal from the same place was reported within acceptedFor. If so,
// x counts the rules of both, and replaces the earlier report.
func (a *List) Counts(x *Removal) bool {
	i := slices.IndexFunc(a.said, x.Accepted.SamePlace)
	if i < 0 {
		return false
	}
	x.Rules += a.said[i].Rules
	a.said = slices.Delete(slices.Clone(a.said), i, i+1)
	return true
}

// Keep keeps a reported removal.
func (a *List) Keep(x Removal) {
	a.said = slices.Insert(slices.Clone(a.said), 0, x.Accepted)
}

// Trim keeps only as many removals as a status shows.
func (a *List) Trim() { a.said = a.said[:min(len(a.said), api.AcceptedShown)] }

// Lately returns the removals that were accepted within acceptedFor.
func (a *List) Lately(now time.Time) []api.Accepted {
	return slices.DeleteFunc(slices.Clone(a.said), func(x api.Accepted) bool { return now.Sub(x.Time) >= acceptedFor })
}

// Withdraw forgets the accepted removals of a table since then, because its rules are wanted
// again.
func (a *List) Withdraw(id rules.TableID, since time.Time) {
	old := func(x api.Accepted) bool { return x.Family == id.Family && x.Table == id.Name && !x.Time.Before(since) }
	a.said = slices.DeleteFunc(slices.Clone(a.said), old)
	a.fresh = slices.DeleteFunc(a.fresh, func(f Removal) bool { return old(f.Accepted) })
	delete(a.shrinking, id)
}

// OfNative returns a removal from a native table that a read of that time showed, for the List.
// commit is the removing commit; its zero value is an unknown one.
func OfNative(id tableid.TableID, read time.Time, r native.Removed, commit nft.Commit) Removal {
	a := Removal{Commit: commit,
		Accepted: api.Accepted{Time: read, Family: id.Family, Table: id.Name, Native: true, Rules: r.Gone, Left: r.Left}}
	switch r.Kind {
	case nft.Tables:
		a.chains, a.elements = r.Chains, r.Elements
	case nft.Chains:
		a.Chain = r.Name
	case nft.Sets:
		a.Set = r.Name
	case nft.Rules:
		a.Chain, a.Rule = r.Name, "the last jump to it"
	}
	return a
}

// GoneFrom counts the losses of an unguarded table between two reads; nil is no table. much
// reports whether it lost all its content, or more than half of it: only that is reported.
// Rules that its owner replaced are not lost.
func GoneFrom(before, now *rules.Table) (a Removal, much bool) {
	if before == nil || leavesOut(before) || leavesOut(now) {
		return a, false
	}
	a.NotGuarded = true
	was := 0
	for _, c := range before.Chains {
		left := len(now.Rules(c.Name))
		was += len(c.Rules)
		if left < len(c.Rules) {
			a.Rules += len(c.Rules) - left
			a.Finding.Emptied = append(a.Finding.Emptied, c.Name)
		}
	}
	if now != nil {
		for _, c := range now.Chains {
			a.Left += len(c.Rules)
		}
	}
	return a, a.Rules > 0 && 2*a.Left < was
}

// leavesOut reports whether a table has a chain whose rules were not read.
func leavesOut(t *rules.Table) bool {
	return t != nil && slices.ContainsFunc(t.Chains, func(c rules.Chain) bool { return c.LeftOut() })
}

// removalsJoin is the longest time between removals of several tables by one process that share
// a record.
const removalsJoin = 10 * time.Second

// IsRemoval reports whether the removal gets a record unless its owner did it. That is so if
// most of a guarded table is gone, or most of a large set of a native table.
func (a Removal) IsRemoval() bool {
	return (a.Chain+a.Set+a.Rule == "" || a.largeSet()) && !a.NotGuarded
}

func (a Removal) largeSet() bool { return a.Set != "" && a.Rules >= muchOfTable }

// Record returns the flush record of the removal. It extends the newest record of journal if
// the same process has just removed other rules. newID gives a new record its ID, from the
// time.
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

// ByOwner reports whether the owner of all lost rules is known to have removed them. Such a
// removal gets no record. proxyStands: kube-proxy's canary still exists. A kube-proxy that
// leaves removes it last, which also counts as the owner. An owner may remove rules of others:
// kube-router restores whole tables.
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
