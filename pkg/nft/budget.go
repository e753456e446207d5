package nft

import (
	"maps"
	"sync"

	"github.com/canaryd/canaryd/internal/sorting"
)

// A Budget chooses the parts whose content is kept, when the content of all parts is too much.
// The parts are the chains of a family, or native tables. Its methods may be called concurrently.
//
// It leaves out the parts that Before puts first, until the others fit. The choice is stable: a
// part that is left out returns only if all kept ones then fill at most three quarters of the
// budget. No part is left out while all kept ones fit. An empty part is never left out.
type Budget[P comparable] struct {
	most   int // in units; 0: no limit
	before func(p, q Weighed[P]) int

	mu   sync.Mutex
	left map[P]Weight
	more bool // parts were left out since the last Shed
}

// A Weighed is a part with its weight.
type Weighed[P comparable] struct {
	Part P
	Weight
}

// NewBudget returns a budget of that many units; 0: no limit. before orders the parts: the first
// is the first to be left out.
func NewBudget[P comparable](most int, before func(p, q Weighed[P]) int) *Budget[P] {
	return &Budget[P]{most: most, before: before, left: map[P]Weight{}}
}

// Clone returns a copy of the budget, for a choice that may be given up.
func (b *Budget[P]) Clone() *Budget[P] {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &Budget[P]{most: b.most, before: b.before, left: maps.Clone(b.left), more: b.more}
}

// Most returns the limit in units; 0: no limit.
func (b *Budget[P]) Most() int { return b.most }

// Fits reports whether so many units can be kept.
func (b *Budget[P]) Fits(units int) bool { return b.most == 0 || units <= b.most }

// FitsAgain reports whether a part may return, if all kept parts would then take so many units.
func (b *Budget[P]) FitsAgain(units int) bool { return b.most == 0 || units <= b.most-b.most/4 }

// Choose decides again by the weights of all parts that exist. It returns the parts that are left
// out, nil if there are none, and the parts that are left out no longer.
func (b *Budget[P]) Choose(all map[P]Weight) (left map[P]Weight, back []P) {
	b.mu.Lock()
	back = b.choose(all)
	b.mu.Unlock()
	return b.Left(), back
}

func (b *Budget[P]) choose(all map[P]Weight) (back []P) {
	order, kept := make([]Weighed[P], 0, len(all)), 0
	for p, w := range all {
		order = append(order, Weighed[P]{p, w})
		if _, left := b.left[p]; !left {
			kept += w.Units()
		}
	}
	if b.Fits(kept) && len(b.left) == 0 {
		return nil
	}
	sorting.Stable(order, b.before)
	was := b.left
	b.left = map[P]Weight{}
	for _, p := range order {
		if p.Units() == 0 {
			continue // nothing to keep, and canaryd must see that it was emptied
		}
		if _, left := was[p.Part]; left {
			b.left[p.Part] = p.Weight
		} else if !b.Fits(kept) {
			b.left[p.Part] = p.Weight
			kept -= p.Units()
		}
	}
	for i := len(order) - 1; i >= 0; i-- { // the dear ones first
		p := order[i]
		_, left := b.left[p.Part]
		_, before := was[p.Part]
		if left && (b.FitsAgain(kept+p.Units()) || !before && b.Fits(kept+p.Units())) {
			delete(b.left, p.Part)
			kept += p.Units()
		}
	}
	for _, p := range order {
		_, before := was[p.Part]
		_, left := b.left[p.Part]
		switch {
		case left && !before:
			b.more = true
		case before && !left:
			back = append(back, p.Part)
		}
	}
	return back
}

// Shed reports whether more parts are left out than at its last call. A reader then drops its
// caches of these parts.
func (b *Budget[P]) Shed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	more := b.more
	b.more = false
	return more
}

// Left returns the parts that are left out, with their weights at the last choice; nil if there
// are none.
func (b *Budget[P]) Left() map[P]Weight {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.left) == 0 {
		return nil
	}
	return maps.Clone(b.left)
}
