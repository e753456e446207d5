package native

import (
	"cmp"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file leaves tables out while all tables together are larger than the limit.

const (
	// objectBytes is the memory of a chain, set, object or flowtable besides its attributes. A
	// table of many empty chains is too large, too.
	objectBytes = 256
	// elementBytes is the memory of an element besides its own bytes. At the peak of a read each of
	// 200,000 addresses takes 135 bytes (Linux 6.18, amd64), so seven weigh as much as a rule.
	elementBytes = 96
)

// A budget chooses the tables whose content is kept. It leaves out the largest first.
type budget struct {
	*nft.Budget[tableid.TableID]
	weights map[tableid.TableID]nft.Weight // of the existing tables, at their last reads
}

// newBudget returns a budget of that many units; 0: no limit.
func newBudget(most int) budget {
	return budget{nft.NewBudget(most, func(p, q nft.Weighed[tableid.TableID]) int {
		return cmp.Or(cmp.Compare(q.Units(), p.Units()), p.Part.Compare(q.Part))
	}), map[tableid.TableID]nft.Weight{}}
}

// mostOf returns the weight at which the read of a table is broken off; 0: it is read whole. A
// read of a table that is left out ends at the largest weight with which the table may return.
func (b budget) mostOf(id tableid.TableID) int {
	most, left := b.Most(), b.Left()
	if _, is := left[id]; !is || most == 0 {
		return most
	}
	room := most - most/4
	for other, w := range b.weights {
		if _, is := left[other]; !is {
			room -= w.Units()
		}
	}
	return max(room, 1)
}

// take notes the weight of a table, and returns the tables that are left out now. A drill's
// table weighs nothing: it must not cost another table its place.
func (b budget) take(id tableid.TableID, w nft.Weight) map[tableid.TableID]nft.Weight {
	if b.weights[id] = w; IsDrill(id) {
		b.weights[id] = nft.Weight{}
	}
	left, _ := b.Choose(b.weights)
	return left
}

// A scale adds up the weight of a table while it is read.
type scale struct {
	nft.Weight
	most int // 0: no limit
}

// add adds a part of the table. nft.ErrEnough means that the table is too large, and breaks off
// the dump.
func (s *scale) add(w nft.Weight) error {
	s.Rules, s.Bytes = s.Rules+w.Rules, s.Bytes+w.Bytes
	if s.most > 0 && s.Units() > s.most {
		return nft.ErrEnough
	}
	return nil
}

// weight returns the weight of all parts of the table.
func (t *Table) weight() nft.Weight {
	var s scale
	for i := range t.Chains {
		_ = s.add(t.Chains[i].weight()) // without a limit
	}
	for i := range t.Sets {
		_ = s.add(t.Sets[i].weight())
	}
	for _, o := range t.Objects {
		_ = s.add(weightOf(o.Attrs))
	}
	for _, f := range t.Flowtables {
		_ = s.add(weightOf(f.Attrs))
	}
	return s.Weight
}

// weightOf returns the weight of an object with these attributes, without its rules or elements.
func weightOf(attrs []byte) nft.Weight { return nft.Weight{Bytes: objectBytes + len(attrs)} }

func (c *Chain) weight() nft.Weight {
	w := weightOf(c.Attrs)
	for _, r := range c.Rules {
		w.Add(len(r.Attrs))
	}
	return w
}

func (s *Set) weight() nft.Weight {
	w := weightOf(s.Attrs)
	for _, e := range s.Elements {
		w.Bytes += elementBytes + len(e)
	}
	return w
}

// weigh replaces the weight of a part of the table by the present one.
func (f *followed) weigh(part *nft.Weight, now nft.Weight) {
	f.weight.Rules += now.Rules - part.Rules
	f.weight.Bytes += now.Bytes - part.Bytes
	*part = now
}

// weighAttrs is weigh after only the attributes of a part have changed.
func (f *followed) weighAttrs(part *nft.Weight, was, now []byte) {
	f.weigh(part, nft.Weight{Rules: part.Rules, Bytes: part.Bytes + len(now) - len(was)})
}

// fits reports whether the followed tables fit into the limit.
func (f *follower) fits() bool {
	units := 0
	for id, t := range f.tables {
		if !IsDrill(id) {
			units += t.weight.Units()
		}
	}
	return f.most == 0 || units <= f.most
}
