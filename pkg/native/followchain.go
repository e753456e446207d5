package native

import (
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

type followedChain struct {
	Chain
	weight nft.Weight
	rules  *nft.RuleOrder[Rule] // while a commit changes them
	digest Digest
	known  bool // the digest is current
}

// sum returns the chain's digest, and computes it only if the chain has changed since the last
// call. value builds the table's digest from these.
func (c *followedChain) sum(in *contents) Digest {
	if !c.known {
		c.digest, c.known = in.chain(&c.Chain), true
	}
	return c.digest
}

// finish makes the chain's rules from the list, in new memory, at the end of a commit. Values
// keep the old rules. An error means that a new rule has no place, so the table must be read
// again.
func (c *followedChain) finish() error {
	if c.rules == nil {
		return nil
	}
	if !c.rules.Whole() {
		return nft.ErrUnplaced
	}
	c.Rules = inOrder(c.rules)
	c.rules = nil
	return nil
}

// inOrder returns the rules of a list in the kernel's order, in new memory; nil if there is
// none.
func inOrder(o *nft.RuleOrder[Rule]) []Rule {
	if o.Len() == 0 {
		return nil
	}
	out := make([]Rule, 0, o.Len())
	for _, r := range o.All() {
		out = append(out, r)
	}
	return out
}

// addChain adds a chain that is the newest of its table: its handle is the highest. Otherwise
// the error is nft.ErrUnplaced, and the table must be read again.
func (f *followed) addChain(c Chain) error {
	node := &followedChain{Chain: c}
	if c.Bound {
		f.in.bound[c.Name] = &node.Chain
	}
	f.weigh(&node.weight, c.weight())
	return f.chains.add(c.Name, c.Handle, node)
}

// newChain applies the notification of a new or changed chain. An error makes the follower read
// the table again: the chain is on a device, or does not fit the known chain of its name.
func (f *followed) newChain(d decoded, attrs []byte) error {
	c := d.chain(attrs)
	if hasDevice(c.Attrs) {
		return errNotFollowed
	}
	was := f.chains.byKey[c.Name]
	switch {
	case was == nil:
		return f.addChain(c)
	case was.Handle != c.Handle || was.Bound != c.Bound || was.Base != c.Base:
		return nft.ErrUnplaced
	}
	f.weighAttrs(&was.weight, was.Attrs, c.Attrs)
	was.Attrs, was.known = c.Attrs, false
	return nil
}

// deleteChain applies the notification of a deleted chain. It skips a chain that was removed
// with its rule in the same commit. An error makes the follower read the table again.
func (f *followed) deleteChain(d decoded, _ []byte) error {
	if f.deleted[d.handle] {
		return nil
	}
	c := f.chains.byKey[d.name]
	if c == nil || c.Handle != d.handle {
		return nft.ErrUnplaced
	}
	f.removeChain(c)
	return nil
}

// removeChain removes a chain with its rules from the followed table. deleteChain calls it, and
// unbind for a chain that belongs to a deleted rule.
func (f *followed) removeChain(c *followedChain) {
	f.chains.remove(c.Name)
	f.weigh(&c.weight, nft.Weight{})
	delete(f.in.bound, c.Name)
	delete(f.touchedChains, c)
}

// list returns the chain's rules as a list for the changes of this commit. finish makes the
// chain's rules from it.
func (f *followed) list(c *followedChain) *nft.RuleOrder[Rule] {
	if c.rules == nil {
		c.rules = nft.NewRuleOrder(len(c.Rules), func(yield func(uint64, Rule) bool) {
			for _, r := range c.Rules {
				if !yield(r.Handle, r) {
					return
				}
			}
		})
		f.touchedChains[c] = true
	}
	c.known = false
	return c.rules
}

// newRule applies the notification of a new rule, which has the handle of the rule in front of
// it. appended (Notification.Append): it was appended, or replaced another rule. An error makes
// the follower read the table again.
func (f *followed) newRule(d decoded, attrs []byte, appended bool) error {
	c := f.chains.byKey[d.name]
	if c == nil {
		return nft.ErrUnplaced
	}
	f.added.Add(len(d.attrs))
	return f.list(c).Add(d.handle, handleBefore(attrs), appended, Rule{d.handle, d.attrs})
}

// deleteRule applies the notification of a deleted rule, and removes the chains that belong to
// the rule. It skips a rule that was removed with such a chain in the same commit.
func (f *followed) deleteRule(d decoded, _ []byte) error {
	if f.deleted[d.handle] {
		return nil
	}
	c := f.chains.byKey[d.name]
	if c == nil {
		return nft.ErrUnplaced
	}
	r, err := f.list(c).Remove(d.handle)
	if err == nil {
		f.unbind(r)
	}
	return err
}

// unbind removes the chains that belong to a deleted rule, and the chains of their rules. The
// kernel need not notify of them (nft_immediate_destroy, Linux 6.18); deleted has them, so that
// a notification is skipped.
func (f *followed) unbind(r Rule) {
	if len(f.in.bound) == 0 {
		return
	}
	names(r.expressions(), func(string) {}, func(name string) {
		c := f.chains.byKey[name]
		if c == nil || !c.Bound {
			return
		}
		rules := c.Rules
		if c.rules != nil {
			rules = inOrder(c.rules)
		}
		f.removeChain(c)
		f.deleted[c.Handle] = true
		for _, r := range rules {
			f.deleted[r.Handle] = true
			f.unbind(r)
		}
	})
}

func (f *followed) addObject(o Object) error {
	f.weigh(new(nft.Weight), weightOf(o.Attrs))
	return f.objects.add(objectKey{o.Name, o.Type}, o.Handle, &o)
}

// newObject applies the notification of a new or changed object. An error makes the follower
// read the table again: the known object of that name has another handle.
func (f *followed) newObject(d decoded, attrs []byte) error {
	o := d.object(attrs)
	was := f.objects.byKey[objectKey{o.Name, o.Type}]
	switch {
	case was == nil:
		return f.addObject(o)
	case was.Handle != o.Handle:
		return nft.ErrUnplaced
	}
	f.weighAttrs(new(nft.Weight), was.Attrs, o.Attrs)
	*was = o
	return nil
}

// deleteObject applies the notification of a deleted object. An error makes the follower read
// the table again: there is no such object.
func (f *followed) deleteObject(d decoded, attrs []byte) error {
	key := objectKey{d.name, number(attrs, unix.NFTA_OBJ_TYPE)}
	o := f.objects.byKey[key]
	if o == nil || o.Handle != d.handle {
		return nft.ErrUnplaced
	}
	gone := weightOf(o.Attrs)
	f.weigh(&gone, nft.Weight{})
	f.objects.remove(key)
	return nil
}
