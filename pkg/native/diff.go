package native

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A Change is the difference between the former and the present state of one part of a table. Rules
// count for their chain, and elements for their set. A set or chain that belongs to a rule counts
// as that rule.
type Change struct {
	Kind    nft.ObjectKind // Tables, Chains, Sets, Objects or Flowtables
	Name    string
	Gone    bool // the whole part is gone
	Made    bool // the part is new
	Altered bool // its own attributes, or the order of its rules
	Lost    int  // rules or elements that are missing
	New     int  // added rules or elements
	Empty   bool // it has lost its last rule or element
}

// String describes the change for people, in the reason of a Finding and in errors.
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
	counted := func(n int) string {
		what := "rule"
		if c.Kind == nft.Sets {
			what = "element"
		}
		if n != 1 {
			what += "s"
		}
		return fmt.Sprintf("%d %s", n, what)
	}
	say(c.Lost > 0, "%s lost", counted(c.Lost))
	say(c.New > 0, "%s new", counted(c.New))
	say(c.Empty, "empty")
	return fmt.Sprintf("%s %s: %s", c.Kind, c.Name, strings.Join(said, ", "))
}

// Diff returns the changes of content from one table to another, in the order of was. nil means
// no table. Judge finds losses by it, and Repaired the success of a replay. Parts in the same
// memory are equal, so for two values of one followed table the cost depends on the changes
// only.
func Diff(was, now *Table) []Change {
	switch {
	case was == now:
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
	before, after := unlike(was, now)
	byKey := make(map[partKey]part, len(after))
	for _, p := range after {
		byKey[p.partKey] = p
	}
	c := comparison{was: lazyContents(was), now: lazyContents(now)}
	for _, p := range before {
		q, there := byKey[p.partKey]
		delete(byKey, p.partKey)
		if change := c.change(p, q, there); change != nil {
			all = append(all, *change)
		}
	}
	if len(byKey) == 0 {
		return all
	}
	for _, p := range after {
		if _, left := byKey[p.partKey]; left {
			all = append(all, Change{Kind: p.kind, Name: p.name, Made: true, New: p.count(0, p.len())})
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

// A part is one named object of a table. It has one pointer, or none.
type part struct {
	partKey
	chain     *Chain
	set       *Set
	object    *Object
	flowtable *Flowtable
}

// unlike returns the named parts of both tables, without chains and sets in the same memory.
// Diff compares these by content. A pair of values of one followed table leaves only the
// changed parts.
func unlike(was, now *Table) (before, after []part) {
	following := was.Handle == now.Handle // else the handles prove nothing
	align(was.Chains, now.Chains, func(a, b *Chain) int {
		if following && a.Handle == b.Handle && a.Name == b.Name && sameList(a.Attrs, b.Attrs) && sameList(a.Rules, b.Rules) {
			return same
		}
		return cmp.Compare(a.Handle, b.Handle)
	}, func(to *[]part, c *Chain) {
		if !c.Bound {
			*to = append(*to, part{partKey: partKey{nft.Chains, c.Name, 0}, chain: c})
		}
	}, &before, &after)
	align(was.Sets, now.Sets, func(a, b *Set) int {
		if following && a.Handle == b.Handle && a.Name == b.Name && sameList(a.Attrs, b.Attrs) && sameList(a.Elements, b.Elements) {
			return same
		}
		return cmp.Compare(a.Handle, b.Handle)
	}, func(to *[]part, s *Set) {
		if !s.Anonymous() {
			*to = append(*to, part{partKey: partKey{nft.Sets, s.Name, 0}, set: s})
		}
	}, &before, &after)
	add := func(to *[]part, t *Table) {
		for i := range t.Objects {
			o := &t.Objects[i]
			*to = append(*to, part{partKey: partKey{nft.Objects, o.Name, o.Type}, object: o})
		}
		for i := range t.Flowtables {
			f := &t.Flowtables[i]
			*to = append(*to, part{partKey: partKey{nft.Flowtables, f.Name, 0}, flowtable: f})
		}
	}
	add(&before, was)
	add(&after, now)
	return before, after
}

// same is the result of align's compare function for two entries that are the same.
const same = 2

// align walks two lists in the order of handles, and adds the entries that are not the same to
// before and after, by add. compare returns same for equal entries, else the order of their
// handles. unlike calls it for chains and for sets.
func align[T any](was, now []T, compare func(a, b *T) int, add func(to *[]part, v *T), before, after *[]part) {
	for len(was) > 0 && len(now) > 0 {
		c := compare(&was[0], &now[0])
		if c < 1 {
			add(before, &was[0])
		}
		if c == 0 || c == 1 {
			add(after, &now[0])
		}
		if c != 1 {
			was = was[1:]
		}
		if c >= 0 {
			now = now[1:]
		}
	}
	for i := range was {
		add(before, &was[i])
	}
	for i := range now {
		add(after, &now[i])
	}
}

// sameList reports whether two lists are the same memory.
func sameList[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// len returns how many rules or elements a part has; 0 for an object or flowtable.
func (p part) len() int {
	switch {
	case p.chain != nil:
		return len(p.chain.Rules)
	case p.set != nil:
		return len(p.set.Elements)
	}
	return 0
}

// same reports whether rule or element i of p is the same memory as j of q. Then they are
// equal, and need no digest.
func (p part) same(i int, q part, j int) bool {
	if p.chain != nil {
		return sameMemory(p.chain.Rules[i].Attrs, q.chain.Rules[j].Attrs)
	}
	return sameMemory(p.set.Elements[i], q.set.Elements[j])
}

// sameMemory is sameList for bytes, except that an empty slice is the same as none.
func sameMemory(a, b []byte) bool { return len(a) > 0 && sameList(a, b) }

// attrs returns the part's own attributes. If they are the same memory in both tables, change
// computes no digest of them.
func (p part) attrs() []byte {
	switch {
	case p.chain != nil:
		return p.chain.Attrs
	case p.set != nil:
		return p.set.Attrs
	case p.object != nil:
		return p.object.Attrs
	}
	return p.flowtable.Attrs
}

// own returns the digest of the part's own attributes, without counters. A part is Altered if
// it differs.
func (c *contents) own(p part) Digest {
	switch {
	case p.chain != nil:
		return digestOf("", c.chainAttrs(p.chain))
	case p.set != nil:
		return digestOf("", c.setAttrs(p.set))
	case p.object != nil:
		return c.object(*p.object)
	}
	return digestOf("", p.flowtable.Attrs)
}

// count returns the number of rules in a range (to is behind the last), or of elements that are
// not fleeting. Time and packets change fleeting elements, so they are no loss.
func (p part) count(from, to int) int {
	if p.set == nil {
		return to - from
	}
	n := 0
	for _, e := range p.set.Elements[from:to] {
		if !fleeting(p.set, e) {
			n++
		}
	}
	return n
}

// in returns the digests of the rules or elements that count counts, so that change finds those
// that both tables have.
func (c *contents) in(p part, from, to int) (in []Digest) {
	switch {
	case p.chain != nil:
		for _, r := range p.chain.Rules[from:to] {
			in = append(in, c.rule(r))
		}
	case p.set != nil:
		for _, e := range p.set.Elements[from:to] {
			if !fleeting(p.set, e) {
				in = append(in, c.element(e))
			}
		}
	}
	return in
}

type comparison struct{ was, now *contents }

// change compares p with its later state q, for Diff; nil if they are equal. Without there, q
// does not exist: the part is gone. Lost and New are counts by digest, so a moved rule is
// neither.
func (k *comparison) change(p, q part, there bool) *Change {
	c := Change{Kind: p.kind, Name: p.name}
	if !there {
		c.Gone, c.Lost = true, p.count(0, p.len())
		return &c
	}
	// The common beginning and end need no digest. Nor does the rest, if only one part has any.
	n, m, begin, end := p.len(), q.len(), 0, 0
	for begin < min(n, m) && p.same(begin, q, begin) {
		begin++
	}
	for end < min(n, m)-begin && p.same(n-1-end, q, m-1-end) {
		end++
	}
	sameAttrs := sameList(p.attrs(), q.attrs())
	if sameAttrs && begin == n && n == m {
		return nil
	}
	moved := false
	if c.Lost, c.New = p.count(begin, n-end), q.count(begin, m-end); c.Lost > 0 && c.New > 0 {
		was, now := k.was.in(p, begin, n-end), k.now.in(q, begin, m-end)
		count := map[Digest]int{}
		for _, d := range was {
			count[d]++
		}
		for _, d := range now {
			if count[d]--; count[d] >= 0 { // it is in both
				c.Lost, c.New = c.Lost-1, c.New-1
			}
		}
		moved = p.chain != nil && c.Lost == 0 && c.New == 0 && !slices.Equal(was, now)
	}
	c.Altered = moved || !sameAttrs && k.was.own(p) != k.now.own(q)
	c.Empty = c.Lost > 0 && p.count(0, n) == c.Lost && q.count(begin, m-end) == 0
	if c.Altered || c.Lost > 0 || c.New > 0 {
		return &c
	}
	return nil
}
