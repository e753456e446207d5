package iptablestest

import (
	"context"
	"slices"
	"unsafe"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Takings returns the deletions by commits of other processes since NewFake or the last
// ForgetTakings; on legacy nothing.
func (f *Fake) Takings(context.Context) iptables.Takings {
	f.mu.Lock()
	defer f.mu.Unlock()
	return iptables.Takings{Known: f.backend() == iptables.NFT, Since: f.takings.Since, List: slices.Clone(f.takings.List)}
}

// ForgetTakings acts like an overflow of the Kernel's socket: the deletions by all commits until
// now are unknown.
func (f *Fake) ForgetTakings() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.takings = iptables.Takings{Since: f.genid}
	clear(f.before)
}

// A lastMoment is a family's state before a commit that may be a part of a flush of a table.
type lastMoment struct {
	tables map[rules.TableID]*rules.Table
	genid  uint32
	marks  bool // the commit took marks
}

// Before returns the same as Kernel.Before.
func (f *Fake) Before(family rules.Family, digest uint64) map[rules.TableName][]iptables.Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	all, now := map[rules.TableName][]iptables.Snapshot{}, f.tables
	for id, kept := range f.before {
		for ; id.Family == family && len(kept) > 0 && uint64(kept[0].genid) < digest; kept = kept[1:] {
			f.tables = kept[0].tables
			all[id.Name] = append(all[id.Name], f.snapshot(family, uint64(kept[0].genid)))
		}
		f.before[id] = kept
	}
	f.tables = now
	return all
}

// keepBefore stores the state before a commit that may be a part of a flush, as Kernel.Before
// documents. Call with the Fake locked.
func (f *Fake) keepBefore(by nft.Commit, tables map[rules.TableID]*rules.Table) {
	if by.Own || f.backend() == iptables.Legacy {
		return
	}
	for _, k := range f.takings.List {
		id := k.Family.Table(k.Table)
		emptied := func(chain string) bool {
			c := f.tables[id].Chain(chain)
			return c != nil && len(c.Rules) == 0
		}
		marks := k.Deleted || slices.ContainsFunc(k.Rules, func(r iptables.TakenRule) bool { return r.Comment != "" })
		may := marks || len(k.Rules) > 0 || slices.ContainsFunc(k.Chains, emptied)
		if k.Commit.Genid != by.Genid || !may {
			continue
		}
		kept := f.before[id]
		if n := len(kept); n == momentsKept || n > 0 && !kept[n-1].marks {
			kept = kept[:n-1]
		}
		f.before[id] = append(kept, lastMoment{tables, by.Genid - 1, marks})
	}
}

// take notes a commit's effect on a table. Call with the Fake locked.
func (f *Fake) take(by nft.Commit, family rules.Family, name rules.TableName, old, next *rules.Table) {
	if by.Own {
		return
	}
	k := iptables.Taking{Commit: by, Family: family, Table: name, Deleted: old != nil && next == nil}
	if old != nil {
		for _, c := range old.Chains {
			takeChain(&k, c, next)
		}
	}
	if next != nil {
		for _, c := range next.Chains {
			if len(c.Rules) > 0 && (old == nil || old.Chain(c.Name) == nil) {
				k.Wrote = append(k.Wrote, c.Name)
			}
		}
	}
	f.takings.List = append(f.takings.List, k)
	if n := len(f.takings.List); n > takingsKept {
		f.takings.Since = f.takings.List[n/2-1].Commit.Genid
		f.takings.List = slices.Clone(f.takings.List[n/2:])
	}
}

// momentsKept bounds the states of one table, as in the Kernel.
const momentsKept = 8

// takingsKept bounds the list where owners never rest.
const takingsKept = 1000

// takeChain adds the changes of one chain.
func takeChain(k *iptables.Taking, old rules.Chain, table *rules.Table) {
	var left []rules.Key
	var now *rules.Chain
	if table != nil {
		now = table.Chain(old.Name)
	}
	if now != nil {
		if len(now.Rules) == len(old.Rules) && unsafe.SliceData(now.Rules) == unsafe.SliceData(old.Rules) {
			return // no command wrote to it
		}
		for _, r := range now.Rules {
			left = append(left, r.Key())
		}
	}
	for _, r := range old.Rules {
		if i := slices.Index(left, r.Key()); i >= 0 {
			left = slices.Delete(left, i, i+1)
			continue
		}
		k.Count++
		text, found := "", false
		if r.Target == "" {
			text, found = r.Comment()
		}
		switch {
		case found:
			k.Rules = append(k.Rules, iptables.TakenRule{Chain: old.Name, Comment: text})
		case rules.Builtin(k.Table, old.Name):
			k.Rules = append(k.Rules, iptables.TakenRule{Chain: old.Name, Target: r.Target})
		}
	}
	if len(left) > 0 {
		k.Wrote = append(k.Wrote, old.Name)
	}
	if !k.Deleted && (now == nil || len(now.Rules) < len(old.Rules)) {
		k.Chains = append(k.Chains, old.Name)
	}
}
