package native

import (
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/nft"
)

// mostHoles bounds the rules that fill holes in a table's handles.
const mostHoles = 4096

// ErrHandles reports that a table cannot get its old handles. Table.Create restores it with new
// ones.
var ErrHandles = errors.New("the handles are too far apart to be had again")

// scratchName is a chain that is deleted at the end of its transaction. The chain and its rules
// take the handles of objects that were deleted before the table was read.
const scratchName = "canaryd-scratch"

// CreateWithHandles is Create with the old handle for each object. Some owners remember
// handles: libvirt deletes by handle, and would delete other rules. The kernel counts handles
// within a table, so it makes all objects in the order of their handles. With ErrHandles
// nothing is written.
func (t *Table) CreateWithHandles(b *nft.Batch, o Options) (left []string, err error) {
	if t.Immune() {
		return nil, fmt.Errorf("table %s: %w", t.ID, ErrImmune)
	}
	all := t.byHandle()
	last := uint64(0)
	if len(all) > 0 {
		last = all[len(all)-1].handle
	}
	if last-uint64(len(all)) > mostHoles {
		return nil, fmt.Errorf("table %s, %d handles of %d: %w", t.ID, len(all), last, ErrHandles)
	}
	k := handleWriter{writer: newWriter(b, t, o), written: map[uint64]bool{}}
	k.chained = true
	k.table(t.Attrs)
	next := uint64(1)
	for _, p := range all {
		for ; next < p.handle; next++ {
			k.fill()
		}
		if k.leaves(p.kind, p.of, p.in) {
			continue
		}
		if err := p.write(&k); err != nil {
			return nil, err
		}
		next++
	}
	k.finish()
	return k.leftBy, nil
}

// A numbered is an object with a handle, and the function that writes it.
type numbered struct {
	handle uint64
	kind   nft.ObjectKind
	of     any
	in     int
	write  func(*handleWriter) error
}

// byHandle returns all objects in the order of their handles, in which CreateWithHandles writes
// them. An object has a higher handle than the objects that it names, because they existed
// before.
func (t *Table) byHandle() []numbered {
	var all []numbered
	for i := range t.Chains {
		c := &t.Chains[i]
		all = append(all, numbered{c.Handle, nft.Chains, c, 0, func(k *handleWriter) error { k.chain(c); return nil }})
		for j, r := range c.Rules {
			all = append(all, numbered{r.Handle, nft.Rules, c, j, func(k *handleWriter) error { k.rule(c, j); return nil }})
		}
	}
	for i := range t.Sets {
		s := &t.Sets[i]
		all = append(all, numbered{s.Handle, nft.Sets, s, 0, func(k *handleWriter) error { k.numberedSet(s); return nil }})
	}
	for i := range t.Objects {
		o := &t.Objects[i]
		all = append(all, numbered{o.Handle, nft.Objects, o, 0, func(k *handleWriter) error { k.object(o); return nil }})
	}
	for i := range t.Flowtables {
		f := &t.Flowtables[i]
		all = append(all, numbered{f.Handle, nft.Flowtables, f, 0, func(k *handleWriter) error { k.flowtable(f); return nil }})
	}
	sorting.Stable(all, func(a, b numbered) int {
		if a.handle < b.handle {
			return -1
		}
		return 1
	})
	return all
}

// A handleWriter writes a table so that its objects keep their handles.
type handleWriter struct {
	*writer
	written map[uint64]bool // rules, by handle
	late    []func()        // elements of sets with names
	scratch bool            // the chain scratchName is written
	holes   int
}

// fill uses up one handle that no object of the table had. The first call makes the chain
// scratchName, and each other call a rule in it. finish deletes them.
func (k *handleWriter) fill() {
	if !k.scratch {
		k.scratch = true
		k.begin(nft.Chains)
		k.b.Text(unix.NFTA_CHAIN_NAME, scratchName)
		k.b.End()
		return
	}
	k.holes++
	k.b.Begin(unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append, k.t.ID.Family)
	k.b.Text(unix.NFTA_RULE_TABLE, k.name)
	k.b.Text(unix.NFTA_RULE_CHAIN, scratchName)
	k.b.End()
}

// numberedSet writes a set at the place of its handle. The elements of a named set may lead to
// younger chains, so finish writes them. An anonymous set has all its elements before the rule
// that it belongs to.
func (k *handleWriter) numberedSet(s *Set) {
	number := k.newSet(s)
	elements := func() {
		k.elements(s, func() { k.b.Number(unix.NFTA_SET_ELEM_LIST_SET_ID, number) })
	}
	if s.Anonymous() {
		elements()
		return
	}
	k.late = append(k.late, elements)
}

// rule writes the rule at index at behind the nearest written rule before it, or as the first.
// Its neighbours may have higher handles, and are written later.
func (k *handleWriter) rule(c *Chain, at int) {
	r := c.Rules[at]
	before := at - 1
	for before >= 0 && !k.written[c.Rules[before].Handle] {
		before--
	}
	flags := netlink.Create
	if before >= 0 {
		flags |= netlink.Append
	}
	k.b.Begin(unix.NFT_MSG_NEWRULE, flags, k.t.ID.Family)
	k.b.Text(unix.NFTA_RULE_TABLE, k.name)
	k.b.Text(unix.NFTA_RULE_CHAIN, c.Name)
	if before >= 0 {
		k.b.Number64(unix.NFTA_RULE_POSITION, c.Rules[before].Handle)
	}
	k.b.Raw(r.Attrs)
	k.b.End()
	k.wrote(nft.Rules, c, at, 1)
	k.written[r.Handle] = true
}

// finish writes the remaining elements, and deletes the chain scratchName with its rules, which
// is no part of the table.
func (k *handleWriter) finish() {
	for _, elements := range k.late {
		elements()
	}
	if !k.scratch {
		return
	}
	for _, message := range []uint16{unix.NFT_MSG_DELRULE, unix.NFT_MSG_DELCHAIN} {
		if message == unix.NFT_MSG_DELRULE && k.holes == 0 {
			continue
		}
		k.b.Begin(message, 0, k.t.ID.Family)
		k.b.Text(unix.NFTA_RULE_TABLE, k.name)
		name := uint16(unix.NFTA_RULE_CHAIN)
		if message == unix.NFT_MSG_DELCHAIN {
			name = unix.NFTA_CHAIN_NAME
		}
		k.b.Text(name, scratchName)
		k.b.End()
	}
}
