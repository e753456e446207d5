package native

import (
	"cmp"
	"errors"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file judges tables that are left out. Nobody has their content. The deeds of commits name the
// parts that these took from, and a read or a glimpse shows whether such a part is empty now.

// A Glimpse is a look at a few chains and sets of a table, at one genid.
type Glimpse struct {
	Genid uint32
	// Table has the chains and sets that exist, each with one of its rules or elements. It also has
	// a rule of another chain if there is any. nil: there is no such table.
	Table *Table
	// Used has the chains to which something leads.
	Used map[string]bool
}

// Glimpse looks at these chains and sets of a table that is left out. The error is
// nft.ErrInterrupted if commits do not end.
func (k *Kernel) Glimpse(id tableid.TableID, chains, sets []string) (g Glimpse, err error) {
	for range captures {
		if g, err = k.glimpse(id, chains, sets); !errors.Is(err, nft.ErrInterrupted) {
			break
		}
	}
	return g, err
}

// glimpse makes one attempt.
func (k *Kernel) glimpse(id tableid.TableID, chains, sets []string) (g Glimpse, err error) {
	g.Used = map[string]bool{}
	if g.Genid, err = k.conn.Genid(); err != nil {
		return g, err
	}
	_, err = k.conn.Object(nft.Tables, id.Family, []nft.StringAttr{{Kind: unix.NFTA_TABLE_NAME, Value: id.Name}}, func(attrs []byte) (err error) {
		g.Table, err = decodeTable(id.Family, attrs)
		return err
	})
	if err == nil && g.Table != nil {
		err = k.glimpseParts(&g, chains, sets)
	}
	if after, again := k.conn.Genid(); again != nil || after != g.Genid {
		return g, cmp.Or(again, nft.ErrInterrupted)
	}
	return g, err
}

// glimpseParts looks at the parts of a table that exists.
func (k *Kernel) glimpseParts(g *Glimpse, chains, sets []string) error {
	t := g.Table
	one := func(kind nft.ObjectKind, name string, f func(d decoded, attrs []byte)) error {
		form := forms[kind]
		_, err := k.conn.Object(kind, t.ID.Family, []nft.StringAttr{{Kind: form.table, Value: t.ID.Name}, {Kind: form.name, Value: name}}, func(attrs []byte) error {
			d, err := decode(kind, attrs)
			if err == nil {
				f(d, attrs)
			}
			return err
		})
		return err
	}
	for _, name := range chains {
		err := one(nft.Chains, name, func(d decoded, attrs []byte) {
			g.Used[name] = number(attrs, unix.NFTA_CHAIN_USE) > 0
			t.Chains = append(t.Chains, d.chain(attrs))
		})
		if err != nil {
			return err
		}
	}
	first, err := k.firstRule(t.ID, "")
	if err != nil {
		return err
	}
	for i := 0; i < len(t.Chains) && first != ""; i++ {
		if has, err := k.firstRule(t.ID, t.Chains[i].Name); err != nil {
			return err
		} else if has != "" {
			t.Chains[i].Rules = []Rule{{}}
		}
	}
	if first != "" && t.Chain(first) == nil {
		t.Chains = append(t.Chains, Chain{Name: first, Rules: []Rule{{}}})
	}
	for _, name := range sets {
		err := one(nft.Sets, name, func(d decoded, attrs []byte) { t.Sets = append(t.Sets, d.set(attrs)) })
		if err != nil {
			return err
		}
	}
	for i := range t.Sets {
		s := &t.Sets[i]
		if _, err := elementsOf(k.conn, t.ID, s.Name, &scale{most: 1, first: func(e Element) { s.Elements = []Element{e} }}); err != nil && !errors.Is(err, nft.ErrEnough) {
			return err
		}
	}
	return nil
}

// firstRule returns the chain of the first rule of a table, or of one of its chains; "" if it has
// none.
func (k *Kernel) firstRule(id tableid.TableID, chain string) (of string, err error) {
	form := forms[nft.Rules]
	asked := []nft.StringAttr{{Kind: form.table, Value: id.Name}}
	if chain != "" {
		asked = append(asked, nft.StringAttr{Kind: form.name, Value: chain})
	}
	err = k.conn.EachObject(nft.Rules, id.Family, asked, func(attrs []byte) error {
		d, err := decode(nft.Rules, attrs)
		if err == nil && d.table == id.Name && (chain == "" || d.name == chain) {
			of, err = d.name, nft.ErrEnough
		}
		return err
	})
	if errors.Is(err, nft.ErrEnough) {
		err = nil
	}
	return of, err
}

// Parts returns the chains and sets that a glimpse of a table has to show: those that the deeds took
// from, and those of an earlier finding.
func Parts(deeds []*Deed, f Finding) (chains, sets []string) {
	all, both := map[string]bool{}, map[string]bool{}
	for _, d := range deeds {
		for name := range d.Rules {
			all[name] = true
		}
		for name := range d.Elements {
			both[name] = true
		}
	}
	for _, c := range f.Changes {
		switch c.Kind {
		case nft.Chains:
			all[c.Name] = true
		case nft.Sets:
			both[c.Name] = true
		}
	}
	return slices.Sorted(maps.Keys(all)), slices.Sorted(maps.Keys(both))
}

// Lasts reports whether a part that a table lost while it was left out is empty or gone still.
func (f Finding) Lasts(now *Table) bool {
	if f.Verdict != Emptied || now == nil {
		return false
	}
	chains, sets := now.chainsByName(), now.setsByName()
	return slices.ContainsFunc(f.Changes, func(c Change) bool {
		if c.Kind == nft.Sets {
			s := sets[c.Name]
			return s != nil && len(s.Elements) == 0
		}
		chain := chains[c.Name]
		return chain == nil && c.Gone || chain != nil && len(chain.Rules) == 0
	})
}

// Took reports whether a commit took rules or elements of the lost parts.
func (f Finding) Took(d *Deed) bool {
	return slices.ContainsFunc(f.Changes, func(c Change) bool {
		return c.Kind == nft.Chains && d.Rules[c.Name] > 0 || c.Kind == nft.Sets && d.Elements[c.Name] > 0
	})
}

// TooLarge returns the finding of a table that lost parts, and is left out before it has them again.
func (f Finding) TooLarge() Finding {
	f.Changes = slices.DeleteFunc(slices.Clone(f.Changes), func(c Change) bool { return !c.Empty && !c.Gone })
	f.Remedy, f.Why = NoRemedy, f.Why+tooLarge
	return f
}

const tooLarge = "; it was too large (--max-rules), so canaryd cannot put it back"

// judgeUnread judges a table that was or is left out. Was becomes the table as the deeds show it,
// and f.Changes the parts that are lost. Other parts are judged like those of a table that was read.
func (e *Evidence) judgeUnread(f *Finding) {
	rules, elements := map[string]int{}, map[string]int{}
	for _, d := range e.Deeds { // the last one that took from a part decides
		maps.Copy(rules, d.Rules)
		maps.Copy(elements, d.Elements)
	}
	was := *e.Now
	was.Chains, was.Sets = slices.Clone(was.Chains), slices.Clone(was.Sets)
	for i := range was.Sets {
		if s := &was.Sets[i]; elements[s.Name] > 0 && !s.fleeting() && !s.Anonymous() {
			s.Elements = slices.Concat(s.Elements, []Element{nil})
		}
	}
	stands := map[string]bool{}
	for i := range was.Chains {
		c := &was.Chains[i]
		if stands[c.Name] = true; rules[c.Name] > 0 {
			c.Rules = slices.Concat(c.Rules, []Rule{{}})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(rules)) {
		if !stands[name] { // whether packets entered it is not known
			was.Chains = append(was.Chains, Chain{Name: name, Base: true, Rules: []Rule{{}}})
		}
	}
	e.Was = &was
	f.Why, f.Changes = "it is small enough to be guarded", Diff(e.Was, e.Now)
	lost := e.judgeParts(f)
	for i := range lost {
		if c := &lost[i]; c.Kind == nft.Sets {
			c.Lost = elements[c.Name]
		} else {
			c.Lost = rules[c.Name]
		}
	}
	f.Changes = lost
}
