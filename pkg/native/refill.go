package native

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// Refill writes what a standing table has lost into a batch: rules of chains that are empty or
// gone, elements of sets, and whatever those need. What has other contents now stays as it is:
// it is its owner's newer word. Guard the batch by the genid at which now was read.
func (t *Table) Refill(b *nft.Batch, now *Table, o Options) (left []string, err error) {
	if now.Immune() {
		return nil, fmt.Errorf("table %s: %w", t.ID, ErrImmune)
	}
	r := newRefill(b, t, now, o)
	for i := range t.Chains {
		if c := &t.Chains[i]; r.emptied(c) && (c.Base || r.stand[c.Name] != nil) {
			r.need(c.Name)
		}
	}
	for i := range t.Sets {
		if s := &t.Sets[i]; !s.Anonymous() && r.sets[s.Name] != nil && len(r.lost(s)) > 0 {
			r.needSet(s.Name)
		}
	}
	return r.w.leftBy, r.write()
}

// A refill finds what has to be written for what was lost.
type refill struct {
	w      *writer
	stand  map[string]*Chain // the chains that stand now
	sets   map[string]*Set   // the sets that stand now
	chains map[string]bool   // whose rules are to be written
	filled map[string]bool   // sets whose elements are to be written
	// objects are those that stand now.
	objects map[objectKey]bool
}

// An objectKey names an object of a table.
type objectKey struct {
	name string
	kind uint32
}

func newRefill(b *nft.Batch, was, now *Table, o Options) *refill {
	r := &refill{w: newWriter(b, was, o), stand: map[string]*Chain{}, sets: map[string]*Set{},
		chains: map[string]bool{}, filled: map[string]bool{}, objects: map[objectKey]bool{}}
	r.w.late = true
	for i := range now.Chains {
		r.stand[now.Chains[i].Name] = &now.Chains[i]
	}
	for i := range now.Sets {
		r.sets[now.Sets[i].Name] = &now.Sets[i]
	}
	for _, o := range now.Objects {
		r.objects[objectKey{o.Name, o.Type}] = true
	}
	// The kernel gives the lowest number that is free, so it may have given one to another rule.
	r.w.rename = map[string]string{}
	free := 0
	for name := range r.w.sets {
		for to := name; r.sets[to] != nil || to != name && r.w.sets[to] != nil; r.w.rename[name] = to {
			to = fmt.Sprintf("__canaryd%d", free)
			free++
		}
	}
	return r
}

// emptied reports whether a chain has lost its last rule.
func (r *refill) emptied(c *Chain) bool {
	stands := r.stand[c.Name]
	return !c.Bound && len(c.Rules) > 0 && (stands == nil || len(stands.Rules) == 0)
}

// lost returns the elements that a standing set lacks. Of a set of intervals none are added to
// those that stand: an element there is the end of what was added before.
func (r *refill) lost(s *Set) []Element {
	stands := r.sets[s.Name]
	if stands == nil || len(stands.Elements) == 0 {
		return s.Elements
	}
	if s.Flags&setInterval != 0 {
		return nil
	}
	keys := map[string]bool{}
	for _, e := range stands.Elements {
		keys[string(attrOf(e, unix.NFTA_SET_ELEM_KEY))] = true
	}
	var all []Element
	for _, e := range s.Elements {
		if !keys[string(attrOf(e, unix.NFTA_SET_ELEM_KEY))] && !fleeting(s, e) {
			all = append(all, e)
		}
	}
	return all
}

// need takes in a chain's rules, and what they name and the table lacks.
func (r *refill) need(name string) {
	c := r.w.t.Chain(name)
	if c == nil || r.chains[name] || !c.Bound && r.stand[name] != nil && len(r.stand[name].Rules) > 0 {
		return
	}
	r.chains[name] = true
	for _, rule := range c.Rules {
		names(rule.expressions(), r.needSet, r.need)
	}
}

// needSet takes in what a set's elements need, if any of them are to be written.
func (r *refill) needSet(name string) {
	s := r.w.t.Set(name)
	if s == nil || r.filled[name] || !s.Anonymous() && len(r.lost(s)) == 0 && r.sets[name] != nil {
		return
	}
	r.filled[name] = true
	for _, e := range s.Elements {
		if to := jumpOf(attrOf(e, unix.NFTA_SET_ELEM_DATA)); to != "" {
			r.need(to)
		}
	}
}

// write writes it, in the order of writer.contents.
func (r *refill) write() error {
	t := r.w.t
	for i := range t.Chains {
		if c := &t.Chains[i]; r.chains[c.Name] && !c.Bound && r.stand[c.Name] == nil {
			r.w.chain(c)
		}
	}
	for _, o := range t.Objects {
		if !r.objects[objectKey{o.Name, o.Type}] {
			r.w.object(o)
		}
	}
	for i := range t.Sets {
		s := &t.Sets[i]
		switch {
		case s.Anonymous() || !r.filled[s.Name]:
		case r.sets[s.Name] == nil:
			if err := r.w.set(s); err != nil {
				return err
			}
		default:
			r.w.elements(r.lost(s), func() { r.w.b.Text(unix.NFTA_SET_ELEM_LIST_SET, s.Name) })
		}
	}
	for i := range t.Chains {
		if c := &t.Chains[i]; r.chains[c.Name] && !c.Bound {
			if err := r.w.rules(c); err != nil {
				return err
			}
		}
	}
	return nil
}
