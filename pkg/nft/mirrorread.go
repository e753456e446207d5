package nft

import (
	"errors"
	"slices"
)

// This file reads the contents of a mirrored family's chains: one chain, or a
// table at once.

// A Content is a chain's content at one moment. Equal contents are the same rules
// in every sense. While a table exists, a new rule reuses a handle only if it
// replaces that handle's rule.
type Content struct {
	IDs     []RuleID
	Handles []uint64
	// LeftOut: the rules are too many to be kept, so IDs and Handles are nil.
	LeftOut bool
	weight  Weight
}

// Equal reports whether two contents of one chain are the same.
func (c Content) Equal(o Content) bool {
	return c.LeftOut == o.LeftOut && slices.Equal(c.IDs, o.IDs) && slices.Equal(c.Handles, o.Handles)
}

// rereads limits how often a chain is read again at once when a commit
// interrupts.
const rereads = 3

// reread reads one chain's rules again, and the chain itself too if itself says that it may
// have changed. refresh calls it. If commits interrupt it again and again, the chain stays
// dirty.
func (f *FamilyMirror) reread(place Place, itself bool) error {
	t := f.tables[place.Table]
	if t == nil { // a new table is listed later
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

// drop notes that a chain does not exist, and has the view drop it. reread and show call it.
func (f *FamilyMirror) drop(t *mirrorTable, place Place) {
	delete(f.dirty, place)
	if c := t.chains[place.Chain]; c != nil {
		if c.read && c.out == nil {
			f.kept -= c.weight.Units()
		}
		f.cfg.Rules.Release(c.IDs, false)
		delete(t.chains, place.Chain)
		f.cfg.View.Reshaped(place.Table, place.Chain)
	}
}

// A chain that is read singly costs as much as ten rules in a dump of its table.
// So one dump reads a table if many of its chains have to be read.
const (
	wholeFrom  = 64 // this many chains to read
	wholeShare = 3  // and at least a third of the table's chains
	// wholeMost is the largest number of rules in a table for that. For every 32
	// KiB the kernel searches its place from the table's beginning. With 95,000
	// rules in 301 chains a start took 23 s, and 3 s chain by chain (Linux 6.18,
	// a busy machine).
	wholeMost = 64_000
)

// size estimates the number of the table's rules, rather too high. rereadTables reads a
// table as a whole only up to wholeMost of them.
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

// rereadTables reads the tables that have many chains to read, each by one dump, for
// refresh. The other chains stay dirty, and refresh reads each of them.
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

// rereadTable reads a table's changed chains by one dump. A chain was read as a
// unit only if it is within one piece of the dump, between rules of other chains.
// reread reads the first and the last chain of each piece, and chains without
// rules. A commit may interrupt the dump: if it touched a chain, a notification
// will say so.
//
// A dump without any rule began at the first and skipped none, so every chain is
// empty. `iptables -F` has this effect. Reading each of 16,000 chains then took
// 0.4 s (5,000 services, Linux 6.18).
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

// keepEmpty notes that the table's chains whose rules have to be read are empty. rereadTable
// calls it after a dump without any rule.
func (f *FamilyMirror) keepEmpty(name string, t *mirrorTable) {
	for place := range f.dirty {
		if place.Table == name && f.wantsRules(t, place) {
			delete(f.dirty, place)
			f.keep(t, place, Content{})
		}
	}
}

// content reads a chain's rules for reread. Content.LeftOut: they are over the budget, and
// an error then does not matter.
func (f *FamilyMirror) content(place Place) (Content, error) {
	var c Content
	err := f.conn.EachRule(f.cfg.Family, place.Table, place.Chain, func(m RuleMessage) error {
		return f.gather(&c, m)
	})
	return c, err
}

// gather adds one rule to the content of a chain that content or rereadTable reads. Once the
// rules exceed the budget, gather only counts them. An error means that the rule got no
// number.
func (f *FamilyMirror) gather(c *Content, m RuleMessage) error {
	c.weight.Add(m.Rule.size())
	if c.LeftOut {
		return nil
	}
	if !f.cfg.Budget.Fits(c.weight.Units()) {
		f.cfg.Rules.Release(c.IDs, true)
		f.wasted += len(c.IDs)
		c.IDs, c.Handles, c.LeftOut = nil, nil, true
		return nil
	}
	id, err := f.cfg.Rules.Intern(m.Rule)
	c.IDs, c.Handles = append(c.IDs, id), append(c.Handles, m.Handle)
	return err
}

// keep stores a chain's content and shows it to the view, after a read or by following
// commits. During a table's first read it drops rules above the limit at once, because
// memory must never hold them.
func (f *FamilyMirror) keep(t *mirrorTable, place Place, now Content) {
	c := t.chains[place.Chain]
	if c.read && c.out == nil {
		f.kept -= c.weight.Units()
	}
	c.weight = now.weight
	same := c.read && c.out == nil && slices.Equal(c.IDs, now.IDs)
	if same {
		now.IDs = c.IDs // a Purge renumbers these
	} else {
		f.cfg.Rules.Release(c.IDs, false)
		f.versions++
		c.IDs, c.read, c.out, c.version = now.IDs, true, nil, f.versions
	}
	c.Handles = now.Handles
	f.cfg.View.Took(place, now, same)
	f.kept += c.weight.Units()
	if most := f.cfg.Budget.Most(); !f.settling && (now.LeftOut || !f.cfg.Budget.Fits(f.kept-most/4)) {
		f.trim()
	}
}
