package standby

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// nativeSets is up to how many sets a native table is copied. It is written by one transaction,
// whose time grows with the square of the sets: 0.35 to 0.9 s of the kernel's at 1,000 services,
// which are 1,198 sets, and 5 to 7 s at 5,000 (Linux 6.18). Other writers wait for it.
const nativeSets = 2000

// TranslateNative makes the copy of a native table, as pkg/native captured it: the same objects in
// a table of another name, of base chains only those of nat. The error wraps ErrUnavailable.
//
// Such a copy is not followed by differences. Standby.Put writes it as a whole if something is
// another, and only while it is shut; Standby.Open leaves such changes outstanding. A table of one
// owner has no rules of others, so that its hooks may be opened whatever is lost.
func TranslateNative(src *native.Table, genid uint32) (*Copy, error) {
	n := &nativeCopy{src: src, chains: map[string]bool{}, sets: map[string]bool{}}
	c := &Copy{ID: src.ID, Genid: genid, chains: map[string]*chain{}, hooks: map[Hook]*hook{}}
	switch {
	case src.Immune():
		return nil, fmt.Errorf("%w: one process owns %s, and no other can flush it", ErrUnavailable, src.ID)
	case src.ID.Name == "nat" || src.ID.Family != tableid.IPv4 && src.ID.Family != tableid.IPv6 && src.ID.Family != tableid.Inet:
		return nil, fmt.Errorf("%w: %s is no native table that translates", ErrUnavailable, src.ID)
	case len(src.Sets) > nativeSets:
		return nil, fmt.Errorf("%w: %s has %d sets, more than %d", ErrUnavailable, src.ID, len(src.Sets), nativeSets)
	}
	t := &native.Table{ID: src.ID.Family.Table(NameOf(src.ID)), Objects: src.Objects}
	t.Attrs = number(nil, unix.NFTA_TABLE_FLAGS, tableOwned)
	t.Attrs = nft.AppendAttr(t.Attrs, tableUserdata, append(append([]byte{0, byte(len(comment) + 1)}, comment...), 0), 0)
	for i := range src.Chains {
		if base := &src.Chains[i]; base.Base {
			copied, h, err := n.base(base)
			if err != nil {
				return nil, err
			}
			if copied != nil {
				t.Chains = append(t.Chains, *copied)
				c.hooks[h] = &hook{name: base.Name, body: &chain{}}
			}
		}
	}
	if len(c.hooks) == 0 {
		return nil, fmt.Errorf("%w: %s has no base chain of nat", ErrUnavailable, src.ID)
	}
	for i := range src.Chains {
		if chain := src.Chains[i]; n.chains[chain.Name] && !chain.Base {
			t.Chains = append(t.Chains, chain)
		}
	}
	for _, set := range src.Sets {
		if n.sets[set.Name] {
			t.Sets = append(t.Sets, set)
		}
	}
	for _, h := range slices.Sorted(maps.Keys(c.hooks)) {
		attrs := number(number(nil, unix.NFTA_SET_KEY_TYPE, typeNFProto), unix.NFTA_SET_KEY_LEN, 1)
		t.Sets = append(t.Sets, native.Set{Name: setOf(h), Attrs: attrs})
	}
	c.native = t
	return c, nil
}

// A nativeCopy finds what of a native table base chains of nat come to.
type nativeCopy struct {
	src    *native.Table
	chains map[string]bool
	sets   map[string]bool
}

// base copies a base chain of nat, with its gate; nil if it is of another kind.
func (n *nativeCopy) base(c *native.Chain) (*native.Chain, Hook, error) {
	if nft.String(attr(c.Attrs, unix.NFTA_CHAIN_TYPE)) != "nat" {
		return nil, 0, nil
	}
	h := Hook(nft.AttrNumber(attr(c.Attrs, unix.NFTA_CHAIN_HOOK), unix.NFTA_HOOK_HOOKNUM))
	priority, err := nft.AttrUint32(nft.AttrPath(c.Attrs, unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_PRIORITY))
	if err != nil || !slices.Contains(Hooks(), h) {
		return nil, 0, fmt.Errorf("%w: base chain %s stands at %s", ErrUnavailable, c.Name, h)
	}
	hooked := binary.BigEndian.AppendUint32(nil, uint32(h))
	attrs := nft.AppendAttr(nil, unix.NFTA_HOOK_HOOKNUM, hooked, 0)
	attrs = number(attrs, unix.NFTA_HOOK_PRIORITY, priority+1)
	attrs = nft.AppendAttr(nil, unix.NFTA_CHAIN_HOOK|unix.NLA_F_NESTED, attrs, 0)
	attrs = number(nft.AppendAttr(attrs, unix.NFTA_CHAIN_TYPE, "nat", 1), unix.NFTA_CHAIN_POLICY, nfAccept)
	first := nft.AppendAttr(nil, unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, gate(setOf(h)).expressions, 0)
	copied := &native.Chain{Name: c.Name, Base: true, Attrs: attrs, Rules: slices.Concat([]native.Rule{{Attrs: first}}, c.Rules)}
	n.chains[c.Name] = true
	return copied, h, n.rules(c)
}

// rules finds what rules lead to.
func (n *nativeCopy) rules(c *native.Chain) error {
	for _, r := range c.Rules {
		err := nft.Rule{Expressions: attr(r.Attrs, unix.NFTA_RULE_EXPRESSIONS)}.Each(func(e nft.Expression) error {
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

// verdict finds the chain to which the data of an expression or element leads.
func (n *nativeCopy) verdict(data []byte) error {
	name := nft.String(nft.AttrPath(data, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CHAIN))
	if name == "" || n.chains[name] {
		return nil
	}
	n.chains[name] = true
	if c := n.src.Chain(name); c != nil {
		return n.rules(c)
	}
	return fmt.Errorf("chain %q was not read", name)
}

// set finds the chains to which a set's elements lead.
func (n *nativeCopy) set(name string) error {
	if name == "" || n.sets[name] {
		return nil
	}
	n.sets[name] = true
	i := slices.IndexFunc(n.src.Sets, func(s native.Set) bool { return s.Name == name })
	if i < 0 {
		return fmt.Errorf("set %q was not read", name)
	}
	for _, e := range n.src.Sets[i].Elements {
		if err := n.verdict(attr(e, unix.NFTA_SET_ELEM_DATA)); err != nil {
			return err
		}
	}
	return nil
}

// putNative writes the whole copy, if it is another than what the kernel holds. s.mu must be held.
func (s *Standby) putNative(c *Copy) error {
	t := s.tables[c.ID]
	if t != nil && len(t.open) > 0 {
		return fmt.Errorf("%w: table %s is open", ErrOutdated, t.name)
	}
	if t != nil && t.held.native.Digest() == c.native.Digest() {
		return nil
	}
	b := nft.NewBatch()
	next := &table{id: c.ID, name: NameOf(c.ID), held: c, gated: true, open: map[Hook]bool{}}
	write := c.native.Create
	if t != nil {
		write = c.native.Replace
	}
	if _, err := write(b, native.Options{}); err != nil {
		return err
	}
	if t == nil { // by itself, so that its refusal says why
		if err := s.make(next); err != nil {
			return err
		}
		if err := s.remove(next); err != nil {
			return err
		}
	}
	if err := s.send(next, b); err != nil {
		return err
	}
	s.tables[c.ID] = next
	return nil
}
