package native

import (
	"bytes"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// ErrWhole reports that two tables differ in a part that Amend cannot write.
var ErrWhole = errors.New("the table has to be written as a whole")

// Amend writes the difference between two tables into a batch, so that the kernel's table changes
// from was to t. was is the table as the caller itself wrote it: no other process may write that
// table. Amend writes chains, rules, sets and elements. For any other difference it returns
// ErrWhole, and the caller must cut back the batch. Sets that belong to rules get a new name from
// each call of name, because the kernel may have reused theirs for other rules.
func (t *Table) Amend(b *nft.Batch, was *Table, name func() string) error {
	a := &amendment{w: newWriter(b, t, Options{}), was: was, before: lazyContents(was), now: lazyContents(t)}
	a.w.rename = map[string]string{}
	if err := a.sort(Diff(was, t)); err != nil {
		return err
	}
	for _, c := range append(a.chains[:len(a.chains):len(a.chains)], a.newChains...) {
		for _, r := range c.Rules {
			names(r.expressions(), func(set string) {
				if a.w.sets[set] != nil {
					a.w.rename[set] = name()
				}
			}, func(string) {})
		}
	}
	return a.write()
}

// An amendment holds the differences that Amend writes.
type amendment struct {
	w                 *writer
	was               *Table
	before, now       *contents
	chains, newChains []*Chain // chains with other rules, and new chains
	goneChains        []string
	sets              [][2]*Set // sets with other elements: before and now
	newSets           []*Set
	goneSets          []string
	newElements       map[string][]Element // the elements to add to these sets
}

// sort decides how to write each change, for Amend. It returns ErrWhole for a change that Amend
// cannot write: of a base chain, of attributes, or of any part but chains and sets.
func (a *amendment) sort(changes []Change) error {
	if len(changes) == 0 {
		return nil
	}
	if len(a.w.bound) > 0 {
		return fmt.Errorf("%w: chains belong to rules", ErrWhole)
	}
	chains, sets := a.w.t.chainsByName(), a.w.t.setsByName()
	oldChains, oldSets := a.was.chainsByName(), a.was.setsByName()
	for _, c := range changes {
		switch c.Kind {
		case nft.Chains:
			was, now := oldChains[c.Name], chains[c.Name]
			if was == nil || now == nil {
				if was != nil && was.Base || now != nil && now.Base {
					return fmt.Errorf("%w: base chain %s came or went", ErrWhole, c.Name)
				}
			} else if !bytes.Equal(a.before.chainAttrs(was), a.now.chainAttrs(now)) {
				return fmt.Errorf("%w: chain %s is another one", ErrWhole, c.Name)
			}
			a.addChain(c.Name, was, now)
		case nft.Sets:
			was, now := oldSets[c.Name], sets[c.Name]
			if was != nil && now != nil && c.Altered {
				return fmt.Errorf("%w: set %s is another one", ErrWhole, c.Name)
			}
			a.addSet(c.Name, was, now)
		default:
			return fmt.Errorf("%w: %s", ErrWhole, c)
		}
	}
	return nil
}

// addChain notes a chain that differs, to be made, deleted or written again. was is nil for a
// new chain, now for a deleted one.
func (a *amendment) addChain(name string, was, now *Chain) {
	switch {
	case now == nil:
		a.goneChains = append(a.goneChains, name)
	case was == nil:
		a.newChains = append(a.newChains, now)
	default:
		a.chains = append(a.chains, now)
	}
}

// addSet notes a set that differs, to be made, deleted or changed in its elements. was is nil
// for a new set, now for a deleted one.
func (a *amendment) addSet(name string, was, now *Set) {
	switch {
	case now == nil:
		a.goneSets = append(a.goneSets, name)
	case was == nil:
		a.newSets = append(a.newSets, now)
	default:
		a.sets = append(a.sets, [2]*Set{was, now})
	}
}

// write writes the amendment in an order in which each named object exists, and no object is
// deleted while another one names it. Chains with other rules are emptied and filled again.
// Amend calls it.
func (a *amendment) write() error {
	for _, c := range a.chains {
		a.empty(c.Name)
	}
	for _, name := range a.goneChains {
		a.empty(name)
	}
	for _, s := range a.sets {
		a.removeElements(s[0], s[1])
	}
	for _, c := range a.newChains {
		a.w.chain(c)
	}
	for _, s := range a.newSets {
		if err := a.w.set(s); err != nil {
			return err
		}
	}
	for _, s := range a.sets {
		a.w.elements(&Set{Elements: a.newElements[s[1].Name]}, func() { a.w.b.Text(unix.NFTA_SET_ELEM_LIST_SET, s[1].Name) })
	}
	for _, list := range [][]*Chain{a.chains, a.newChains} {
		for _, c := range list {
			if err := a.w.rules(c); err != nil {
				return err
			}
		}
	}
	for _, name := range a.goneSets {
		a.remove(unix.NFT_MSG_DELSET, unix.NFTA_SET_NAME, name)
	}
	for _, name := range a.goneChains {
		a.remove(unix.NFT_MSG_DELCHAIN, unix.NFTA_CHAIN_NAME, name)
	}
	return nil
}

// empty writes the deletion of all rules of a chain.
func (a *amendment) empty(chain string) {
	a.remove(unix.NFT_MSG_DELRULE, unix.NFTA_RULE_CHAIN, chain)
}

// remove writes a message that deletes the named object, or its rules or elements. message is
// its number, and kind the attribute for the name.
func (a *amendment) remove(message uint16, kind uint16, name string) {
	a.w.b.Begin(message, 0, a.w.t.ID.Family)
	a.w.b.Text(unix.NFTA_TABLE_NAME, a.w.name) // 1 in all kinds
	a.w.b.Text(kind, name)
	a.w.b.End()
}

// removeElements writes the deletion of the elements that the set has lost, and records the new
// elements for write. In a set of intervals an element is one end of an interval, so all
// elements are deleted and written again.
func (a *amendment) removeElements(was, now *Set) {
	gone, fresh := a.elements(was, now)
	if a.newElements == nil {
		a.newElements = map[string][]Element{}
	}
	if was.Flags&setInterval != 0 {
		a.newElements[now.Name] = now.Elements
		a.remove(unix.NFT_MSG_DELSETELEM, unix.NFTA_SET_ELEM_LIST_SET, was.Name)
		return
	}
	a.newElements[now.Name] = fresh
	var list []byte
	flush := func() {
		if len(list) == 0 {
			return
		}
		a.w.b.Begin(unix.NFT_MSG_DELSETELEM, 0, a.w.t.ID.Family)
		a.w.b.Text(unix.NFTA_SET_ELEM_LIST_TABLE, a.w.name)
		a.w.b.Text(unix.NFTA_SET_ELEM_LIST_SET, was.Name)
		a.w.b.Blob(unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED, list)
		a.w.b.End()
		list = list[:0]
	}
	for _, e := range gone {
		var key []byte
		for at := range attributes(e) {
			switch at.kind {
			case unix.NFTA_SET_ELEM_KEY, elemKeyEnd, unix.NFTA_SET_ELEM_FLAGS:
				key = appendRaw(key, at)
			}
		}
		if len(list)+len(key) > elementsSize {
			flush()
		}
		list = appendNested(list, unix.NFTA_LIST_ELEM, key)
	}
	flush()
}

// elements returns the lost and the new elements of a set. It ignores elements that time or
// packets change: the kernel's set keeps its own.
func (a *amendment) elements(was, now *Set) (gone, fresh []Element) {
	olds, news := was.Elements, now.Elements
	for len(olds) > 0 && len(news) > 0 && sameMemory(olds[0], news[0]) {
		olds, news = olds[1:], news[1:]
	}
	for len(olds) > 0 && len(news) > 0 && sameMemory(olds[len(olds)-1], news[len(news)-1]) {
		olds, news = olds[:len(olds)-1], news[:len(news)-1]
	}
	stands := make(map[Digest]bool, len(olds))
	for _, e := range olds {
		stands[a.before.element(e)] = true
	}
	stays := map[Digest]bool{}
	for _, e := range news {
		d := a.now.element(e)
		stays[d] = true
		if !stands[d] && !fleeting(now, e) {
			fresh = append(fresh, e)
		}
	}
	for _, e := range olds {
		if !stays[a.before.element(e)] && !fleeting(was, e) {
			gone = append(gone, e)
		}
	}
	return gone, fresh
}
