package baseline

import (
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
)

// Confirm returns the digests of a native table's parts, as a baseline keeps them.
func Confirm(t *native.Table) map[string][]byte {
	parts := map[string][]byte{}
	native.NewListing(t).Each(func(e *native.Entry) { parts[e.Key()] = digests(e) })
	return parts
}

// digests returns the digests of an entry, one after the other; not nil.
func digests(e *native.Entry) []byte {
	all := []byte{}
	for i := range e.Len() {
		d := e.Digest(i)
		all = append(all, d[:reload.BaselineDigest]...)
	}
	return all
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
	// left has the digests of the chains that have changed.
	left := map[string][]byte{}
	if l.Now != nil {
		for _, c := range native.Diff(l.Want, l.Now) {
			if c.Kind == nft.Chains && c.Lost > 0 {
				left[c.Name] = nil
			}
		}
		native.NewListing(l.Now).Each(func(e *native.Entry) {
			if _, changed := left[e.Name]; changed && e.Kind == "" {
				left[e.Name] = digests(e)
			}
		})
	}
	parts, known := b.tables[l.Want.ID.NFT()]
	whole := 0
	native.NewListing(l.Want).Each(func(e *native.Entry) {
		still, changed := left[e.Name]
		if e.Kind != "" || l.Now != nil && !changed {
			return
		}
		lost := list{entry: e}
		if len(still) > 0 {
			d := b.compare(b.prints(still), &lost)
			if lost.at = []int{}; d != nil {
				lost.at = append(lost.at, d.appeared...)
			}
		}
		if known {
			do(e.Name, b.differs(parts[e.Key()], &lost, false).lacking())
		} else {
			whole += lost.len()
		}
	})
	do("", whole)
}

// Apart splits lines of a native table into those that the Base lacks, and the others. It counts
// the rules among the former. Without a Base none are lacking.
func (b *Base) Apart(t *native.Table, lines []native.Line) (lacking, others []native.Line, rules int) {
	if b == nil {
		return nil, lines, 0
	}
	texts, parts := map[string]int{}, b.tables[t.ID.NFT()]
	native.NewListing(t).Each(func(e *native.Entry) {
		if d := b.differs(parts[e.Key()], &list{entry: e}, false); d != nil {
			for _, i := range d.appeared {
				texts[e.Text(i)]++
			}
		}
	})
	for _, l := range lines {
		if texts[l.Text]--; texts[l.Text] < 0 {
			others = append(others, l)
			continue
		}
		if lacking = append(lacking, l); l.Kind == nft.Rules {
			rules++
		}
	}
	return lacking, others, rules
}
