package native

import (
	"cmp"
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file judges tables that are left out, whose content canaryd does not know. The deeds of
// commits name the chains and sets that these took from. A read or a probe shows whether such a
// part is empty now.

// A Probe is a look at a few chains and sets of a table, at one genid.
type Probe struct {
	Genid uint32
	// Table has the chains and sets that exist, each with at most one rule or element, which is
	// blank. If the table has any rule, a nameless chain has one. nil: there is no such table.
	Table *Table
	// Used has the chains to which something leads.
	Used map[string]bool
}

// Parts returns the chains and sets that deeds took from, and those of an earlier finding. Only
// their kinds and names are set.
func Parts(deeds []*Deed, f Finding) (parts []Change) {
	have := map[partKey]bool{}
	add := func(kind nft.ObjectKind, name string, n int) {
		if key := (partKey{kind, name, 0}); n > 0 && !have[key] {
			have[key] = true
			parts = append(parts, Change{Kind: kind, Name: name})
		}
	}
	for _, d := range deeds {
		for name, n := range d.Rules {
			add(nft.Chains, name, n)
		}
		for name, n := range d.Elements {
			add(nft.Sets, name, n)
		}
	}
	for _, c := range f.Changes {
		if c.probed() {
			add(c.Kind, c.Name, c.Lost)
		}
	}
	sorting.Stable(parts, func(a, b Change) int { return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name)) })
	return parts
}

// Probe looks at parts of a table that is left out: see Parts. The error is nft.ErrInterrupted if
// another process committed meanwhile.
func (k *Kernel) Probe(id tableid.TableID, parts []Change) (g Probe, err error) {
	g.Used = map[string]bool{}
	g.Genid, err = k.conn.Genid()
	if err == nil {
		_, err = k.conn.Object(nft.Tables, id.Family, []nft.StringAttr{{Kind: unix.NFTA_TABLE_NAME, Value: id.Name}}, func(attrs []byte) (err error) {
			g.Table, err = decodeTable(id.Family, attrs)
			return err
		})
	}
	if g.Table == nil {
		parts = nil
	}
	for i := 0; i < len(parts) && err == nil; i++ {
		err = k.probePart(&g, parts[i])
	}
	if err == nil && g.Table != nil {
		var any bool
		if any, err = k.filled(nft.Rules, id, ""); any {
			g.Table.Chains = append(g.Table.Chains, Chain{Rules: []Rule{{}}})
		}
	}
	if after, again := k.conn.Genid(); again != nil || after != g.Genid { // the commit may have caused err too
		err = cmp.Or(again, nft.ErrInterrupted)
	}
	return g, err
}

// probePart adds a chain or set to a probe, unless it is gone.
func (k *Kernel) probePart(g *Probe, p Change) error {
	t, form := g.Table, forms[p.Kind]
	asked := []nft.StringAttr{{Kind: form.table, Value: t.ID.Name}, {Kind: form.name, Value: p.Name}}
	var d decoded
	var use uint32
	found, err := k.conn.Object(p.Kind, t.ID.Family, asked, func(attrs []byte) (err error) {
		d, err = decode(p.Kind, attrs)
		use = number(attrs, unix.NFTA_CHAIN_USE)
		return err
	})
	if err != nil || !found {
		return err
	}
	if p.Kind == nft.Chains {
		c := d.chain(d.attrs)
		if has, err := k.filled(nft.Rules, t.ID, p.Name); err != nil {
			return err
		} else if has {
			c.Rules = []Rule{{}}
		}
		t.Chains, g.Used[p.Name] = append(t.Chains, c), use > 0
		return nil
	}
	s := d.set(d.attrs)
	has, err := k.filled(nft.Elements, t.ID, p.Name)
	if has {
		s.Elements = []Element{nil}
	}
	t.Sets = append(t.Sets, s)
	return err
}

// filled reports whether a chain has rules, or a set elements. For rules without a name, it reports
// whether the table has any.
func (k *Kernel) filled(kind nft.ObjectKind, id tableid.TableID, name string) (has bool, err error) {
	asked := []nft.StringAttr{{Kind: unix.NFTA_RULE_TABLE, Value: id.Name}, {Kind: unix.NFTA_RULE_CHAIN, Value: name}} // as for elements
	if name == "" {
		asked = asked[:1]
	}
	err = k.conn.EachObject(kind, id.Family, asked, func(attrs []byte) (err error) {
		if has = kind == nft.Rules; !has {
			err = decodeElements(attrs, func(Element) { has = true })
		}
		if has {
			err = nft.ErrEnough
		}
		return err
	})
	if errors.Is(err, nft.ErrEnough) {
		err = nil
	}
	return has, err
}

// A presence finds the parts of a table by their names.
type presence struct {
	chains map[string]*Chain
	sets   map[string]*Set
}

func (t *Table) presence() presence { return presence{t.chainsByName(), t.setsByName()} }

// lacks reports whether a chain or set is gone, or is empty.
func (s presence) lacks(p Change) (gone, empty bool) {
	if p.Kind == nft.Chains {
		c := s.chains[p.Name]
		return c == nil, c != nil && len(c.Rules) == 0
	}
	set := s.sets[p.Name]
	return set == nil, set != nil && len(set.Elements) == 0
}

// probed reports whether a Probe can show a change: objects and flowtables have no content.
func (c Change) probed() bool { return c.Kind == nft.Chains || c.Kind == nft.Sets }

// Lasts reports whether a part that a table lost is empty still, or gone still. The table was left
// out when it lost the part.
func (f Finding) Lasts(now *Table) bool {
	if f.Verdict != Emptied || now == nil {
		return false
	}
	present := now.presence()
	return slices.ContainsFunc(f.Changes, func(c Change) bool {
		gone, empty := present.lacks(c)
		return c.probed() && (c.Gone && gone || (c.Empty || c.Gone) && empty)
	})
}

// And returns a finding that lasts, together with the parts that the table lost later.
func (f Finding) And(later Finding) Finding {
	if later.Verdict != Emptied {
		return f
	}
	f.Changes = slices.Clone(f.Changes)
	for _, c := range later.Changes {
		if !slices.ContainsFunc(f.Changes, func(had Change) bool { return had.Kind == c.Kind && had.Name == c.Name }) {
			f.Changes = append(f.Changes, c)
		}
	}
	return f
}

// Took reports whether a commit took rules or elements of the lost parts.
func (f Finding) Took(d *Deed) bool {
	for _, c := range f.Changes {
		if c.Kind == nft.Chains && d.Rules[c.Name] > 0 || c.Kind == nft.Sets && d.Elements[c.Name] > 0 {
			return true
		}
	}
	return false
}

// judgeUnread judges a table that was or is left out, by the parts that deeds took from. It judges
// them like those of a table that was read. Was gets these parts, and f.Changes the lost ones.
func (e *Evidence) judgeUnread(f *Finding) {
	f.Why, f.Changes = "it is small enough to be guarded", nil
	was, present := &Table{ID: e.Was.ID, Handle: e.Was.Handle}, e.Now.presence()
	for _, p := range Parts(e.Deeds, Finding{}) {
		if p.Gone, p.Empty = present.lacks(p); p.Kind == nft.Chains {
			p.Lost = e.last(func(d *Deed) int { return d.Rules[p.Name] }).Rules[p.Name]
			// Whether packets entered a chain that is gone is not known.
			was.Chains = append(was.Chains, Chain{Name: p.Name, Base: p.Gone || present.chains[p.Name].Base, Rules: []Rule{{}}})
		} else if p.Lost = e.last(func(d *Deed) int { return d.Elements[p.Name] }).Elements[p.Name]; !p.Gone {
			was.Sets = append(was.Sets, *present.sets[p.Name])
			p.Empty = p.Empty && !present.sets[p.Name].fleeting()
		}
		if p.Empty || p.Gone && p.Kind == nft.Chains {
			f.Changes = append(f.Changes, p)
		}
	}
	e.Was = was
	f.Changes = e.judgeParts(f)
}
