package iptables

import (
	"cmp"
	"slices"
	"sync"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// DefaultMaxRules is how many rules are kept of one family, unless Config.MaxRules says otherwise.
// 5,000 services are 46,578. What both families take then is in docs/measured.md.
const DefaultMaxRules = 100_000

// A LeftOut is a chain of which the rules are not kept, because there are too many.
type LeftOut struct {
	Family rules.Family
	Table  rules.TableName
	Chain  string
	Rules  int // when they were last counted
}

// A budget says of which chains of a family the rules are kept, when those of all are too many.
// Its methods may be called concurrently.
//
// Chains that are not guarded go first, then those that are, of each kind the largest first. The
// choice stands: a chain that is left out comes back only when all would take three quarters of the
// budget with it, and none goes while they fit. An empty chain is never left out.
type budget struct {
	most   int // 0: no limit
	guards func(Place) bool

	mu   sync.Mutex
	left map[Place]nft.Weight
	more bool // chains were left out since shed was asked
}

// newBudget returns a budget. canary is the name of our own chain, which is guarded as well.
func newBudget(most int, canary string, protects func(chain string) bool) *budget {
	guards := func(p Place) bool {
		return slices.Contains(protect.Tables(), p.Table) &&
			(protects == nil || p.Chain == canary || rules.Builtin(p.Table, p.Chain) || protects(p.Chain))
	}
	return &budget{most: most, guards: guards, left: map[Place]nft.Weight{}}
}

// fits reports whether so many units can be kept.
func (b *budget) fits(units int) bool { return b.most == 0 || units <= b.most }

// fitsAgain reports whether a chain may come back, if all would take so many units then.
func (b *budget) fitsAgain(units int) bool { return b.most == 0 || units <= b.most-b.most/4 }

// any reports whether a chain is left out.
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

// choose decides again, given what all chains weigh that exist, and returns those of which the
// rules are to be read again.
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
	slices.SortFunc(order, func(p, q Place) int {
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
			continue // there is nothing to keep, and that it was emptied must be seen
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

// shed reports whether more chains are left out than when it was asked last.
func (b *budget) shed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	more := b.more
	b.more = false
	return more
}

// places returns the chains that are left out.
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

// LeftOut returns the guarded chains of which the rules are not kept, by family and table, the
// largest first. It may be called concurrently.
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
	slices.SortFunc(list, func(x, y LeftOut) int {
		return cmp.Or(cmp.Compare(x.Family, y.Family), cmp.Compare(x.Table, y.Table), cmp.Compare(y.Rules, x.Rules), cmp.Compare(x.Chain, y.Chain))
	})
	return list
}
