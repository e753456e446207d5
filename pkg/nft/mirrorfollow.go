package nft

import (
	"slices"

	"golang.org/x/sys/unix"
)

// This file applies the notifications of a commit to a mirrored family. A chain
// is read again if its notifications do not fit.

// followMost bounds the bytes of one commit's new rules in memory: 5,000 services
// have 20 MB. The chains of a larger commit are read again.
const followMost = 32 << 20

// A change is a notification of a chain, or of a rule of it.
type change struct {
	kind   uint16
	append bool   // see Notification
	size   int32  // of the rule
	handle uint64 // of the rule, or of the chain
	before uint64 // of a new rule: see RuleMessage
	rule   *Rule  // a new rule
	chain  *Chain // a chain that is new or has another policy
}

// A chainChanges is the effect of one commit on a chain, in order.
type chainChanges struct {
	place Place
	list  []change
	odd   bool // a notification was unreadable, or is not kept
}

// A commitChanges is the effect of one commit on a family, as far as it was
// received.
type commitChanges struct {
	chains map[Place]*chainChanges
	last   *chainChanges // most notifications are of the same chain as the one before
	tables map[string]bool
	size   int  // of the new rules
	takes  bool // a rule, a chain or a table was deleted
}

// of returns the commit's changes of a chain, for FamilyMirror.take to add to. It copies the
// name only if the previous notification was of another chain, because there are many
// notifications.
func (o *commitChanges) of(table string, chain []byte) *chainChanges {
	if c := o.last; c != nil && c.place.Table == table && c.place.Chain == string(chain) {
		return c
	}
	place := Place{table, string(chain)}
	c := o.chains[place]
	if c == nil {
		if o.chains == nil {
			o.chains = map[Place]*chainChanges{}
		}
		c = &chainChanges{place: place}
		o.chains[place] = c
	}
	o.last = c
	return c
}

// take keeps one notification of table until its commit ends: end then applies it.
// Mirror.take calls it with each notification of the tables that the mirror holds.
func (f *FamilyMirror) take(e Event, table string) {
	o := &f.open
	switch e.Kind {
	case unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE:
		if o.tables == nil {
			o.tables = map[string]bool{}
		}
		o.tables[table], o.takes = true, o.takes || e.Kind == unix.NFT_MSG_DELTABLE
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_NEWRULE:
		o.of(table, e.Chain).take(e, f, o)
	case unix.NFT_MSG_DELCHAIN, unix.NFT_MSG_DELRULE:
		o.takes = true
		o.of(table, e.Chain).take(e, f, o)
	}
}

// take adds a notification, for FamilyMirror.take. It sets c.odd if the message is
// unreadable, or if its rule need not or may not be kept (followMost). Then end has the
// chain read.
func (c *chainChanges) take(e Event, f *FamilyMirror, o *commitChanges) {
	h := change{kind: e.Kind, handle: e.Handle, append: e.Append}
	c.odd = c.odd || f.reads(c.place)
	var err error
	switch e.Kind {
	case unix.NFT_MSG_NEWCHAIN:
		var chain Chain
		chain, err = ParseChain(e.Data)
		h.chain = &chain
	case unix.NFT_MSG_DELRULE:
		var size int
		h.handle, size, err = parseGone(e.Data)
		h.size = int32(size)
	case unix.NFT_MSG_NEWRULE:
		var m RuleMessage
		m, err = ParseRule(e.Data)
		h.handle, h.before, h.size = m.Handle, m.Before, int32(m.Rule.size())
		if o.size += m.Rule.size(); o.size > followMost || err != nil {
			c.odd = true
		} else if !c.odd {
			rule := m.Rule.Clone()
			h.rule = &rule
		}
	}
	c.odd = c.odd || err != nil
	c.list = append(c.list, h)
}

// parseGone reads the handle and the size of a deleted rule, from the notification's data.
// The size, in bytes, reduces the chain's weight.
func parseGone(data []byte) (handle uint64, size int, err error) {
	err = eachAttrOf(data, func(kind uint16, value []byte) (err error) {
		switch kind {
		case unix.NFTA_RULE_HANDLE:
			handle, err = AttrUint64(value)
		case unix.NFTA_RULE_EXPRESSIONS, unix.NFTA_RULE_USERDATA:
			size += len(value)
		}
		return err
	})
	return handle, size, err
}

// reads reports that a chain's new rules need not be kept, because the chain is about to be
// read or is left out. chainChanges.take then notes only that it changed.
func (f *FamilyMirror) reads(place Place) bool {
	_, dirty := f.dirty[place]
	chain := f.Chain(place)
	return dirty || f.stale || f.tables[place.Table] == nil || chain != nil && chain.out != nil
}

// exact reports whether the mirror has a table as it was at genid. The caller has received
// everything up to genid. taking shows only such tables.
func (f *FamilyMirror) exact(table string, genid uint32) bool {
	t := f.tables[table]
	if f.stale || t == nil || Newer(t.upTo, genid) {
		return false
	}
	for place := range f.dirty {
		if place.Table == table {
			return false
		}
	}
	return true
}

// taking shows the view the exact tables as of genid at, before another process's commit
// takes something from them. The view then knows which rules were lost. missed: miss calls
// it, because notifications are lost.
func (f *FamilyMirror) taking(at uint32, missed bool) {
	exact := slices.DeleteFunc(f.Tables(), func(table string) bool { return !f.exact(table, at) })
	if len(exact) > 0 {
		f.settle()
		f.cfg.View.Taking(at, exact, missed)
	}
}

// end applies a commit that was received to its end. Mirror.take calls it at each NEWGEN. at
// is the genid before the commit. A chain that cannot follow it is read by the next refresh.
func (f *FamilyMirror) end(by Commit, at uint32) {
	o := f.open
	if f.open = (commitChanges{}); len(o.chains) == 0 && len(o.tables) == 0 {
		return
	}
	if o.takes && !by.Own {
		f.taking(at, false)
	}
	for _, t := range f.tables {
		t.before = t.highest
	}
	for table := range o.tables {
		f.forget(table)
	}
	for place, c := range o.chains {
		switch {
		case f.tables[place.Table] == nil:
			f.stale = true
		case c.odd || !f.follow(c):
			delete(f.live, place)
			f.readAgain(c)
		case by.Own:
			f.wrote = append(f.wrote, place)
		}
	}
}

// rereadWritten makes the next refresh read the chains that the user's own commits wrote,
// because notifications do not prove a write. Mirror.Read calls it.
func (f *FamilyMirror) rereadWritten() {
	for _, place := range f.wrote {
		f.Reread(place)
	}
	f.wrote = nil
}

// miss says that notifications after that genid were dropped.
func (f *FamilyMirror) miss(at uint32) {
	f.open = commitChanges{}
	f.taking(at, true)
}

// readAgain marks a chain for a read, after a commit that end could not apply to it.
func (f *FamilyMirror) readAgain(c *chainChanges) {
	for _, h := range c.list {
		t := f.tables[c.place.Table]
		if t == nil {
			return
		}
		f.touched(t, c.place, h)
	}
	if chain := f.Chain(c.place); c.odd && (chain == nil || chain.out == nil) {
		f.Reread(c.place)
	}
}

// touched marks for a read the content that h may have changed: the chain's rules, the chain
// itself, or the whole table after a rename. readAgain calls it for each notification.
func (f *FamilyMirror) touched(t *mirrorTable, place Place, h change) {
	switch h.kind {
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		switch {
		case t.renamed(place.Chain, h):
			// The jumps to it changed too, but the kernel sends no notification
			// of them.
			f.forget(place.Table)
		case !f.dirty[place]:
			f.RereadItself(place)
			f.changed++
		}
	default:
		if c := t.chains[place.Chain]; c == nil || c.out == nil || f.wantsCount(c, h.kind) {
			f.Reread(place)
		}
	}
}

// renamed reports whether a notification can mean that a chain got another name; touched
// then has the whole table read. A new chain always has a higher handle than all chains
// before it.
func (t *mirrorTable) renamed(name string, h change) bool {
	if c := t.chains[name]; c != nil && c.Handle == h.handle {
		return false
	}
	known := h.handle <= t.before
	t.highest = max(t.highest, h.handle)
	return known && h.kind == unix.NFT_MSG_NEWCHAIN
}

// follow applies a commit to a chain; false if it does not fit, and the chain has
// to be read. If an earlier read contains the commit already, it does not fit or
// changes nothing in the end. Only a rule that replaces another reuses a handle.
// So a rule that the mirror adds again is in the chain already, or a later commit
// deletes it.
func (f *FamilyMirror) follow(c *chainChanges) bool {
	t, n := f.tables[c.place.Table], f.live[c.place]
	if n == nil {
		was := t.chains[c.place.Chain]
		if was != nil && (was.out != nil || !was.read) {
			return false
		}
		if n = (&following{was: was}); was != nil {
			n.handle = was.Handle
		}
	}
	for i := 0; i < len(c.list); i++ {
		h := c.list[i]
		if i+1 < len(c.list) && h.replacedBy(c.list[i+1]) {
			if i++; !n.replace(f, h, c.list[i]) {
				return false
			}
		} else if !n.apply(f, t, h) {
			return false
		}
	}
	if n.order != nil && !n.order.Whole() {
		return false
	}
	if f.live == nil {
		f.live = map[Place]*following{}
	}
	f.live[c.place] = n
	return true
}

// settle shows the view the chains that were followed, as the last commit left them. Listen
// calls it after the arrived notifications, and taking before a commit that takes something.
func (f *FamilyMirror) settle() {
	if len(f.live) == 0 {
		return
	}
	live := f.live
	f.live, f.settling = nil, true
	for place, n := range live {
		if t := f.tables[place.Table]; t != nil {
			n.show(f, t, place)
		}
	}
	f.settling = false
	// Chains that are read next count, too. Otherwise kept is exact.
	if !f.stale && !f.Dirty() && (f.left || !f.cfg.Budget.Fits(f.kept)) {
		f.trim()
	}
}

// A following is a chain with the commits since it was last shown.
type following struct {
	was    *MirrorChain // the chain with the first rules; nil: none
	handle uint64       // of the chain; 0: it does not exist
	fresh  bool         // it is not the chain that was shown
	base   *Chain       // new values of a chain with a hook
	weight Weight
	order  *RuleOrder[RuleID]
}

// rules returns the chain's rules as a RuleOrder, in which commits are applied. The first
// call builds it from the mirror's chain. A chain that a commit created has none.
func (n *following) rules() *RuleOrder[RuleID] {
	if n.order != nil {
		return n.order
	}
	var ids []RuleID
	var handles []uint64
	if n.was != nil {
		ids, handles, n.weight = n.was.IDs, n.was.Handles, n.was.weight
	}
	n.order = NewRuleOrder(len(ids), func(yield func(uint64, RuleID) bool) {
		for i, id := range ids {
			if !yield(handles[i], id) {
				return
			}
		}
	})
	return n.order
}

// apply applies one notification of table t to the chain; false if it does not fit, and
// follow then has the chain read.
func (n *following) apply(f *FamilyMirror, t *mirrorTable, h change) bool {
	switch h.kind {
	case unix.NFT_MSG_NEWCHAIN:
		switch {
		case n.handle == 0 && h.handle > t.before:
			*n = following{handle: h.handle, fresh: true}
			t.highest = max(t.highest, h.handle)
		case n.handle == 0 || n.handle != h.handle:
			return false
		}
		if h.chain.Base {
			n.base = h.chain
		}
	case unix.NFT_MSG_DELCHAIN:
		if n.handle == 0 || n.handle != h.handle {
			return false
		}
		*n = following{fresh: true}
	case unix.NFT_MSG_NEWRULE:
		return n.handle != 0 && n.add(f, h, func(id RuleID) bool { return n.order.Add(h.handle, h.before, h.append, id) == nil })
	case unix.NFT_MSG_DELRULE:
		if n.handle == 0 {
			return false
		}
		_, err := n.rules().Remove(h.handle)
		n.weight.remove(int(h.size))
		return err == nil
	}
	return true
}

// add interns a new rule, and put inserts its number into n.order; apply and replace call
// it. False: it does not fit there or into the budget, and the chain has to be read.
func (n *following) add(f *FamilyMirror, h change, put func(RuleID) bool) bool {
	n.rules()
	if n.weight.Add(int(h.size)); !f.cfg.Budget.Fits(n.weight.Units()) {
		return false
	}
	id, err := f.cfg.Rules.Intern(*h.rule)
	return err == nil && put(id)
}

// replacedBy reports whether a deleted rule was replaced: "iptables -R" and -Z
// give the new rule the same handle (Linux 6.18).
func (h change) replacedBy(next change) bool {
	return h.kind == unix.NFT_MSG_DELRULE && next.kind == unix.NFT_MSG_NEWRULE && h.handle == next.handle
}

// replace puts rule next into the place of old: follow found a deletion and an addition that
// the kernel made as one. False: it does not fit, and the chain has to be read.
func (n *following) replace(f *FamilyMirror, old, next change) bool {
	if n.handle == 0 {
		return false
	}
	n.rules()
	n.weight.remove(int(old.size))
	return n.add(f, next, func(id RuleID) bool { return n.order.Replace(old.handle, id) == nil })
}

// show updates the mirror and its view with the chain's present state. settle calls it for
// each chain that was followed.
func (n *following) show(f *FamilyMirror, t *mirrorTable, place Place) {
	if n.fresh {
		f.drop(t, place) // the earlier chain, if there was one
	}
	if n.handle == 0 {
		return
	}
	if n.fresh || n.base != nil {
		chain := Chain{Table: place.Table, Name: place.Chain, Handle: n.handle}
		if n.base != nil {
			chain = *n.base
		}
		if t.see(chain) {
			f.cfg.View.Reshaped(place.Table, place.Chain)
		}
	}
	order := n.rules()
	now := Content{weight: n.weight}
	if order.Len() > 0 {
		now.IDs, now.Handles = make([]RuleID, 0, order.Len()), make([]uint64, 0, order.Len())
	}
	for handle, id := range order.All() {
		now.IDs, now.Handles = append(now.IDs, id), append(now.Handles, handle)
	}
	f.keep(t, place, now)
}
