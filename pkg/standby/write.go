package standby

import (
	"fmt"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A writer writes the difference between the kernel's copy and the next copy.
type writer struct {
	s    *Standby
	t    *table
	next *Copy
	// first: no packet can reach the table yet, so a transaction may end within a chain. whole: all
	// must be one transaction.
	first, whole  bool
	pause         func() error // called after each transaction but the last; nil: no pause
	opens         []Hook
	removed       []Hook   // removed base chains, which shuts their hooks
	changed, gone []string // chains that are new or differ, and chains that the copy no longer has
	b             *nft.Batch
	begun         nft.BatchMark // of the empty batch
	sent          int           // transactions
	bytes         int
	took          time.Duration
}

// write writes the difference in one or more transactions, and opens the hooks in opens.
// follow, open and fill call it. If next is the kernel's own copy, it only opens hooks. After
// an error, sent is the number of transactions that the kernel has accepted.
func (w *writer) write() error {
	defer func() { w.t.shutting = false }()
	w.begin()
	steps := []func() error{w.newChains, w.newRules, w.hooks, w.services, w.oldChains, w.open}
	if w.next == w.t.held {
		steps = steps[len(steps)-1:]
	} else if err := w.find(); err != nil {
		return err
	}
	if w.first && w.t.gated {
		w.gates()
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return w.flush()
}

// begin makes the empty batch, for write and openNative.
func (w *writer) begin() {
	w.b = nft.NewBatch()
	w.begun = w.b.Mark()
}

// find finds the chains that differ: mostly a few of thousands. The error is ErrOutdated if the
// copy lacks the rules of such a chain, because it was made from an earlier copy. The caller
// must then translate again.
func (w *writer) find() error {
	for name, c := range w.next.chains {
		if w.same(name, c) {
			continue
		}
		if w.next.rules[name] == nil && len(c.digests) > 0 {
			return fmt.Errorf("%w: chain %s", ErrOutdated, name)
		}
		w.changed = append(w.changed, name)
	}
	slices.Sort(w.changed)
	for name := range w.t.held.chains {
		if w.next.chains[name] == nil {
			w.gone = append(w.gone, name)
		}
	}
	slices.Sort(w.gone)
	return nil
}

// same reports whether the kernel has the same chain.
func (w *writer) same(name string, c *chain) bool {
	was := w.t.held.chains[name]
	return was == c || was != nil && slices.Equal(was.digests, c.digests)
}

// cut sends the transaction if it is large, and begins another. In an open all is one
// transaction (whole). pause lets PutPiece return between two transactions of a build; its
// error ends the write.
func (w *writer) cut() error {
	if w.whole || w.b.Bytes() < w.s.cfg.Piece {
		return nil
	}
	if err := w.flush(); err != nil || w.pause == nil {
		return err
	}
	return w.pause()
}

// flush sends the transaction, if it has content, and begins another in the same memory. w.bytes
// and w.took are the sums over all of them, for Status.
func (w *writer) flush() error {
	if w.b.Messages() < 2 { // the beginning only
		return nil
	}
	w.t.bytes, w.t.took = 0, 0
	err := w.s.send(w.t, w.b)
	w.bytes, w.took = w.bytes+w.t.bytes, w.took+w.t.took
	if err == nil {
		w.sent++
	}
	w.b.Cut(w.begun)
	return err
}

// newChains makes the chains that the kernel lacks, still empty. All are made before any rule,
// because rules lead to them.
func (w *writer) newChains() error {
	for _, name := range w.changed {
		if w.t.held.chains[name] != nil {
			continue
		}
		beginChain(w.b, w.t, unix.NFT_MSG_NEWCHAIN, netlink.Create, name)
		w.b.End()
		if err := w.cut(); err != nil {
			return err
		}
	}
	return nil
}

// newRules writes the rules of all new or changed chains. An error is that of a sent
// transaction, or of pause.
func (w *writer) newRules() error {
	for _, name := range w.changed {
		if err := w.chain(name, w.next.chains[name]); err != nil {
			return err
		}
		if err := w.cut(); err != nil {
			return err
		}
	}
	return nil
}

// chain writes the rules of a chain that the kernel lacks, or has with other rules; newRules
// calls it. With known handles it writes only the rules that differ, else it empties the chain
// first.
func (w *writer) chain(name string, c *chain) error {
	handles := w.t.handles[name]
	delete(w.t.handles, name)
	was := w.t.held.chains[name]
	if was != nil && len(handles) == len(was.digests) && len(handles) > 0 {
		w.edit(name, c, was.digests, handles)
		return nil
	}
	if was != nil {
		emptyChain(w.b, w.t, name)
	}
	for _, r := range w.next.rules[name] {
		w.rule(name, r, 0)
		if w.first {
			if err := w.cut(); err != nil {
				return err
			}
		}
	}
	return nil
}

// rule writes a rule before the rule with the handle before, or at the end if before is 0. Only
// edit inserts rules.
func (w *writer) rule(chain string, r rule, before uint64) {
	flags := netlink.Create
	if before == 0 {
		flags |= netlink.Append
	}
	w.b.Begin(unix.NFT_MSG_NEWRULE, flags, w.t.id.Family)
	w.b.Text(unix.NFTA_RULE_TABLE, w.t.name)
	w.b.Text(unix.NFTA_RULE_CHAIN, chain)
	if before != 0 {
		w.b.Number64(unix.NFTA_RULE_POSITION, before)
	}
	w.b.Blob(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, r.expressions)
	w.b.Compat(r.compat)
	w.b.End()
}

// hooks writes the base chains, and removes the base chains that the copy no longer has. A base
// chain without a gate has rules only while its hook is open. A moved hook is shut.
func (w *writer) hooks() error {
	for _, h := range Hooks() {
		was, is := w.t.held.hooks[h], w.next.hooks[h]
		moved := was != nil && is != nil && (was.name != is.name || was.priority != is.priority)
		if was != nil && (is == nil || moved) {
			w.removeHook(h, was)
			was = nil
		}
		switch {
		case is == nil:
		case was == nil:
			w.addHook(h, is)
		case slices.Equal(was.body.digests, is.body.digests):
		case w.t.gated:
			emptyChain(w.b, w.t, is.name)
			w.gated(h, is)
		case w.t.open[h]:
			emptyChain(w.b, w.t, is.name)
			w.body(is)
		}
	}
	return nil
}

// body appends the copied rules to a base chain. gated calls it behind the gate. Without gates
// that opens the hook, so only open and a change of an open hook call it.
func (w *writer) body(h *hook) {
	for _, r := range h.rules {
		w.rule(h.name, r, 0)
	}
}

// gated writes the rules of the empty base chain at hook h: the gate, and the copied rules
// behind it. A rule that logs misses is in front of the gate.
func (w *writer) gated(h Hook, is *hook) {
	if group := w.s.cfg.Misses; group != 0 && (h == Prerouting || h == Output) {
		w.rule(is.name, missed(h, w.t.id.Family, group), 0)
	}
	for _, r := range inFront(h) {
		w.rule(is.name, r, 0)
	}
	w.body(is)
}

// gates writes the sets of all hooks, and the set of services for misses, once for a new table.
// A later copy may have a hook that this copy lacks.
func (w *writer) gates() {
	for i, h := range Hooks() {
		w.set(setOf(h), uint32(i), gateSet())
	}
	if w.s.cfg.Misses != 0 {
		w.set(servicesName, uint32(len(Hooks())), serviceSet(w.t.id.Family))
	}
}

// set writes a set; gates calls it. Its number n is unique in the transaction. attrs are all
// attributes but its names and that number.
func (w *writer) set(name string, n uint32, attrs []byte) {
	w.b.Begin(unix.NFT_MSG_NEWSET, netlink.Create|netlink.Excl, w.t.id.Family)
	w.b.Text(unix.NFTA_SET_TABLE, w.t.name)
	w.b.Text(unix.NFTA_SET_NAME, name)
	w.b.Number(unix.NFTA_SET_ID, n+1)
	w.b.Raw(attrs)
	w.b.End()
}

// services writes the added and removed services into the set of services, so that only their
// packets are logged as misses. Without Config.Misses or without gates there is no such set.
func (w *writer) services() error {
	if w.s.cfg.Misses == 0 || !w.t.gated {
		return nil
	}
	came, gone := difference(w.t.held.services, w.next.services)
	for _, of := range []struct {
		message uint16
		flags   netlink.HeaderFlags
		keys    []key
	}{{unix.NFT_MSG_DELSETELEM, 0, gone}, {unix.NFT_MSG_NEWSETELEM, netlink.Create, came}} {
		for keys := range slices.Chunk(of.keys, serviceElements) {
			w.b.Begin(of.message, of.flags, w.t.id.Family)
			w.b.Text(unix.NFTA_SET_ELEM_LIST_TABLE, w.t.name)
			w.b.Text(unix.NFTA_SET_ELEM_LIST_SET, servicesName)
			var list []byte
			for _, k := range keys {
				list = nft.AppendAttr(list, unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, value(nil, unix.NFTA_SET_ELEM_KEY, k.bytes()), 0)
			}
			w.b.Blob(unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED, list)
			w.b.End()
			if err := w.cut(); err != nil {
				return err
			}
		}
	}
	return nil
}

// difference returns the added and removed keys of two sorted lists without duplicates: came is
// only in is, gone only in was.
func difference(was, is []key) (came, gone []key) {
	for len(was) > 0 || len(is) > 0 {
		switch {
		case len(was) == 0 || len(is) > 0 && is[0].compare(was[0]) < 0:
			came, is = append(came, is[0]), is[1:]
		case len(is) == 0 || was[0].compare(is[0]) < 0:
			gone, was = append(gone, was[0]), was[1:]
		default:
			was, is = was[1:], is[1:]
		}
	}
	return came, gone
}

// addHook writes a base chain, one step behind the real one (priority +1). Without a gate it
// stays empty until the hook is opened.
func (w *writer) addHook(h Hook, is *hook) {
	beginChain(w.b, w.t, unix.NFT_MSG_NEWCHAIN, netlink.Create, is.name)
	w.b.Pair(unix.NFTA_CHAIN_HOOK, uint32(h), uint32(is.priority+1))
	w.b.Number(unix.NFTA_CHAIN_POLICY, nfAccept)
	w.b.Text(unix.NFTA_CHAIN_TYPE, "nat")
	w.b.End()
	if w.t.gated {
		w.gated(h, is)
	}
}

// removeHook removes a base chain, which shuts its hook; removed has it for shutRemoved. Its
// gate stays, and is shut.
func (w *writer) removeHook(h Hook, was *hook) {
	w.removed, w.t.shutting = append(w.removed, h), true
	emptyChain(w.b, w.t, was.name)
	beginChain(w.b, w.t, unix.NFT_MSG_DELCHAIN, 0, was.name)
	w.b.End()
	if w.t.gated {
		noElement(w.b, w.t, h)
	}
}

// oldChains removes the chains that the copy no longer has. No written rule leads to them any
// more. It empties all of them first, because they may lead to each other.
func (w *writer) oldChains() error {
	for _, name := range w.gone {
		delete(w.t.handles, name)
		emptyChain(w.b, w.t, name)
	}
	for _, name := range w.gone {
		beginChain(w.b, w.t, unix.NFT_MSG_DELCHAIN, 0, name)
		w.b.End()
	}
	return nil
}

// open opens the wanted hooks that are not open yet: it adds the gate's element or, without
// gates, the rules. A hook that the copy lacks is left out. It always returns nil.
func (w *writer) open() error {
	for _, h := range w.opens {
		is := w.next.hooks[h]
		switch {
		case is == nil, w.t.open[h] && !slices.Contains(w.removed, h):
		case w.t.gated:
			element(w.b, w.t, h)
		default:
			w.body(is)
		}
	}
	return nil
}

// beginChain begins a message about a chain, to make or delete it. The caller adds attributes
// and ends the message.
func beginChain(b *nft.Batch, t *table, message uint16, flags netlink.HeaderFlags, name string) {
	b.Begin(message, flags, t.id.Family)
	b.Text(unix.NFTA_CHAIN_TABLE, t.name)
	b.Text(unix.NFTA_CHAIN_NAME, name)
}

// emptyChain removes all rules of a chain. The chain itself stays, so rules may still lead to
// it.
func emptyChain(b *nft.Batch, t *table, name string) {
	b.Begin(unix.NFT_MSG_DELRULE, 0, t.id.Family)
	b.Text(unix.NFTA_RULE_TABLE, t.name)
	b.Text(unix.NFTA_RULE_CHAIN, name)
	b.End()
}
