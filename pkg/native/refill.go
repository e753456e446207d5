package native

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// Refill writes the lost parts of an existing table into a batch. These are the rules of chains
// that are empty or gone, the elements of empty sets, and all parts that they need. A part that has
// other content now is its owner's newer word, and stays. An emptied chain to which nothing leads
// stays too, unless the table has no rule at all. An owner empties a chain before it deletes it.
// Guard the batch by the genid at which now was read, and after an error cut it back.
func (t *Table) Refill(b *nft.Batch, now *Table, o Options) (left []string, err error) {
	return t.refill(b, now, o, false)
}

// Merge is Refill that also writes the missing elements of a set that has half of them at most. The
// present elements stay.
func (t *Table) Merge(b *nft.Batch, now *Table, o Options) (left []string, err error) {
	return t.refill(b, now, o, true)
}

// refill is Refill or, with merge, Merge. left are the devices that it left out. ErrImmune: one
// process owns the present table, so nothing can be written.
func (t *Table) refill(b *nft.Batch, now *Table, o Options, merge bool) (left []string, err error) {
	if now.Immune() {
		return nil, fmt.Errorf("table %s: %w", t.ID, ErrImmune)
	}
	r := prepareRefill(b, t, now, o, merge)
	err = r.write()
	return r.w.leftBy, err
}

// prepareRefill finds the parts that must be written, and writes nothing. Repair.writes only
// reads its answer: a part that is not written is in force. merge is as for refill.
func prepareRefill(b *nft.Batch, t, now *Table, o Options, merge bool) *refill {
	r := newRefill(b, t, now, o)
	led := map[string]bool{}
	for name := range now.jumps() {
		led[name] = true
	}
	ruleless := !slices.ContainsFunc(now.Chains, func(c Chain) bool { return len(c.Rules) > 0 })
	for i := range t.Chains {
		c := &t.Chains[i]
		if r.emptied(c) && (c.Base || r.stand[c.Name] != nil && (ruleless || led[c.Name])) {
			r.need(c.Name)
		}
	}
	for i := range t.Sets {
		s := &t.Sets[i]
		if !s.Anonymous() && r.sets[s.Name] != nil {
			r.needSet(s.Name)
		}
		if merge && s.merges(r.sets[s.Name]) {
			r.merged[s.Name] = true
			r.needTargets(s.lacking(r.sets[s.Name]))
		}
	}
	return r
}

// writes reports whether a part of the table is written; the others are in force. A refused
// part of them cannot be left out. Flowtables are never written.
func (r *refill) writes(s Spot) bool {
	t := r.w.t
	switch s.Kind {
	case nft.Chains:
		return r.chains[t.Chains[s.At].Name] && r.stand[t.Chains[s.At].Name] == nil
	case nft.Rules:
		return r.chains[t.Chains[s.At].Name]
	case nft.Sets:
		return r.filled[t.Sets[s.At].Name] && r.sets[t.Sets[s.At].Name] == nil
	case nft.Elements:
		set := &t.Sets[s.At]
		return r.filled[set.Name] || r.merged[set.Name] && len((&Set{Elements: set.Elements[s.In : s.In+1]}).lacking(r.sets[set.Name])) > 0
	case nft.Objects:
		return !r.objects[objectKey{t.Objects[s.At].Name, t.Objects[s.At].Type}]
	}
	return false
}

// A refill finds the parts to write after a loss.
type refill struct {
	w         *writer
	stand     map[string]*Chain // the present chains
	sets      map[string]*Set   // the present sets
	wasChains map[string]*Chain
	wasSets   map[string]*Set
	chains    map[string]bool // chains whose rules are to be written
	filled    map[string]bool // sets whose elements are to be written
	merged    map[string]bool // sets whose missing elements are to be written
	// objects are the present objects.
	objects map[objectKey]bool
}

// An objectKey names an object of a table.
type objectKey struct {
	name string
	kind uint32
}

// newRefill returns a refill without any part to write; prepareRefill chooses the parts. was is
// the table that ought to be in force, now the table in the kernel. It renames anonymous sets
// whose names other sets have now.
func newRefill(b *nft.Batch, was, now *Table, o Options) *refill {
	r := &refill{w: newWriter(b, was, o), stand: now.chainsByName(), sets: now.setsByName(),
		wasChains: was.chainsByName(), wasSets: was.setsByName(),
		chains: map[string]bool{}, filled: map[string]bool{}, merged: map[string]bool{}, objects: map[objectKey]bool{}}
	r.w.late = true
	for _, o := range now.Objects {
		r.objects[objectKey{o.Name, o.Type}] = true
	}
	// The kernel uses the lowest free number in a name, so another rule's set may have this name
	// now.
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

// emptied reports whether a chain has lost its last rule, or is gone. prepareRefill fills such
// a chain if it is a base chain, or if something still leads to it.
func (r *refill) emptied(c *Chain) bool {
	stands := r.stand[c.Name]
	return !c.Bound && len(c.Rules) > 0 && (stands == nil || len(stands.Rules) == 0)
}

// lacking reports whether a set's elements must be written: it is gone, or has none.
func (r *refill) lacking(s *Set) bool {
	stands := r.sets[s.Name]
	return stands == nil || len(stands.Elements) == 0 && len(s.Elements) > 0
}

// need adds a chain's rules, and the parts that they name and the table lacks. A chain that has
// rules is its owner's newer word, and stays as it is.
func (r *refill) need(name string) {
	c := r.wasChains[name]
	if c == nil || r.chains[name] || !c.Bound && r.stand[name] != nil && len(r.stand[name].Rules) > 0 {
		return
	}
	r.chains[name] = true
	for _, rule := range c.Rules {
		names(rule.expressions(), r.needSet, r.need)
	}
}

// needSet adds a set's elements and their targets, if they must be written. Such a set belongs
// to a rule that is written, is gone, or is empty.
func (r *refill) needSet(name string) {
	s := r.wasSets[name]
	if s == nil || r.filled[name] || !s.Anonymous() && !r.lacking(s) {
		return
	}
	r.filled[name] = true
	r.needTargets(s.Elements)
}

// needTargets adds the chains to which elements lead, because the kernel refuses an element
// whose chain does not exist.
func (r *refill) needTargets(elements []Element) {
	for _, e := range elements {
		if to := jumpOf(attrOf(e, unix.NFTA_SET_ELEM_DATA)); to != "" {
			r.need(to)
		}
	}
}

// write writes the parts that prepareRefill has found, in the order of writer.contents. An
// error leaves a part of them in the batch, which the caller cuts back.
func (r *refill) write() error {
	t := r.w.t
	for i := range t.Chains {
		if c := &t.Chains[i]; r.chains[c.Name] && !c.Bound && r.stand[c.Name] == nil {
			r.w.chain(c)
		}
	}
	for i := range t.Objects {
		if o := &t.Objects[i]; !r.objects[objectKey{o.Name, o.Type}] {
			r.w.object(o)
		}
	}
	for i := range t.Sets {
		s := &t.Sets[i]
		switch {
		case r.merged[s.Name]:
			r.w.stand = r.sets[s.Name].keys()
			r.w.elements(s, func() { r.w.b.Text(unix.NFTA_SET_ELEM_LIST_SET, s.Name) })
			r.w.stand = nil
		case s.Anonymous() || !r.filled[s.Name]:
		case r.sets[s.Name] == nil:
			if err := r.w.set(s); err != nil {
				return err
			}
		default:
			r.w.elements(s, func() { r.w.b.Text(unix.NFTA_SET_ELEM_LIST_SET, s.Name) })
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

// merges reports whether Merge may complete a set. The set has some elements now, half of the
// former number at most, and none of them is part of an interval.
func (s *Set) merges(now *Set) bool {
	return s != nil && now != nil && !s.Anonymous() && !s.fleeting() && s.Flags&unix.NFT_SET_INTERVAL == 0 &&
		len(now.Elements) > 0 && 2*len(now.Elements) <= len(s.Elements)
}

// lacking returns the elements whose keys the present set now lacks, for a merge. An element
// with another value for its key is not missing.
func (s *Set) lacking(now *Set) (list []Element) {
	have := now.keys()
	for _, e := range s.Elements {
		if !have[elementKey(e)] {
			list = append(list, e)
		}
	}
	return list
}

// keys returns the keys of a set's elements (elementKey), for many lookups. The writer of a
// merge skips the elements that have one of them.
func (s *Set) keys() map[string]bool {
	all := make(map[string]bool, len(s.Elements))
	for _, e := range s.Elements {
		all[elementKey(e)] = true
	}
	return all
}
