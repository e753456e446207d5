package baseline

import (
	"slices"

	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
)

// With returns a baseline with the present content of a native table in place of its part.
func With(b reload.Baseline, t *native.Table) reload.Baseline {
	b.Native = append(slices.DeleteFunc(slices.Clone(b.Native), func(o reload.ConfirmedTable) bool { return o.Family.Table(o.Table) == t.ID }), confirm(t))
	return b
}

// confirm returns a native table in the form in which a baseline keeps it.
func confirm(t *native.Table) reload.ConfirmedTable {
	c := reload.ConfirmedTable{Family: t.ID.Family, Table: t.ID.Name}
	for e := range native.NewListing(t).All() {
		p := reload.ConfirmedPart{Kind: e.Kind, Name: e.Name}
		for i := range e.Len() {
			d := e.Digest(i)
			p.Digests = append(p.Digests, d[:reload.BaselineDigest]...)
		}
		c.Parts = append(c.Parts, p)
	}
	return c
}

// of returns the confirmed part that an entry of a native table belongs to; nil if there is none.
func (b *Base) of(t *native.Table, e native.Entry) *confirmed {
	return b.tables[table{t.ID, true}][part{e.Kind, e.Name}]
}

// LacksLost counts the lost rules of a native table that the Base lacks. Without a Base there are
// none.
func (b *Base) LacksLost(l flushes.LostTable) (n int) {
	b.eachLacking(l, func(_ string, rules int) { n += rules })
	return n
}

// eachLacking calls do for each chain of a lost native table, with the number of lost rules that
// the Base lacks. A table that it lacks as a whole is one such chain, without a name.
func (b *Base) eachLacking(l flushes.LostTable, do func(chain string, rules int)) {
	if b == nil {
		return
	}
	left := map[string]native.Entry{}
	if l.Now != nil {
		for e := range native.NewListing(l.Now).All() {
			if e.Kind == "" {
				left[e.Name] = e
			}
		}
	}
	whole, known := 0, b.tables[table{l.Want.ID, true}] != nil
	for e := range native.NewListing(l.Want).All() {
		if e.Kind != "" {
			continue
		}
		lost := b.lost(entry{e}, left[e.Name])
		if d := b.differs(b.of(l.Want, e), entry{e}, false); d != nil && known {
			lost = slices.DeleteFunc(lost, func(i int) bool { _, lacks := slices.BinarySearch(d.appeared, i); return !lacks })
			do(e.Name, len(lost))
		} else if !known {
			whole += len(lost)
		}
	}
	do("", whole)
}

// lost returns the places of a chain's rules that are not left. The zero Entry has none.
func (b *Base) lost(was entry, left native.Entry) []int {
	var prints []print
	if left.Name != "" {
		if is := (entry{left}); is.len() > 0 && is.memory() == was.memory() {
			return nil
		}
		for i := range left.Len() {
			d := entry{left}.text(b.seed, i)
			prints = append(prints, print{d, d})
		}
	}
	if d := b.compare(prints, was); d != nil {
		return d.appeared
	}
	return nil
}

// Apart splits lines of a native table into those that the Base lacks, and the others. It counts
// the rules among the former. Without a Base none are lacking.
func (b *Base) Apart(t *native.Table, lines []native.Line) (lacking, others []native.Line, rules int) {
	if b == nil {
		return nil, lines, 0
	}
	texts := map[string]int{}
	for e := range native.NewListing(t).All() {
		if d := b.differs(b.of(t, e), entry{e}, false); d != nil {
			for _, i := range d.appeared {
				texts[e.Text(i)]++
			}
		}
	}
	for _, l := range lines {
		if texts[l.Text]--; texts[l.Text] < 0 || l.Kind == nft.Elements {
			others = append(others, l)
			continue
		}
		if lacking = append(lacking, l); l.Kind == nft.Rules {
			rules++
		}
	}
	return lacking, others, rules
}
