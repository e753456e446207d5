package native

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A Listing has the entries of one table that a baseline compares, with their digests and words.
// It remembers lookups, so it is for one goroutine.
type Listing struct {
	t        *Table
	contents *contents
	words    *words // nil until words are needed
}

// An Entry is the rules of a chain, or one declaration: of a base chain, a set, an object or a
// flowtable. Elements of named sets are no entry, because owners change them all the time. A set
// or chain that belongs to a rule is part of that rule.
type Entry struct {
	// Kind is "" for the rules of a chain. Otherwise it is "base chain", "set", "map", "flowtable"
	// or the type of an object.
	Kind string
	Name string
	Base bool // packets enter the chain at a hook
	part part
	of   *Listing
}

// NewListing returns the listing of a table.
func NewListing(t *Table) *Listing { return &Listing{t: t, contents: lazyContents(t)} }

// Each calls do for each entry, in the table's order: chains, sets, objects, flowtables. The entry
// is valid during the call, and a copy of it afterwards.
func (l *Listing) Each(do func(*Entry)) {
	e := Entry{of: l}
	say := func(kind, name string, p part) {
		e.Kind, e.Name, e.part = kind, name, p
		do(&e)
	}
	for i := range l.t.Chains {
		c := &l.t.Chains[i]
		if e.Base = c.Base; e.Base {
			say("base chain", c.Name, part{chain: c})
		}
		if !c.Bound {
			say("", c.Name, part{chain: c})
		}
	}
	e.Base = false
	for i := range l.t.Sets {
		if s := &l.t.Sets[i]; !s.Anonymous() {
			say(s.word(), s.Name, part{set: s})
		}
	}
	for i := range l.t.Objects {
		o := &l.t.Objects[i]
		say(objectType(o.Type), o.Name, part{object: o})
	}
	for i := range l.t.Flowtables {
		f := &l.t.Flowtables[i]
		say(nft.Flowtables.String(), f.Name, part{flowtable: f})
	}
}

// Key identifies the entry in its table: a chain's name or, of a declaration, its kind and name.
func (e *Entry) Key() string {
	if e.Kind == "" {
		return e.Name
	}
	return e.Kind + "\x00" + e.Name
}

// CutKey returns the kind and the name of a Key.
func CutKey(key string) (kind, name string) {
	kind, name, declared := strings.Cut(key, "\x00")
	if !declared {
		return "", kind
	}
	return kind, name
}

// Len returns the number of rules of a chain, and 1 for a declaration.
func (e *Entry) Len() int {
	if e.Kind == "" {
		return len(e.part.chain.Rules)
	}
	return 1
}

// Digest returns the digest of rule i, or of the declaration. It ignores handles and counted
// values, and elements of named sets.
func (e *Entry) Digest(i int) Digest {
	if e.Kind == "" {
		return e.of.contents.rule(e.part.chain.Rules[i])
	}
	return e.of.contents.own(e.part)
}

// Memory returns the beginning of the entry's memory: while it and Len are the same, so is the
// content. It is nil for an entry without content.
func (e *Entry) Memory() any {
	attrs := e.part.attrs()
	switch {
	case e.Kind == "" && e.Len() > 0:
		return &e.part.chain.Rules[0]
	case e.Kind != "" && len(attrs) > 0:
		return &attrs[0]
	}
	return nil
}

// Text returns rule i, or the declaration, in the words of Lines.
func (e *Entry) Text(i int) string {
	l := e.of
	if l.words == nil {
		l.words = newWords(l.t)
	}
	if e.Kind == "" {
		return l.words.ruleLine(e.part.chain, i)
	}
	return l.words.declaration(e.part)
}

// word returns "map" for a set whose elements have values, and else "set".
func (s *Set) word() string {
	const objects = 0x40
	if s.Flags&objects != 0 || has(s.Attrs, unix.NFTA_SET_DATA_TYPE) {
		return "map"
	}
	return "set"
}

// newWords returns the words for the parts of a table.
func newWords(t *Table) *words {
	return &words{family: t.ID.Family, chains: t.chainsByName(), sets: t.setsByName()}
}

// ruleLine says rule i of a chain, with the chain's name.
func (w *words) ruleLine(c *Chain, i int) string {
	return "rule " + name(c.Name) + " " + w.rule(c.Rules[i], 0)
}

// declaration says how a part is declared, without its rules or elements.
func (w *words) declaration(p part) string {
	switch {
	case p.chain != nil:
		return w.chain(p.chain)
	case p.set != nil:
		return w.set(p.set)
	case p.object != nil:
		return objectWords(*p.object)
	}
	return fmt.Sprintf("flowtable %s %s", name(p.flowtable.Name), generic(p.flowtable.Attrs))
}
