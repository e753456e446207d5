package nft

import (
	"errors"
	"slices"
)

// This file reads what chains of a mirrored family hold: one chain, or a table at once.

// A Content is what a chain held at one moment. Equal ones are the same rules in every sense: while
// a table stands, only a rule that replaces another one gets a handle that was there before.
type Content struct {
	IDs     []RuleID
	Handles []uint64
	// LeftOut: its rules are too many to be kept, so IDs and Handles are not there.
	LeftOut bool
	weight  Weight
}

// Equal reports whether two contents of one chain are the same.
func (c Content) Equal(o Content) bool {
	return c.LeftOut == o.LeftOut && slices.Equal(c.IDs, o.IDs) && slices.Equal(c.Handles, o.Handles)
}

// rereads is how often a chain is read again at once when a commit interrupts.
const rereads = 3

// reread reads one chain again, the chain itself too if that may have changed.
func (f *FamilyMirror) reread(place Place, itself bool) error {
	t := f.tables[place.Table]
	if t == nil { // a table that came up meanwhile is listed
		delete(f.dirty, place)
		return nil
	}
	if itself || t.chains[place.Chain] == nil {
		raw, ok, err := f.conn.Chain(f.cfg.Family, place.Table, place.Chain)
		if err != nil {
			return err
		}
		if !ok {
			f.drop(t, place)
			return nil
		}
		if t.see(raw) {
			f.cfg.View.Reshaped(place.Table, place.Chain)
		}
	}
	if stays, err := f.recount(t, place); err != nil {
		return err
	} else if stays {
		delete(f.dirty, place)
		return nil
	}
	for range rereads {
		now, err := f.content(place)
		if errors.Is(err, ErrInterrupted) && !now.LeftOut {
			continue
		}
		if err != nil && !now.LeftOut {
			return err
		}
		delete(f.dirty, place)
		f.keep(t, place, now)
		return nil
	}
	return nil
}

// drop notes that a chain does not exist.
func (f *FamilyMirror) drop(t *mirrorTable, place Place) {
	delete(f.dirty, place)
	if c := t.chains[place.Chain]; c != nil {
		f.cfg.Rules.Release(c.IDs, false)
		delete(t.chains, place.Chain)
		f.cfg.View.Reshaped(place.Table, place.Chain)
	}
}

// Asked for one by one, a chain costs as much as ten rules in a dump of its
// table, and so what is to be read of a table is read by one dump if it is much.
const (
	wholeFrom  = 64 // chains to read
	wholeShare = 3  // one of so many
	// wholeMost is how many rules a table may have for that. The kernel looks for its place in the
	// table from the beginning for every 32 KiB. With 95,000 rules in 301 chains a start took 23 s,
	// and 3 s chain by chain (Linux 6.18, a busy machine).
	wholeMost = 64_000
)

// size returns about how many rules the table has, rather too many.
func (t *mirrorTable) size() int {
	n := 0
	for _, c := range t.chains {
		if c.read {
			n += c.weight.Rules
		} else {
			n += int(c.use)
		}
	}
	return n
}

// rereadTables reads the tables of which most chains have to be read.
func (f *FamilyMirror) rereadTables() error {
	unread := map[string]int{}
	for place, itself := range f.dirty {
		if !itself {
			unread[place.Table]++
		}
	}
	for name, n := range unread {
		if t := f.tables[name]; t != nil && n >= wholeFrom && n >= len(t.chains)/wholeShare && t.size() <= wholeMost {
			if err := f.rereadTable(name, t); err != nil {
				return err
			}
		}
	}
	return nil
}

// rereadTable reads what has to be read of a table by one dump. Only chains that
// lie within one piece of it, between rules of other chains, were read as one;
// the first and the last of each piece, and those that have no rules, are left to
// reread. A commit that interrupts the dump changes nothing in this: if it touched
// a chain, a notification will say so.
//
// A dump that shows no rule at all began at the first and skipped none, so every
// chain is empty. That is what `iptables -F` leaves behind, and to ask for each of
// 16,000 chains then took 0.4 s (5,000 services, Linux 6.18).
func (f *FamilyMirror) rereadTable(name string, t *mirrorTable) error {
	var now Content
	place, whole, wanted, empty := Place{Table: name}, false, false, true
	err := f.conn.EachRuleOf(f.cfg.Family, name, func() { place.Chain = "" }, func(m RuleMessage) error {
		empty = false
		if string(m.Chain) != place.Chain {
			if wanted && whole && place.Chain != "" {
				delete(f.dirty, place)
				f.keep(t, place, now)
			}
			now, whole, place.Chain = Content{}, place.Chain != "", string(m.Chain)
			wanted = f.wantsRules(t, place)
		}
		if !wanted || !whole {
			return nil
		}
		return f.gather(&now, m)
	})
	if errors.Is(err, ErrInterrupted) {
		return nil
	}
	if err == nil && empty {
		f.keepEmpty(name, t)
	}
	return err
}

// wantsRules reports whether a chain's rules, and not the chain itself, have to be read.
func (f *FamilyMirror) wantsRules(t *mirrorTable, place Place) bool {
	itself, dirty := f.dirty[place]
	return dirty && !itself && t.chains[place.Chain] != nil
}

// keepEmpty notes that the chains of which the rules have to be read have none.
func (f *FamilyMirror) keepEmpty(name string, t *mirrorTable) {
	for place := range f.dirty {
		if place.Table == name && f.wantsRules(t, place) {
			delete(f.dirty, place)
			f.keep(t, place, Content{})
		}
	}
}

// content reads what a chain holds.
func (f *FamilyMirror) content(place Place) (Content, error) {
	var c Content
	err := f.conn.EachRule(f.cfg.Family, place.Table, place.Chain, func(m RuleMessage) error {
		return f.gather(&c, m)
	})
	return c, err
}

// gather takes one rule into the content of a chain. Of more than can be kept at all it only
// counts.
func (f *FamilyMirror) gather(c *Content, m RuleMessage) error {
	c.weight.Add(m.Rule.size())
	if c.LeftOut {
		return nil
	}
	if !f.fits(c.weight.Units()) {
		f.cfg.Rules.Release(c.IDs, true)
		f.wasted += len(c.IDs)
		c.IDs, c.Handles, c.LeftOut = nil, nil, true
		return nil
	}
	id, err := f.cfg.Rules.Intern(m.Rule)
	c.IDs, c.Handles = append(c.IDs, id), append(c.Handles, m.Handle)
	return err
}

// keep takes over what a chain holds. While a table is read for the first time, what is above the
// limit goes at once: it must not be in memory, not even until all is read.
func (f *FamilyMirror) keep(t *mirrorTable, place Place, now Content) {
	c := t.chains[place.Chain]
	if c.read && c.out == nil {
		f.kept -= c.weight.Units()
	}
	c.weight = now.weight
	same := c.read && c.out == nil && slices.Equal(c.IDs, now.IDs)
	if same {
		now.IDs = c.IDs // a Purge gives new numbers to these
	} else {
		f.cfg.Rules.Release(c.IDs, false)
		f.versions++
		c.IDs, c.read, c.out, c.version = now.IDs, true, nil, f.versions
	}
	c.Handles = now.Handles
	f.cfg.View.Took(place, now, same)
	f.kept += c.weight.Units()
	if most := f.cfg.Budget.Most(); !f.settling && (now.LeftOut || !f.fits(f.kept-most/4)) {
		f.trim()
	}
}
