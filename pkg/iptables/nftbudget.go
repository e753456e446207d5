package iptables

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// This file leaves chains out of a mirrored family while their rules are too many.

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

// gather takes one rule into the content of a chain. Of more than can be kept at all it only counts.
func (f *mirrored) gather(c *content, m nft.RuleMessage) error {
	c.weight.add(len(m.Rule.Expressions) + len(m.Rule.Userdata))
	if c.tooMany {
		return nil
	}
	if !f.budget.alone(c.weight) {
		f.lexicon.giveUp(c.ids)
		f.wasted += len(c.ids)
		c.ids, c.handles, c.tooMany = nil, nil, true
		return nil
	}
	id, err := f.lexicon.intern(m.Rule)
	c.ids, c.handles = append(c.ids, id), append(c.handles, m.Handle)
	return err
}

// take takes over what a chain holds. While a table is read for the first time, what is above the
// limit goes at once: it must not be in memory, not even until all is read.
func (f *mirrored) take(t *mirrorTable, chain string, now content, earlier *rules.Table) {
	c := t.chains[chain]
	if c.read && c.out == nil {
		f.kept -= c.weight.units()
	}
	t.take(chain, now, f.lexicon, earlier)
	f.kept += c.weight.units()
	if now.tooMany || !f.budget.fits(f.kept-f.budget.most/4) {
		f.trim()
	}
}

// trim leaves chains out until the rest fits, and has those read again that fit by now.
func (f *mirrored) trim() {
	outs := 0
	f.kept = 0
	for _, t := range f.tables {
		for _, c := range t.chains {
			if c.out != nil {
				outs++
			} else if c.read {
				f.kept += c.weight.units()
			}
		}
	}
	if f.budget.fits(f.kept) && outs == 0 && !f.budget.any() {
		return
	}
	all := map[Place]weight{}
	for name, t := range f.tables {
		for chain, c := range t.chains {
			if c.read {
				all[Place{name, chain}] = c.weight
			}
		}
	}
	out, back := f.budget.choose(all)
	for p := range f.budget.places() {
		f.leaveOut(p)
	}
	for _, p := range back {
		c := f.tables[p.Table].chains[p.Chain]
		if c.out == nil {
			continue
		}
		c.read = false
		if _, dirty := f.dirty[p]; !dirty {
			f.dirty[p] = false
		}
	}
	if f.wasted > f.budget.most/4 || f.wasted > 0 && len(f.dirty) == 0 {
		f.lexicon.purge(f.held())
		f.wasted = 0
	}
	if len(out) > 0 {
		f.shelf.drop(f.family)
	}
}

// leaveOut lets go of a chain's rules.
func (f *mirrored) leaveOut(p Place) {
	t := f.tables[p.Table]
	c := t.chains[p.Chain]
	if c.out != nil {
		return
	}
	f.kept -= c.weight.units()
	f.wasted += len(c.ids)
	f.lexicon.giveUp(c.ids)
	c.ids, c.fickle, c.rules = nil, false, rules.LeftOut(p.Chain)
	c.out = &outOf{counted: time.Now(), was: c.weight.rules}
	delete(t.untold, p.Chain)
	delete(t.doubted, p.Chain)
	t.view.touch(p.Chain)
}

// recount counts the rules of a chain that is left out, and reports whether it stays so. To read
// them in vain would cost their memory.
func (f *mirrored) recount(t *mirrorTable, place Place) (stays bool, err error) {
	c := t.chains[place.Chain]
	if c == nil || c.out == nil {
		return false, nil
	}
	var now weight
	start := time.Now()
	err = f.conn.EachRule(f.family, place.Table, place.Chain, func(m nft.RuleMessage) error {
		now.add(len(m.Rule.Expressions) + len(m.Rule.Userdata))
		return nil
	})
	if errors.Is(err, nft.ErrInterrupted) {
		err = nil // next to a writer that never rests there is no better count
	}
	if err != nil || now.rules == 0 || f.budget.fitsAgain(f.kept+now.units()) {
		return false, err
	}
	c.weight, *c.out = now, outOf{counted: time.Now(), was: now.rules, took: time.Since(start)}
	return true, nil
}

// wantsCount reports whether a chain that is left out is to be read, because of a notification of a
// rule of it: when it lost half, when it may fit, or from time to time.
func (f *mirrored) wantsCount(c *mirrorChain, kind uint16, now time.Time) bool {
	if c.out.touched = true; kind == unix.NFT_MSG_NEWRULE {
		c.weight.rules++
	} else {
		c.weight.rules = max(0, c.weight.rules-1)
	}
	return 2*c.weight.rules < c.out.was || c.weight.rules < c.out.was && f.budget.fitsAgain(f.kept+c.weight.units()) ||
		c.out.due(now)
}

// countAgain has those chains read that are left out and changed a while ago.
func (f *mirrored) countAgain(now time.Time) {
	if !f.budget.any() {
		return
	}
	for name, t := range f.tables {
		for chain, c := range t.chains {
			if c.out != nil && c.out.touched && c.out.due(now) {
				if p := (Place{name, chain}); !f.dirty[p] {
					f.dirty[p] = false
				}
			}
		}
	}
}

// held returns all that chains have of the lexicon.
func (f *mirrored) held() []*[]ruleID {
	var held []*[]ruleID
	for _, t := range f.tables {
		for _, c := range t.chains {
			held = append(held, &c.ids)
		}
	}
	return held
}
