package standby

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// nativeSets bounds the sets of a native table that is copied. The kernel's time for them grows
// with their square. It took 0.1 s for the 1,198 sets of 1,000 services, and 6 s for the 5,958 of
// 5,000 (Linux 6.18, a busy machine). nativePiece bounds a transaction of that build, in bytes.
// Other writers wait for one transaction, which takes some 40 ms at 5,000 services.
const (
	nativeSets  = 8000
	nativePiece = 32 << 10
)

// TranslateNative makes the copy of a native table, as pkg/native captured it: the same objects in
// a table of another name. It copies base chains of nat, and base chains that filter before nat:
// packets that they drop must not be translated. The error wraps ErrUnavailable.
//
// A table of one owner has no rules of others, so its hooks may be opened after any loss. The copy
// has the elements that packets add to sets, such as session affinity, as they were when the set
// was written. Such a set keeps the size that it has in held, because a set of another size is
// another set. held is the kernel's copy of the table (Standby.Held, nil: none).
func TranslateNative(src *native.Table, held *Copy) (*Copy, error) {
	c := &Copy{ID: src.ID, chains: map[string]*chain{}, hooks: map[Hook]*hook{}}
	switch {
	case src.Immune():
		return nil, fmt.Errorf("%w: one process owns %s, and no other can flush it", ErrUnavailable, src.ID)
	case src.ID.Name == "nat" || src.ID.Family != tableid.IPv4 && src.ID.Family != tableid.IPv6 && src.ID.Family != tableid.Inet:
		return nil, fmt.Errorf("%w: %s is no native table that translates", ErrUnavailable, src.ID)
	case len(src.Sets) > nativeSets:
		return nil, fmt.Errorf("%w: %s has %d sets, more than %d", ErrUnavailable, src.ID, len(src.Sets), nativeSets)
	}
	n := newNativeCopy(src, false)
	bases, err := n.bases(func(h Hook, base *native.Chain) { c.hooks[h] = &hook{name: base.Name, body: &chain{}} })
	if err != nil {
		return nil, err
	}
	if len(c.hooks) == 0 {
		return nil, fmt.Errorf("%w: %s has no base chain of nat", ErrUnavailable, src.ID)
	}
	before := newNativeCopy(src, true)
	before.hooks = c.hooks
	filters, err := before.bases(func(Hook, *native.Chain) {})
	if err != nil {
		return nil, err
	}
	maps.Copy(n.chains, before.chains)
	maps.Copy(n.sets, before.sets)
	c.native = n.table(append(bases, filters...), held)
	return c, nil
}

// Translates reports whether a native table has a base chain of nat.
func Translates(t *native.Table) bool {
	return slices.ContainsFunc(t.Chains, func(c native.Chain) bool { return c.Base && nft.String(attr(c.Attrs, unix.NFTA_CHAIN_TYPE)) == "nat" })
}

// A nativeCopy finds the parts of a native table that base chains of one type reach.
type nativeCopy struct {
	src    *native.Table
	chains map[string]bool
	sets   map[string]bool
	// filter selects the base chains that filter before nat, else the base chains of nat. hooks are
	// the hooks of nat.
	filter bool
	hooks  map[Hook]*hook
	byName map[string]*native.Chain
	setsBy map[string]*native.Set
}

// newNativeCopy returns a nativeCopy that has found nothing yet. TranslateNative makes one for
// the base chains of nat, and one with filter for those that filter before nat.
func newNativeCopy(src *native.Table, filter bool) *nativeCopy {
	n := &nativeCopy{src: src, filter: filter, chains: map[string]bool{}, sets: map[string]bool{},
		byName: make(map[string]*native.Chain, len(src.Chains)), setsBy: make(map[string]*native.Set, len(src.Sets))}
	for i := range src.Chains {
		n.byName[src.Chains[i].Name] = &src.Chains[i]
	}
	for i := range src.Sets {
		n.setsBy[src.Sets[i].Name] = &src.Sets[i]
	}
	return n
}

// table returns the copied table: these base chains, the parts that they reach, and the gates.
// held is the kernel's copy of it, whose dynamic sets keep their sizes; nil: there is none.
func (n *nativeCopy) table(bases []native.Chain, held *Copy) *native.Table {
	t := &native.Table{ID: n.src.ID.Family.Table(NameOf(n.src.ID)), Objects: n.src.Objects, Chains: bases}
	t.Attrs = number(nil, unix.NFTA_TABLE_FLAGS, tableOwned)
	t.Attrs = nft.AppendAttr(t.Attrs, tableUserdata, append(append([]byte{0, byte(len(comment) + 1)}, comment...), 0), 0)
	for i := range n.src.Chains {
		if chain := &n.src.Chains[i]; n.chains[chain.Name] && !chain.Base {
			t.Chains = append(t.Chains, *chain)
		}
	}
	dynamic := held.dynamicSets()
	for i := range n.src.Sets {
		if set := &n.src.Sets[i]; n.sets[set.Name] {
			t.Sets = append(t.Sets, smaller(*set, dynamic[set.Name]))
		}
	}
	for _, h := range Hooks() {
		t.Sets = append(t.Sets, native.Set{Name: setOf(h), Flags: gateFlags, Attrs: gateSet()})
	}
	return t
}

// dynamicSize is the least size of a copied set to which packets add elements.
const dynamicSize = 1024

// smaller returns a set with room for its elements while the copy is open. The kernel takes 1
// MiB for a set of 65,535 elements that packets add. kube-proxy has such a set for each
// endpoint with session affinity. With 300 such endpoints, 1,000 services take 309 MiB (Linux
// 6.18). held is the set as the kernel has it; nil: it has none. Its size stays: elements that
// packets have added since are not written into it.
func smaller(s native.Set, held *native.Set) native.Set {
	size := uint32(dynamicSize)
	for int(size) < 2*len(s.Elements) {
		size *= 2
	}
	desc := attr(s.Attrs, unix.NFTA_SET_DESC)
	if !s.Dynamic() || desc == nil {
		return s
	}
	room := nft.AttrNumber(desc, unix.NFTA_SET_DESC_SIZE)
	if held != nil && held.Flags == s.Flags && sizeOf(held) <= room && bytes.Equal(sizeless(held.Attrs), sizeless(s.Attrs)) {
		s.Attrs = held.Attrs
		return s
	}
	if room <= size {
		return s
	}
	desc = number(except(desc, unix.NFTA_SET_DESC_SIZE), unix.NFTA_SET_DESC_SIZE, size)
	s.Attrs = nft.AppendAttr(except(s.Attrs, unix.NFTA_SET_DESC), unix.NFTA_SET_DESC|unix.NLA_F_NESTED, desc, 0)
	return s
}

// dynamicSets returns the sets of a native copy to which packets add elements, by name.
// nativeCopy.table keeps their sizes. A nil copy, or a copy of nat, has none.
func (c *Copy) dynamicSets() map[string]*native.Set {
	if c == nil || c.native == nil {
		return nil
	}
	all := map[string]*native.Set{}
	for i := range c.native.Sets {
		if s := &c.native.Sets[i]; s.Dynamic() {
			all[s.Name] = s
		}
	}
	return all
}

// sizeOf returns the number of elements for which a set has room.
func sizeOf(s *native.Set) uint32 {
	return nft.AttrNumber(attr(s.Attrs, unix.NFTA_SET_DESC), unix.NFTA_SET_DESC_SIZE)
}

// sizeless returns a set's attributes without its size.
func sizeless(attrs []byte) []byte {
	return append(except(attrs, unix.NFTA_SET_DESC), except(attr(attrs, unix.NFTA_SET_DESC), unix.NFTA_SET_DESC_SIZE)...)
}

// except returns a list of attributes without those of one kind, in new memory. It ends at
// damaged attributes. smaller replaces the size of a set by it.
func except(list []byte, kind uint16) (rest []byte) {
	for len(list) > 0 {
		is, _, after, err := nft.NextAttr(list)
		if err != nil {
			return rest
		}
		if is != kind {
			rest = append(rest, list[:len(list)-len(after)]...)
		}
		list = after
	}
	return rest
}

// bases copies the base chains of the wanted type, each with its gate, and finds the parts that
// they reach. It calls found for each with its hook. An error wraps ErrUnavailable.
func (n *nativeCopy) bases(found func(Hook, *native.Chain)) (all []native.Chain, err error) {
	for i := range n.src.Chains {
		c := &n.src.Chains[i]
		if !c.Base {
			continue
		}
		copied, h, err := n.base(c)
		if err != nil {
			return nil, err
		}
		if copied != nil {
			all = append(all, *copied)
			found(h, c)
		}
	}
	return all, nil
}

// priorityOfDNAT is the priority of nat chains that translate destinations (NF_IP_PRI_NAT_DST).
const priorityOfDNAT = -100

// base returns the copy of base chain c for the priority behind it, with its gate, and c's hook.
// bases calls it for each base chain. It adds the parts that c reaches to n. The copy is nil if
// the gap needs none: n.filter wants the filters that packets pass before nat's translation, and
// else only nat's chains count. ErrUnavailable means that the gap needs a copy of c and there
// can be none, so that the table gets none.
func (n *nativeCopy) base(c *native.Chain) (*native.Chain, Hook, error) {
	kind := nft.String(attr(c.Attrs, unix.NFTA_CHAIN_TYPE))
	h := Hook(nft.AttrNumber(attr(c.Attrs, unix.NFTA_CHAIN_HOOK), unix.NFTA_HOOK_HOOKNUM))
	priority, err := nft.AttrUint32(nft.AttrPath(c.Attrs, unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_PRIORITY))
	switch {
	case n.filter && (kind == "nat" || n.hooks[h] == nil || err == nil && int32(priority) >= priorityOfDNAT), !n.filter && kind != "nat":
		return nil, 0, nil
	case err != nil || !slices.Contains(Hooks(), h) || n.filter && kind != "filter":
		return nil, 0, fmt.Errorf("%w: base chain %s of type %s is at %s", ErrUnavailable, c.Name, kind, h)
	}
	policy := uint32(nfAccept)
	if value := attr(c.Attrs, unix.NFTA_CHAIN_POLICY); value != nil {
		policy = nft.AttrNumber(c.Attrs, unix.NFTA_CHAIN_POLICY)
	}
	hooked := binary.BigEndian.AppendUint32(nil, uint32(h))
	attrs := nft.AppendAttr(nil, unix.NFTA_HOOK_HOOKNUM, hooked, 0)
	attrs = number(attrs, unix.NFTA_HOOK_PRIORITY, priority+1)
	attrs = nft.AppendAttr(nil, unix.NFTA_CHAIN_HOOK|unix.NLA_F_NESTED, attrs, 0)
	attrs = number(nft.AppendAttr(attrs, unix.NFTA_CHAIN_TYPE, kind, 1), unix.NFTA_CHAIN_POLICY, nfAccept)
	copied := &native.Chain{Name: c.Name, Base: true, Attrs: attrs}
	front := []rule{gate(h)}
	if !n.filter {
		front = inFront(h)
	}
	for _, r := range front {
		copied.Rules = append(copied.Rules, native.Rule{Attrs: nft.AppendAttr(nil, unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, r.expressions, 0)})
	}
	copied.Rules = append(copied.Rules, c.Rules...)
	if policy != nfAccept { // a policy would also drop behind a gate that is shut
		last := nft.AppendAttr(nil, unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, verdict(nil, policy), 0)
		copied.Rules = append(copied.Rules, native.Rule{Attrs: last})
	}
	n.chains[c.Name] = true
	return copied, h, n.rules(c)
}

// statelessly has the expressions that do the same to a packet if they are evaluated once or twice.
var statelessly = map[string]bool{"immediate": true, "lookup": true, "cmp": true, "range": true, "bitwise": true, "byteorder": true,
	"fib": true, "reject": true, "counter": true, "payload": true, "meta": true, "ct": true}

// twice returns an error if the real table and the copy may not both evaluate an expression: it
// has a state or changes the packet. rules checks chains that filter by it; after an error
// there is no copy.
func twice(e nft.Expression) error {
	writes := map[string]uint16{"payload": unix.NFTA_PAYLOAD_SREG, "meta": unix.NFTA_META_SREG, "ct": unix.NFTA_CT_SREG}
	if kind, may := writes[e.Name]; !statelessly[e.Name] || may && attr(e.Data, kind) != nil {
		return fmt.Errorf("it filters by %q before it translates", e.Name)
	}
	return nil
}

// rules finds the chains and sets to which a chain's rules lead, so that table copies them. It
// follows them to their end. An error wraps ErrUnavailable: a part was not read, or may not be
// evaluated twice.
func (n *nativeCopy) rules(c *native.Chain) error {
	for _, r := range c.Rules {
		err := nft.Rule{Expressions: attr(r.Attrs, unix.NFTA_RULE_EXPRESSIONS)}.Each(func(e nft.Expression) error {
			if n.filter {
				if err := twice(e); err != nil {
					return err
				}
			}
			switch e.Name {
			case "immediate":
				return n.verdict(attr(e.Data, unix.NFTA_IMMEDIATE_DATA))
			case "lookup":
				return n.set(nft.String(attr(e.Data, unix.NFTA_LOOKUP_SET)))
			case "dynset":
				return n.set(nft.String(attr(e.Data, unix.NFTA_DYNSET_SET_NAME)))
			case "objref":
				return n.set(nft.String(attr(e.Data, unix.NFTA_OBJREF_SET_NAME)))
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("%w: chain %s: %w", ErrUnavailable, c.Name, err)
		}
	}
	return nil
}

// verdict finds the chain to which the data of an expression or element leads, and the parts
// that this chain reaches. Data without a chain is no error.
func (n *nativeCopy) verdict(data []byte) error {
	name := nft.String(nft.AttrPath(data, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CHAIN))
	if name == "" || n.chains[name] {
		return nil
	}
	n.chains[name] = true
	if c := n.byName[name]; c != nil {
		return n.rules(c)
	}
	return fmt.Errorf("chain %q was not read", name)
}

// set finds a set that a rule names, and the chains to which its elements lead. An empty name
// is no error: an objref need not name a set.
func (n *nativeCopy) set(name string) error {
	if name == "" || n.sets[name] {
		return nil
	}
	n.sets[name] = true
	s := n.setsBy[name]
	if s == nil {
		return fmt.Errorf("set %q was not read", name)
	}
	for _, e := range s.Elements {
		if err := n.verdict(attr(e, unix.NFTA_SET_ELEM_DATA)); err != nil {
			return err
		}
	}
	return nil
}

// putNative writes the difference into the existing table; PutPiece calls it. It removes the
// table if Amend cannot write the difference, or the kernel refuses it. more: the next PutPiece
// must build it again. Into an open table it writes nothing. The caller has locked s.
func (s *Standby) putNative(c *Copy) (more bool, err error) {
	t := s.tables[c.ID]
	if len(t.open) > 0 {
		return false, fmt.Errorf("%w: table %s is open", ErrOutdated, t.name)
	}
	t.bytes, t.took = 0, 0
	b := nft.NewBatch()
	err = c.native.Amend(b, t.held.native, s.setName)
	if err == nil && b.Messages() > 1 {
		err = s.send(t, b)
	}
	if err == nil {
		t.held = c
		return false, nil
	}
	if err := s.remove(t); err != nil {
		return false, err
	}
	return true, nil
}

// fillNative writes a native copy's content into its new, empty table, in transactions of
// little more than Piece bytes. Until Open no packet passes its gates. pause runs after each
// transaction; its error ends the fill. build calls it. The caller has locked s.
func (s *Standby) fillNative(t *table, c *Copy, pause func() error) error {
	t.held = c
	return c.native.FillInPieces(min(s.cfg.Piece, nativePiece), func(b *nft.Batch) error {
		if err := s.send(t, b); err != nil {
			return err
		}
		return pause()
	})
}

// openNative opens hooks of a native copy in one transaction, with the changes of pending that
// the kernel lacks. Open calls it. If the changes cannot be written, it opens nothing. The
// caller has locked s.
func (s *Standby) openNative(t *table, hooks []Hook, pending *Copy) error {
	w := &writer{s: s, t: t, next: pending, whole: true, opens: hooks}
	w.begin()
	if err := pending.native.Amend(w.b, t.held.native, s.setName); err != nil {
		return err
	}
	if err := errors.Join(w.open(), w.flush()); err != nil {
		return err
	}
	t.opened(hooks, pending)
	t.held = pending
	return nil
}

// setName returns a new name for a set that belongs to a rule.
func (s *Standby) setName() string {
	s.names++
	return fmt.Sprintf("__standby%d", s.names)
}
