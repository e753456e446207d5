package nft

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// This file leaves chains out of a mirrored family while their rules are too many.

// bytesPerRule is the average length of a chain's rules, as the kernel holds them,
// up to which each counts as one. The rules of 5,000 services have 430 bytes on
// nft and on legacy, and up to 680 for IPv6.
const bytesPerRule = 768

// A Weight is a chain's share of a budget.
type Weight struct{ Rules, Bytes int }

// Add adds one rule of that many bytes.
func (w *Weight) Add(bytes int) { w.Rules, w.Bytes = w.Rules+1, w.Bytes+bytes }

func (w *Weight) remove(bytes int) { w.Rules, w.Bytes = w.Rules-1, w.Bytes-bytes }

// Units returns the weight in rules of usual length.
func (w Weight) Units() int { return max(w.Rules, w.Bytes/bytesPerRule) }

// size returns the bytes that a rule adds to a Weight.
func (r Rule) size() int { return len(r.Expressions) + len(r.Userdata) }

// room is a FamilyMirror's use of its budget.
type room struct {
	kept   int  // units of all chains whose rules are kept, as of the last trim
	wasted int  // rules in the rulebook that were left out, and belong to no chain
	left   bool // whether chains are left out
}

// An outOf describes a chain that is left out.
type outOf struct {
	counted time.Time // when its rules were last counted
	took    time.Duration
	was     int  // the number of rules then
	touched bool // notifications arrived since
}

// CountAgainAfter returns the wait after a count that took so long. Then a chain or native table
// that is left out and changes is counted again. Counts take at most 2 % of the time. For every 32
// KiB the kernel searches its place from the chain's beginning: 240,000 rules take seconds.
func CountAgainAfter(took time.Duration) time.Duration { return max(time.Minute, 49*took) }

func (o *outOf) due(now time.Time) bool {
	return now.Sub(o.counted) >= CountAgainAfter(o.took)
}

// trim leaves chains out until the others fit, and has chains read again that fit by now.
// refresh, settle and keep call it. At its end it may purge the rules that no chain holds.
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
	if f.cfg.Budget.Fits(f.kept) && outs == 0 && !f.left {
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

// leaveOut drops the rules of a chain that the budget did not choose, and has the view show
// it as left out. trim calls it.
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

// recount counts the rules of a chain that is left out, and reports whether it stays out. If
// not, reread reads it. It only counts, because a full read would waste memory.
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
		err = nil // while a writer never rests there is no better count
	}
	if err != nil || now.Rules == 0 || f.cfg.Budget.FitsAgain(f.kept+now.Units()) {
		return false, err
	}
	c.weight, *c.out = now, outOf{counted: time.Now(), was: now.Rules, took: time.Since(start)}
	return true, nil
}

// wantsCount reports whether touched must have a chain read that is left out, because of a
// rule's notification (kind). It must after the chain lost half, when it may fit, or from
// time to time.
func (f *FamilyMirror) wantsCount(c *MirrorChain, kind uint16) bool {
	if c.out.touched = true; kind == unix.NFT_MSG_NEWRULE {
		c.weight.Rules++
	} else {
		c.weight.Rules = max(0, c.weight.Rules-1)
	}
	return 2*c.weight.Rules < c.out.was || c.weight.Rules < c.out.was && f.cfg.Budget.FitsAgain(f.kept+c.weight.Units()) ||
		c.out.due(time.Now())
}

// countAgain marks for a read the chains that are left out, changed since, and were not
// counted for a while. Mirror.Read calls it first.
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
