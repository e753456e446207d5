package nft

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// This file leaves chains out of a mirrored family while their rules are too many.

// bytesPerRule is how long a rule is on the average, as the kernel holds it, before it counts for
// more than one. Those of 5,000 services have 430 bytes on nft and on legacy, those of IPv6 up to
// 680.
const bytesPerRule = 768

// A Weight is what a chain takes of a budget.
type Weight struct{ Rules, Bytes int }

// Add adds one rule of so many bytes.
func (w *Weight) Add(bytes int) { w.Rules, w.Bytes = w.Rules+1, w.Bytes+bytes }

func (w *Weight) remove(bytes int) { w.Rules, w.Bytes = w.Rules-1, w.Bytes-bytes }

// Units is the weight in rules of usual length.
func (w Weight) Units() int { return max(w.Rules, w.Bytes/bytesPerRule) }

// size is what a rule adds to a Weight.
func (r Rule) size() int { return len(r.Expressions) + len(r.Userdata) }

// A MirrorBudget says of which chains a Mirror keeps the rules.
type MirrorBudget interface {
	// Most is how many units the rules of one family may weigh; 0: no limit.
	Most() int
	// Choose returns the chains of which the rules are not kept, given what all chains weigh that
	// exist, and those of which the rules fit again.
	Choose(all map[Place]Weight) (left map[Place]bool, back []Place)
}

// unlimited is the budget of a mirror without one.
type unlimited struct{}

func (unlimited) Most() int                                         { return 0 }
func (unlimited) Choose(map[Place]Weight) (map[Place]bool, []Place) { return nil, nil }

// room is what a FamilyMirror knows of its budget.
type room struct {
	kept   int  // units of all chains of which the rules are kept, as of the last trim
	wasted int  // rules in the rulebook that were left out, and that no chain has any more
	left   bool // chains are left out
}

// fits reports whether so many units can be kept.
func (f *FamilyMirror) fits(units int) bool {
	most := f.cfg.Budget.Most()
	return most == 0 || units <= most
}

// fitsAgain reports whether a chain may come back, if all would take so many units then.
func (f *FamilyMirror) fitsAgain(units int) bool {
	most := f.cfg.Budget.Most()
	return most == 0 || units <= most-most/4
}

// An outOf is what is known of a chain that is left out.
type outOf struct {
	counted time.Time // when its rules were last counted
	took    time.Duration
	was     int  // how many there were then
	touched bool // notifications came since
}

// countEvery is how often, at most, the rules of a chain that is left out are counted while it
// changes, and countShare the share of the time that this may take. The kernel looks for its place
// in a chain from the beginning for every 32 KiB: 240,000 rules take seconds.
const (
	countEvery = time.Minute
	countShare = 50
)

func (o *outOf) due(now time.Time) bool {
	return now.Sub(o.counted) >= max(countEvery, countShare*o.took)
}

// trim leaves chains out until the rest fits, and has those read again that fit by now.
func (f *FamilyMirror) trim() {
	outs := 0
	f.kept = 0
	for _, t := range f.tables {
		for _, c := range t.chains {
			if c.out != nil {
				outs++
			} else if c.read {
				f.kept += c.weight.Units()
			}
		}
	}
	if f.fits(f.kept) && outs == 0 && !f.left {
		return
	}
	all := map[Place]Weight{}
	for name, t := range f.tables {
		for chain, c := range t.chains {
			if c.read {
				all[Place{name, chain}] = c.weight
			}
		}
	}
	left, back := f.cfg.Budget.Choose(all)
	f.left = len(left) > 0
	for p := range left {
		f.leaveOut(p)
	}
	for _, p := range back {
		if c := f.Chain(p); c.out != nil {
			c.read = false
			f.Reread(p)
		}
	}
	if f.wasted > f.cfg.Budget.Most()/4 || f.wasted > 0 && !f.Dirty() {
		f.cfg.Rules.Purge(f.held())
		f.wasted = 0
	}
}

// leaveOut lets go of a chain's rules.
func (f *FamilyMirror) leaveOut(p Place) {
	c := f.Chain(p)
	if c.out != nil {
		return
	}
	f.kept -= c.weight.Units()
	f.wasted += len(c.IDs)
	f.cfg.Rules.Release(c.IDs, true)
	c.IDs, c.Handles = nil, nil
	c.out = &outOf{counted: time.Now(), was: c.weight.Rules}
	f.cfg.View.Took(p, Content{LeftOut: true, weight: c.weight}, false)
}

// recount counts the rules of a chain that is left out, and reports whether it stays so. To read
// them in vain would cost their memory.
func (f *FamilyMirror) recount(t *mirrorTable, place Place) (stays bool, err error) {
	c := t.chains[place.Chain]
	if c == nil || c.out == nil {
		return false, nil
	}
	var now Weight
	start := time.Now()
	err = f.conn.EachRule(f.cfg.Family, place.Table, place.Chain, func(m RuleMessage) error {
		now.Add(m.Rule.size())
		return nil
	})
	if errors.Is(err, ErrInterrupted) {
		err = nil // next to a writer that never rests there is no better count
	}
	if err != nil || now.Rules == 0 || f.fitsAgain(f.kept+now.Units()) {
		return false, err
	}
	c.weight, *c.out = now, outOf{counted: time.Now(), was: now.Rules, took: time.Since(start)}
	return true, nil
}

// wantsCount reports whether a chain that is left out is to be read, because of a notification of a
// rule of it: when it lost half, when it may fit, or from time to time.
func (f *FamilyMirror) wantsCount(c *MirrorChain, kind uint16) bool {
	if c.out.touched = true; kind == unix.NFT_MSG_NEWRULE {
		c.weight.Rules++
	} else {
		c.weight.Rules = max(0, c.weight.Rules-1)
	}
	return 2*c.weight.Rules < c.out.was || c.weight.Rules < c.out.was && f.fitsAgain(f.kept+c.weight.Units()) ||
		c.out.due(time.Now())
}

// countAgain has those chains read that are left out and changed a while ago.
func (f *FamilyMirror) countAgain(now time.Time) {
	if !f.left {
		return
	}
	for name, t := range f.tables {
		for chain, c := range t.chains {
			if c.out != nil && c.out.touched && c.out.due(now) {
				f.Reread(Place{name, chain})
			}
		}
	}
}
