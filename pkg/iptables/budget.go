package iptables

import (
	"cmp"
	"slices"
	"sync"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// DefaultMaxRules is the number of rules that canaryd keeps of one family, unless
// Config.MaxRules sets another. 5,000 services have 46,578 rules. docs/measured.md has the
// memory that both families take then.
const DefaultMaxRules = 100_000

// A LeftOut is a chain whose rules are not kept, because there are too many.
type LeftOut struct {
	Family rules.Family
	Table  rules.TableName
	Chain  string
	Rules  int // at the last count
}

// A budget chooses the chains of a family whose rules are kept, when the rules of all chains are
// too many. Its methods may be called concurrently.
//
// It leaves out unguarded chains first, then guarded ones, and of each kind the largest first.
// The choice is stable. A chain that is left out comes back only if all kept rules then fill at
// most three quarters of the budget. No chain is left out while all kept ones fit. An empty
// chain is never left out.
type budget struct {
	most   int // 0: no limit
	guards func(Place) bool

	mu   sync.Mutex
	left map[Place]nft.Weight
	more bool // chains were left out since the last shed
}

// newBudget returns the budget of a family, for open. most is the limit in units, 0 for none.
// canary is the name of canaryd's own chain, which counts as guarded. protects reports whether
// a chain is protected; nil means all.
func newBudget(most int, canary string, protects func(chain string) bool) *budget {
	guards := func(p Place) bool {
		return slices.Contains(protect.Tables(), p.Table) &&
			(protects == nil || p.Chain == canary || rules.Builtin(p.Table, p.Chain) || protects(p.Chain))
	}
	return &budget{most: most, guards: guards, left: map[Place]nft.Weight{}}
}

// fits reports whether so many units can be kept.
func (b *budget) fits(units int) bool { return b.most == 0 || units <= b.most }

// fitsAgain reports whether a chain may come back, if all kept chains would then take so many
// units.
func (b *budget) fitsAgain(units int) bool { return b.most == 0 || units <= b.most-b.most/4 }

// any reports whether a chain is left out. weigh then reads the chains' weights even if
// everything fits, because the chain may come back.
func (b *budget) any() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.left) > 0
}

// Most implements nft.MirrorBudget.
func (b *budget) Most() int { return b.most }

// Choose implements nft.MirrorBudget.
func (b *budget) Choose(all map[Place]nft.Weight) (left map[Place]bool, back []Place) {
	back = b.choose(all)
	return b.places(), back
}

// choose decides again by the weights of all chains that exist: weigh calls it on legacy, the
// mirror (Choose) on nft. It returns the chains that are no longer left out, whose rules must
// be read again.
func (b *budget) choose(all map[Place]nft.Weight) (back []Place) {
	b.mu.Lock()
	defer b.mu.Unlock()
	order, kept := make([]Place, 0, len(all)), 0
	for p, w := range all {
		order = append(order, p)
		if _, left := b.left[p]; !left {
			kept += w.Units()
		}
	}
	if b.fits(kept) && len(b.left) == 0 {
		return nil
	}
	sorting.Stable(order, func(p, q Place) int {
		if g, h := b.guards(p), b.guards(q); g != h {
			if g {
				return 1
			}
			return -1
		}
		return cmp.Or(cmp.Compare(all[q].Units(), all[p].Units()), cmp.Compare(p.Table, q.Table), cmp.Compare(p.Chain, q.Chain))
	})
	before := b.left
	b.left = map[Place]nft.Weight{}
	for _, p := range order {
		if all[p].Rules == 0 {
			continue // nothing to keep, and canaryd must see that it was emptied
		}
		if _, left := before[p]; left {
			b.left[p] = all[p]
		} else if !b.fits(kept) && all[p].Units() > 0 {
			b.left[p] = all[p]
			kept -= all[p].Units()
		}
	}
	for _, p := range slices.Backward(order) { // guarded and small ones first
		w, left := b.left[p]
		_, was := before[p]
		if left && (b.fitsAgain(kept+w.Units()) || !was && b.fits(kept+w.Units())) {
			delete(b.left, p)
			kept += w.Units()
		}
	}
	for _, p := range order {
		_, was := before[p]
		_, is := b.left[p]
		switch {
		case is && !was:
			b.more = true
		case was && !is:
			back = append(back, p)
		}
	}
	return back
}

// shed reports whether more chains are left out than at its last call. A read then drops the
// cached rules and texts of these chains, to free their memory.
func (b *budget) shed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	more := b.more
	b.more = false
	return more
}

// places returns the chains that are left out, nil if there are none. A read skips their rules.
func (b *budget) places() map[Place]bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.left) == 0 {
		return nil
	}
	left := make(map[Place]bool, len(b.left))
	for p := range b.left {
		left[p] = true
	}
	return left
}

// LeftOut returns the guarded chains whose rules are not kept, by family and table, the largest
// first. The daemon warns about them after a read: nothing guards their rules. It may be called
// concurrently.
func (k *Kernel) LeftOut() []LeftOut {
	var list []LeftOut
	for _, f := range k.Families() {
		b := k.budgets[f]
		b.mu.Lock()
		for p, w := range b.left {
			if b.guards(p) {
				list = append(list, LeftOut{f, p.Table, p.Chain, w.Rules})
			}
		}
		b.mu.Unlock()
	}
	sorting.Stable(list, func(x, y LeftOut) int {
		return cmp.Or(cmp.Compare(x.Family, y.Family), cmp.Compare(x.Table, y.Table), cmp.Compare(y.Rules, x.Rules), cmp.Compare(x.Chain, y.Chain))
	})
	return list
}
