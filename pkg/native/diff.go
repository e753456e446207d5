package native

import (
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A Change is how one part of a table differs from what it was. Rules count for a chain,
// elements for a set; what belongs to a rule counts as that rule.
type Change struct {
	Kind    nft.ObjectKind // Tables, Chains, Sets, Objects or Flowtables
	Name    string
	Gone    bool // all of it
	Made    bool // it was not there
	Altered bool // its own attributes, or the order of its rules
	Lost    int  // rules or elements that are missing
	New     int  // rules or elements that were not there
	Empty   bool // it has lost its last rule or element
}

// String says it for people.
func (c Change) String() string {
	var said []string
	say := func(is bool, format string, args ...any) {
		if is {
			said = append(said, fmt.Sprintf(format, args...))
		}
	}
	say(c.Gone, "gone")
	say(c.Made, "new")
	say(c.Altered, "altered")
	what := "rules"
	if c.Kind == nft.Sets {
		what = "elements"
	}
	say(c.Lost > 0, "%d %s lost", c.Lost, what)
	say(c.New > 0, "%d %s new", c.New, what)
	say(c.Empty, "empty")
	return fmt.Sprintf("%s %s: %s", c.Kind, c.Name, strings.Join(said, ", "))
}

// Diff returns how the content of a table differs from what it was, in the order of was. A nil
// table is none.
func Diff(was, now *Table) []Change {
	switch {
	case was == nil && now == nil:
		return nil
	case was == nil:
		return []Change{{Kind: nft.Tables, Name: now.ID.Name, Made: true}}
	case now == nil:
		return []Change{{Kind: nft.Tables, Name: was.ID.Name, Gone: true}}
	}
	var all []Change
	if digestOf("", was.Attrs) != digestOf("", now.Attrs) {
		all = append(all, Change{Kind: nft.Tables, Name: was.ID.Name, Altered: true})
	}
	before, after := newContents(was).parts(was), newContents(now).parts(now)
	byKey := map[partKey]part{}
	for _, p := range after {
		byKey[p.partKey] = p
	}
	for _, p := range before {
		q, there := byKey[p.partKey]
		delete(byKey, p.partKey)
		if c := p.change(q, there); c != nil {
			all = append(all, *c)
		}
	}
	for _, p := range after {
		if _, left := byKey[p.partKey]; left {
			all = append(all, Change{Kind: p.kind, Name: p.name, Made: true, New: len(p.in)})
		}
	}
	return all
}

// A partKey names a part of a table.
type partKey struct {
	kind   nft.ObjectKind
	name   string
	number uint32 // an object's type
}

// A part is one named object of a table, with the digests of what is in it.
type part struct {
	partKey
	own     Digest // of its attributes
	in      []Digest
	ordered bool
}

// parts returns what has a name of its own.
func (c *contents) parts(t *Table) []part {
	var all []part
	for i := range t.Chains {
		ch := &t.Chains[i]
		if ch.Bound {
			continue
		}
		p := part{partKey: partKey{nft.Chains, ch.Name, 0}, own: digestOf("", c.chainAttrs(ch)), ordered: true}
		for _, r := range ch.Rules {
			p.in = append(p.in, c.rule(r))
		}
		all = append(all, p)
	}
	for i := range t.Sets {
		s := &t.Sets[i]
		if s.Anonymous() {
			continue
		}
		p := part{partKey: partKey{nft.Sets, s.Name, 0}, own: digestOf("", c.setAttrs(s))}
		for _, e := range s.Elements {
			if !fleeting(s, e) {
				p.in = append(p.in, c.element(e))
			}
		}
		all = append(all, p)
	}
	for _, o := range t.Objects {
		all = append(all, part{partKey: partKey{nft.Objects, o.Name, o.Type}, own: c.object(o)})
	}
	for _, f := range t.Flowtables {
		all = append(all, part{partKey: partKey{nft.Flowtables, f.Name, 0}, own: digestOf("", f.Attrs)})
	}
	return all
}

// change compares a part with what became of it; nil if nothing did.
func (p part) change(q part, there bool) *Change {
	c := Change{Kind: p.kind, Name: p.name}
	if !there {
		c.Gone, c.Lost = true, len(p.in)
		return &c
	}
	count := map[Digest]int{}
	for _, d := range p.in {
		count[d]++
	}
	for _, d := range q.in {
		count[d]--
	}
	for _, n := range count {
		c.Lost += max(n, 0)
		c.New += max(-n, 0)
	}
	moved := p.ordered && c.Lost == 0 && c.New == 0 && !slices.Equal(p.in, q.in)
	c.Altered = p.own != q.own || moved
	c.Empty = len(p.in) > 0 && len(q.in) == 0
	if c.Altered || c.Lost > 0 || c.New > 0 {
		return &c
	}
	return nil
}
