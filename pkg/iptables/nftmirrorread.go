package iptables

import (
	"errors"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// This file reads what chains of a mirrored family hold: one chain, or a table
// at once.

// rereads is how often a chain is read again at once when a commit interrupts.
const rereads = 3

// reread reads one chain anew, the chain itself too if that may have changed.
func (f *mirrored) reread(place Place, itself bool) error {
	t := f.tables[place.Table]
	if t == nil { // a table that came up meanwhile is listed
		delete(f.dirty, place)
		return nil
	}
	if itself || t.chains[place.Chain] == nil {
		raw, ok, err := f.conn.Chain(f.family, place.Table, place.Chain)
		if err != nil {
			return err
		}
		if !ok {
			t.drop(place.Chain, f.lexicon)
			delete(f.dirty, place)
			return nil
		}
		t.see(raw)
	}
	if stays, err := f.recount(t, place); err != nil {
		return err
	} else if stays {
		delete(f.dirty, place)
		return nil
	}
	for range rereads {
		content, err := f.content(place)
		if errors.Is(err, nft.ErrInterrupted) && !content.tooMany {
			continue
		}
		if err != nil && !content.tooMany {
			return err
		}
		delete(f.dirty, place)
		f.take(t, place.Chain, content, f.shelf.known(f.family)(place.Table))
		return nil
	}
	return nil
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
			n += c.weight.rules
		} else {
			n += int(c.use)
		}
	}
	return n
}

// rereadTables reads the tables of which most chains have to be read.
func (f *mirrored) rereadTables() error {
	unread := map[rules.TableName]int{}
	for place, itself := range f.dirty {
		if !itself {
			unread[place.Table]++
		}
	}
	for name, n := range unread {
		if t := f.tables[name]; t != nil && n >= wholeFrom && n >= len(t.chains)/wholeShare && t.size() <= wholeMost {
			if err := f.rereadTable(t); err != nil {
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
func (f *mirrored) rereadTable(t *mirrorTable) error {
	earlier := f.shelf.known(f.family)(t.name)
	var now content
	chain, whole, wanted, empty := "", false, false, true
	err := f.conn.EachRuleOf(f.family, t.name, func() { chain = "" }, func(m nft.RuleMessage) error {
		empty = false
		if string(m.Chain) != chain {
			if wanted && whole && chain != "" {
				delete(f.dirty, Place{t.name, chain})
				f.take(t, chain, now, earlier)
			}
			now, whole, chain = content{}, chain != "", string(m.Chain)
			wanted = f.wantsRules(t, chain)
		}
		if !wanted || !whole {
			return nil
		}
		return f.gather(&now, m)
	})
	if errors.Is(err, nft.ErrInterrupted) {
		return nil
	}
	if err == nil && empty {
		f.takeEmpty(t, earlier)
	}
	return err
}

// wantsRules reports whether a chain's rules, and not the chain itself, have to be
// read.
func (f *mirrored) wantsRules(t *mirrorTable, chain string) bool {
	itself, dirty := f.dirty[Place{t.name, chain}]
	return dirty && !itself && t.chains[chain] != nil
}

// takeEmpty notes that the chains of which the rules have to be read have none.
func (f *mirrored) takeEmpty(t *mirrorTable, earlier *rules.Table) {
	for place := range f.dirty {
		if place.Table == t.name && f.wantsRules(t, place.Chain) {
			delete(f.dirty, place)
			f.take(t, place.Chain, content{}, earlier)
		}
	}
}

// A content is what a chain held at one moment. Equal ones are the same rules
// in every sense: a handle is never used again while its table stands.
type content struct {
	ids     []ruleID
	handles []uint64
	weight  weight
	tooMany bool // more than can be kept at all: ids and handles are not there
}

func (f *mirrored) content(place Place) (content, error) {
	var c content
	err := f.conn.EachRule(f.family, place.Table, place.Chain, func(m nft.RuleMessage) error {
		return f.gather(&c, m)
	})
	return c, err
}
