package native

import (
	"bytes"
	"cmp"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/nft"
)

type followedSet struct {
	Set
	weight  nft.Weight
	changes map[string]elementChange // of this commit, by elementKey
	order   []string                 // of the changes
	// elements is the digest of the elements that are not fleeting. It is valid unless recount is
	// set.
	elements xor
	recount  bool
	digest   Digest
	known    bool // digest is current
	// refreshed is the time of the last read of changes by packets and time; see Kernel.Refresh.
	refreshed time.Time
}

// An elementChange is the change of one element in a commit.
type elementChange struct {
	key   Element // any element of that key
	now   Element // nil: deleted
	moved bool    // an element of that key was deleted in the commit
	made  bool    // the first change of that key added an element
}

// sum returns the set's digest, and computes it only if the set has changed. value builds the
// table's digest from these. A set whose elements lead to chains of rules is always counted
// again, because those chains may change.
func (s *followedSet) sum(in *contents) Digest {
	if s.known {
		return s.digest
	}
	if s.recount {
		s.elements = in.elements(&s.Set)
		s.recount = len(in.bound) > 0 && slices.ContainsFunc(s.Elements, in.leadsToBound)
	}
	s.digest, s.known = in.setOf(&s.Set, s.Name, s.elements), true
	return s.digest
}

// addSet adds a set that is the newest of its table. Otherwise the error is nft.ErrUnplaced,
// and the table must be read again.
func (f *followed) addSet(s Set) error {
	node := &followedSet{Set: s, recount: len(s.Elements) > 0}
	if s.Anonymous() {
		f.in.anonymous[s.Name] = &node.Set
	}
	f.weigh(&node.weight, s.weight())
	return f.sets.add(s.Name, s.Handle, node)
}

// sealed returns the followed set if its elements cannot have changed since they were heard or
// read, else nil: a read must dump them. Once a rule uses a constant anonymous set, the kernel
// refuses to add elements (nf_tables_newsetelem) or to delete some (nf_tables_delsetelem). No
// set gets the handle of another. The follower has heard of all changes before.
func (f *followed) sealed(s *Set) *followedSet {
	const sealed = setAnonymous | setConstant
	if f == nil || s.Handle == 0 || s.Flags&sealed != sealed || s.fleeting() {
		return nil
	}
	if heard := f.sets.byKey[s.Name]; heard != nil && heard.Handle == s.Handle {
		return heard
	}
	return nil
}

// newSet applies the notification of a new or changed set. An error makes the follower read the
// table again: the known set of that name has another handle or other flags.
func (f *followed) newSet(d decoded, attrs []byte) error {
	s := d.set(attrs)
	was := f.sets.byKey[s.Name]
	switch {
	case was == nil:
		return f.addSet(s)
	case was.Handle != s.Handle || was.Flags != s.Flags:
		return nft.ErrUnplaced
	}
	f.weighAttrs(&was.weight, was.Attrs, s.Attrs)
	was.Attrs, was.known = s.Attrs, false
	return nil
}

// deleteSet applies the notification of a deleted set. An error makes the follower read the
// table again: there is no such set.
func (f *followed) deleteSet(d decoded, _ []byte) error {
	s := f.sets.byKey[d.name]
	if s == nil || s.Handle != d.handle {
		return nft.ErrUnplaced
	}
	f.sets.remove(s.Name)
	f.weigh(&s.weight, nft.Weight{})
	delete(f.in.anonymous, s.Name)
	delete(f.touchedSets, s)
	return nil
}

// elements applies a notification of added or deleted elements; finish merges them into the
// set. now is the time of the commit, from which the elements' timeouts count. An error makes
// the follower read the table again.
func (f *followed) elements(attrs []byte, deleted bool, now time.Time) error {
	s := f.sets.byKey[nft.String(attrOf(attrs, unix.NFTA_SET_ELEM_LIST_SET))]
	if s == nil {
		return nft.ErrUnplaced
	}
	f.touchedSets[s] = true
	return decodeElements(attrs, func(e Element) {
		if deleted {
			s.lose(e)
			return
		}
		f.added.Bytes += elementBytes + len(e)
		s.take(e.later(now.Sub(f.at)))
	})
}

// later returns the element with by more left of its timeout, so that the rest counts from a
// time that is by earlier. All elements of a followed table count from one time. An element
// without a timeout is unchanged.
func (e Element) later(by time.Duration) Element {
	left, err := nft.AttrUint64(attrOf(e, unix.NFTA_SET_ELEM_EXPIRATION))
	if err != nil || by <= 0 {
		return e
	}
	return append(without(e, unix.NFTA_SET_ELEM_EXPIRATION),
		milliseconds(unix.NFTA_SET_ELEM_EXPIRATION, left+uint64(by.Milliseconds()))...)
}

// change notes one more change of an element's key in this commit, for take and lose. f alters
// the change c. changed: there was an earlier one of that key.
func (s *followedSet) change(e Element, f func(c *elementChange, changed bool)) {
	if s.changes == nil {
		s.changes = map[string]elementChange{}
	}
	key := elementKey(e)
	c, changed := s.changes[key]
	if c.key = e; !changed {
		s.order = append(s.order, key)
	}
	f(&c, changed)
	s.changes[key] = c
}

// take notes an added or updated element. If the commit deleted one of that key before, finish
// takes both together as a move.
func (s *followedSet) take(e Element) {
	s.change(e, func(c *elementChange, changed bool) {
		c.made = c.made || !changed
		c.now = e
	})
}

func (s *followedSet) lose(e Element) {
	s.change(e, func(c *elementChange, _ bool) { c.now, c.moved = nil, true })
}

// elementKey identifies an element in its set. The end of an interval may have the key of the next
// beginning, and ranges of several fields may begin alike.
func elementKey(e Element) string {
	flags := byte(number(e, unix.NFTA_SET_ELEM_FLAGS)) & (elemIntervalEnd | elemCatchall)
	return string(slices.Concat([]byte{flags}, attrOf(e, unix.NFTA_SET_ELEM_KEY), attrOf(e, elemKeyEnd)))
}

// finish applies the changes to the set's elements, in new memory, at the end of a commit.
// Values keep the old elements. An error means that an element is not known, so the table is
// read again. in has the digests of chains of rules.
func (s *followedSet) finish(in *contents) error {
	if len(s.order) == 0 {
		return nil
	}
	var err error
	if s.ranges() {
		s.Elements, err = s.inPlace(in)
	} else {
		s.Elements, err = s.merged(in)
	}
	s.changes, s.order, s.known = nil, nil, false
	return err
}

// merged returns the elements of a sorted set after the changes, see sortElements. It also
// corrects the digest of the elements. An error is count's.
func (s *followedSet) merged(in *contents) ([]Element, error) {
	changes := make([]elementChange, 0, len(s.order))
	for _, key := range s.order {
		changes = append(changes, s.changes[key])
	}
	sorting.Stable(changes, func(a, b elementChange) int { return compareElements(a.key, b.key) })
	old, out := s.Elements, make([]Element, 0, len(s.Elements)+len(changes))
	for _, c := range changes {
		at, found := slices.BinarySearchFunc(old, c.key, compareElements)
		out = append(out, old[:at]...)
		old = old[at:]
		if err := s.count(c, found, in); err != nil {
			return nil, err
		}
		if found {
			s.uncount(old[0], in)
			old = old[1:]
		}
		if c.now != nil {
			out = append(out, c.now)
		}
	}
	return append(out, old...), nil
}

// inPlace is merged for a set that has an order of its own: ranges of several fields. An
// updated element keeps its place, and an added or moved one is behind all others.
func (s *followedSet) inPlace(in *contents) ([]Element, error) {
	out, found := make([]Element, 0, len(s.Elements)+len(s.order)), map[string]bool{}
	for _, e := range s.Elements {
		key := elementKey(e)
		c, changed := s.changes[key]
		if !changed {
			out = append(out, e)
			continue
		}
		s.uncount(e, in)
		if found[key] = true; !c.moved {
			out = append(out, c.now)
		}
	}
	for _, key := range s.order {
		c := s.changes[key]
		if err := s.count(c, found[key], in); err != nil {
			return nil, err
		}
		if c.now != nil && (c.moved || !found[key]) {
			out = append(out, c.now)
		}
	}
	slices.SortStableFunc(out, func(a, b Element) int { // the kernel dumps the catch-all element last
		return cmp.Compare(number(a, unix.NFTA_SET_ELEM_FLAGS)&elemCatchall, number(b, unix.NFTA_SET_ELEM_FLAGS)&elemCatchall)
	})
	return out, nil
}

// count adds a changed element to the digest. found: the set had an element of that key before.
// The deletion of an unknown element is an error, unless time or packets may have added the
// element.
func (s *followedSet) count(c elementChange, found bool, in *contents) error {
	if !found && !c.made && c.moved && !s.fleeting() {
		return nft.ErrUnplaced
	}
	if c.now != nil {
		s.uncount(c.now, in)
	}
	return nil
}

// uncount adds an element to the digest, or removes it: with xor both are the same. A fleeting
// element does not count. An element that leads to a chain of a rule makes sum count all again
// (recount).
func (s *followedSet) uncount(e Element, in *contents) {
	switch {
	case s.recount || fleeting(&s.Set, e):
	case in.leadsToBound(e): // the chain may be gone later
		s.recount = true
	default:
		s.elements.add(in.element(e))
	}
}

// compareElements compares two elements as sortElements does, by key, an end before a beginning.
func compareElements(a, b Element) int {
	end := func(e Element) uint32 { return number(e, unix.NFTA_SET_ELEM_FLAGS) & elemIntervalEnd }
	return cmp.Or(bytes.Compare(attrOf(a, unix.NFTA_SET_ELEM_KEY), attrOf(b, unix.NFTA_SET_ELEM_KEY)), cmp.Compare(end(b), end(a)))
}
