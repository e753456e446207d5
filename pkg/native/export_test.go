package native

import (
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// AfterCapture runs f between a read and the notifications of later commits.
func (k *Kernel) AfterCapture(f func()) { k.afterCapture = f }

// Misremember drops the last element of a followed set.
func (k *Kernel) Misremember(id tableid.TableID, set string) {
	f := k.follow.tables[id]
	s := f.sets.byKey[set]
	s.Elements = s.Elements[:len(s.Elements)-1]
	s.recount, s.known, f.last = true, false, nil
	for _, c := range f.chains.list {
		c.known = false // the set may be part of a rule
	}
}

// Bare returns the table without handles, remaining timeouts and use counts. Its bytes can be
// compared with the bytes of the table made again.
func (t *Table) Bare() *Table {
	bare := *t
	bare.Handle = 0
	bare.Chains, bare.Sets, bare.Objects, bare.Flowtables = nil, nil, nil, nil
	for _, c := range t.Chains {
		c.Handle = 0
		rules := c.Rules
		c.Rules = nil
		for _, r := range rules {
			c.Rules = append(c.Rules, Rule{Attrs: r.Attrs})
		}
		bare.Chains = append(bare.Chains, c)
	}
	for _, s := range t.Sets {
		s.Handle = 0
		elements := s.Elements
		s.Elements = nil
		for _, e := range elements {
			s.Elements = append(s.Elements, without(e, unix.NFTA_SET_ELEM_EXPIRATION))
		}
		bare.Sets = append(bare.Sets, s)
	}
	for _, o := range t.Objects {
		bare.Objects = append(bare.Objects, Object{Name: o.Name, Type: o.Type, Attrs: o.Attrs})
	}
	for _, f := range t.Flowtables {
		bare.Flowtables = append(bare.Flowtables, Flowtable{Name: f.Name, Attrs: f.Attrs})
	}
	return &bare
}

// Timeless returns the table without remaining timeouts.
func (t *Table) Timeless() *Table {
	same := *t
	same.Sets = nil
	for _, s := range t.Sets {
		elements := s.Elements
		s.Elements = nil
		for _, e := range elements {
			s.Elements = append(s.Elements, without(e, unix.NFTA_SET_ELEM_EXPIRATION))
		}
		same.Sets = append(same.Sets, s)
	}
	return &same
}

// Followed reports whether a table was followed and not read.
func (r *Ruleset) Followed(id tableid.TableID) bool { return r.followed(id) }

// IsEnd reports whether the element is the end of an interval.
func (e Element) IsEnd() bool { return isEnd(e) }

// Weight returns the weight of the table's parts, for comparison with FollowedWeight.
func (t *Table) Weight() nft.Weight { return t.weight() }

// FollowedWeight returns the weight of a followed table, as the notifications have changed it.
func (k *Kernel) FollowedWeight(id tableid.TableID) nft.Weight { return k.follow.tables[id].weight }
