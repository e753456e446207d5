package native

import (
	"golang.org/x/sys/unix"
)

// A followedChain is a chain of a followed table.
type followedChain struct {
	Chain
	rules  *ruleList // while a commit changes them
	digest Digest
	known  bool // the digest is
}

func (c *followedChain) sum(in *contents) Digest {
	if !c.known {
		c.digest, c.known = in.chain(&c.Chain), true
	}
	return c.digest
}

// finish makes the chain's rules of the list. Those of values that were handed out stay.
func (c *followedChain) finish() error {
	if c.rules == nil {
		return nil
	}
	if len(c.rules.waiting) > 0 {
		return errUnplaced
	}
	c.Rules = c.rules.all()
	c.rules = nil
	return nil
}

func (f *followed) addChain(c Chain) error {
	node := &followedChain{Chain: c}
	if c.Bound {
		f.in.bound[c.Name] = &node.Chain
	}
	return f.chains.add(c.Name, c.Handle, node)
}

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
		return errUnplaced
	}
	was.Attrs, was.known = c.Attrs, false
	return nil
}

func (f *followed) deleteChain(d decoded, _ []byte) error {
	if f.went[d.handle] {
		return nil
	}
	c := f.chains.byKey[d.name]
	if c == nil || c.Handle != d.handle {
		return errUnplaced
	}
	f.removeChain(c)
	return nil
}

func (f *followed) removeChain(c *followedChain) {
	f.chains.remove(c.Name)
	delete(f.in.bound, c.Name)
	delete(f.touchedChains, c)
}

// list returns the chain's rules for changes.
func (f *followed) list(c *followedChain) *ruleList {
	if c.rules == nil {
		c.rules = newRuleList(c.Rules)
		f.touchedChains[c] = true
	}
	c.known = false
	return c.rules
}

func (f *followed) newRule(d decoded, attrs []byte, appended bool) error {
	c := f.chains.byKey[d.name]
	if c == nil {
		return errUnplaced
	}
	list, r := f.list(c), Rule{d.handle, d.attrs}
	if before := handleBefore(attrs); before != 0 || !appended {
		return list.insert(before, r)
	}
	return list.append(r)
}

func (f *followed) deleteRule(d decoded, _ []byte) error {
	if f.went[d.handle] {
		return nil
	}
	c := f.chains.byKey[d.name]
	if c == nil {
		return errUnplaced
	}
	r, err := f.list(c).remove(d.handle)
	if err == nil {
		f.unbind(r)
	}
	return err
}

// unbind takes out the chains that go with a rule, of which the kernel need not speak
// (nft_immediate_destroy, Linux 6.18).
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
			rules = c.rules.all()
		}
		f.removeChain(c)
		f.went[c.Handle] = true
		for _, r := range rules {
			f.went[r.Handle] = true
			f.unbind(r)
		}
	})
}

func (f *followed) addObject(o Object) error {
	return f.objects.add(objectKey{o.Name, o.Type}, o.Handle, &o)
}

func (f *followed) newObject(d decoded, attrs []byte) error {
	o := d.object(attrs)
	was := f.objects.byKey[objectKey{o.Name, o.Type}]
	switch {
	case was == nil:
		return f.addObject(o)
	case was.Handle != o.Handle:
		return errUnplaced
	}
	*was = o
	return nil
}

func (f *followed) deleteObject(d decoded, attrs []byte) error {
	key := objectKey{d.name, number(attrs, unix.NFTA_OBJ_TYPE)}
	if o := f.objects.byKey[key]; o == nil || o.Handle != d.handle {
		return errUnplaced
	}
	f.objects.remove(key)
	return nil
}

// A ruleList is a chain's rules while a commit changes them. A notification says behind which rule
// a new one stands in the list that the kernel has at that moment: with all new ones in it, also
// those of which it speaks later, and less those of which it has said that they went
// (nf_tables_commit, nf_tables_rule_notify; Linux 6.18). Of the first and of the last rule it does
// not say it.
type ruleList struct {
	nodes   map[uint64]*ruleNode
	waiting map[uint64]Rule // for the rule before them, by its handle
	first   ruleNode        // stands before all
	last    *ruleNode
	// headless: the first rule went, and others stayed; nothing came since.
	headless bool
}

type ruleNode struct {
	Rule
	before, next *ruleNode
}

func newRuleList(rules []Rule) *ruleList {
	l := &ruleList{nodes: make(map[uint64]*ruleNode, len(rules)), waiting: map[uint64]Rule{}}
	l.last = &l.first
	for _, r := range rules {
		l.put(l.last, r)
	}
	return l
}

func (l *ruleList) put(before *ruleNode, r Rule) *ruleNode {
	n := &ruleNode{Rule: r, before: before, next: before.next}
	if n.next != nil {
		n.next.before = n
	} else {
		l.last = n
	}
	before.next, l.headless = n, false
	l.nodes[r.Handle] = n
	return n
}

// append puts a rule behind all others. A rule that replaced the first one looks the same.
func (l *ruleList) append(r Rule) error {
	if l.headless {
		return errUnplaced
	}
	return l.insert(l.last.Handle, r)
}

// insert puts a rule behind that with a handle, 0 for the first place.
func (l *ruleList) insert(before uint64, r Rule) error {
	if l.nodes[r.Handle] != nil || r.Handle == 0 {
		return errUnplaced
	}
	at := &l.first
	if before != 0 {
		at = l.nodes[before]
	}
	if at == nil {
		if _, taken := l.waiting[before]; taken || before == r.Handle {
			return errUnplaced
		}
		l.waiting[before] = r
		return nil
	}
	for {
		at = l.put(at, r)
		next, there := l.waiting[r.Handle]
		if !there {
			return nil
		}
		delete(l.waiting, r.Handle)
		if r = next; l.nodes[r.Handle] != nil {
			return errUnplaced
		}
	}
}

func (l *ruleList) remove(handle uint64) (Rule, error) {
	n := l.nodes[handle]
	if n == nil {
		return Rule{}, errUnplaced
	}
	n.before.next = n.next
	if n.next != nil {
		n.next.before = n.before
	} else {
		l.last = n.before
	}
	l.headless = l.first.next != nil && (l.headless || n.before == &l.first)
	delete(l.nodes, handle)
	return n.Rule, nil
}

func (l *ruleList) all() []Rule {
	if len(l.nodes) == 0 {
		return nil
	}
	out := make([]Rule, 0, len(l.nodes))
	for n := l.first.next; n != nil; n = n.next {
		out = append(out, n.Rule)
	}
	return out
}
