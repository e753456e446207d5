package native

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"iter"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A Digest identifies content: equal digests mean equal content. It ignores handles, the values of
// counters, the remaining time of timeouts, and elements that time or packets change. An anonymous
// set and a chain that belongs to a rule are part of that rule, whatever their names.
type Digest [sha256.Size]byte

// String returns the beginning of the digest, for people.
func (d Digest) String() string { return hex.EncodeToString(d[:8]) }

// Digest returns the digest of the table's content. It is the same for two tables that differ
// only in handles, counters or elements that packets change.
func (t *Table) Digest() Digest {
	c := newContents(t)
	s := newSum(t)
	for i := range t.Chains {
		if !t.Chains[i].Bound {
			s.ordered(c.chain(&t.Chains[i]))
		}
	}
	for i := range t.Sets {
		if set := &t.Sets[i]; !set.Anonymous() {
			s.others.add(c.set(set, set.Name))
		}
	}
	for _, o := range t.Objects {
		s.others.add(c.object(o))
	}
	for _, f := range t.Flowtables {
		s.others.add(digestOf("flowtable "+f.Name, f.Attrs))
	}
	return s.digest()
}

// A sum computes a table's digest from the digests of its parts.
type sum struct {
	h      hash.Hash
	others xor // parts without an order
}

// newSum begins a table's digest with its name and attributes. The caller adds its chains in
// order, and all other parts.
func newSum(t *Table) *sum {
	s := &sum{h: sha256.New()}
	s.h.Write([]byte{uint8(t.ID.Family)})
	s.h.Write([]byte(t.ID.Name))
	s.ordered(digestOf("table", t.Attrs))
	return s
}

func (s *sum) ordered(d Digest) { s.h.Write(d[:]) }

func (s *sum) digest() Digest {
	s.ordered(Digest(s.others))
	return Digest(s.h.Sum(nil))
}

// xor is the digest of a set of digests.
type xor Digest

// add adds a digest to the set, in any order, or removes it: adding it twice leaves the set as
// it was. So the follower changes a set's digest by one element.
func (x *xor) add(d Digest) {
	for i := range x {
		x[i] ^= d[i]
	}
}

// digestOf returns the digest of parts of a table. contents calls it with the kind, and often
// the name, of a whole part in what; the diff calls it with "" for attributes of one kind. It
// hashes the length of each piece too, so that no byte can move to the next piece unseen.
func digestOf(what string, parts ...[]byte) Digest {
	h := sha256.New()
	var size [4]byte
	for _, p := range append([][]byte{[]byte(what)}, parts...) {
		binary.BigEndian.PutUint32(size[:], uint32(len(p)))
		h.Write(size[:])
		h.Write(p)
	}
	return Digest(h.Sum(nil))
}

// contents computes the digests of one table's parts.
type contents struct {
	anonymous map[string]*Set
	bound     map[string]*Chain
	// foundSets and foundChains have the digests of anonymous sets and bound chains, by name. A
	// digest in progress is zero, so that messages of a hostile kernel cannot cause a loop.
	foundSets, foundChains map[string]Digest
	// The first lookups search t itself: both maps above are nil until lookups are many.
	t       *Table
	lookups int
}

// lookupsMost is the number of lookups after which the maps are worth their cost.
const lookupsMost = 32

// newContents returns the contents of a table, for the digests of many parts. The table must
// not get other chains or sets of rules meanwhile, unless the caller updates the maps.
func newContents(t *Table) *contents {
	c := lazyContents(t)
	c.index()
	return c
}

// lazyContents is newContents for a few lookups: it does not make the maps.
func lazyContents(t *Table) *contents {
	return &contents{foundSets: map[string]Digest{}, foundChains: map[string]Digest{}, t: t}
}

// index fills the maps of anonymous sets and bound chains. few calls it when there were many
// lookups, newContents at once.
func (c *contents) index() {
	t := c.t
	c.anonymous, c.bound = map[string]*Set{}, map[string]*Chain{}
	for i := range t.Sets {
		if s := &t.Sets[i]; s.Anonymous() {
			c.anonymous[s.Name] = s
		}
	}
	for i := range t.Chains {
		if ch := &t.Chains[i]; ch.Bound {
			c.bound[ch.Name] = ch
		}
	}
}

// few reports whether to search the table for a name, instead of the maps. setOfRule and
// chainOfRule call it at each lookup.
func (c *contents) few() bool {
	if c.anonymous != nil {
		return false
	}
	if c.lookups++; c.lookups > lookupsMost {
		c.index()
		return false
	}
	return true
}

// setOfRule returns the anonymous set of that name, nil if there is none. Such a set is part of
// its rule's digest; another set counts by its name.
func (c *contents) setOfRule(name string) *Set {
	if !c.few() {
		return c.anonymous[name]
	}
	for i := range c.t.Sets {
		if s := &c.t.Sets[i]; s.Name == name && s.Anonymous() {
			return s
		}
	}
	return nil
}

// chainOfRule returns the chain of that name that belongs to a rule, nil if there is none. Its
// rules are part of the digest of the rule that jumps to it.
func (c *contents) chainOfRule(name string) *Chain {
	if name == "" {
		return nil
	}
	if !c.few() {
		return c.bound[name]
	}
	for i := range c.t.Chains {
		if ch := &c.t.Chains[i]; ch.Name == name && ch.Bound {
			return ch
		}
	}
	return nil
}

// chain returns the digest of a chain's name, attributes and rules. A chain that belongs to a
// rule counts without its name, which the kernel chooses.
func (c *contents) chain(ch *Chain) Digest {
	name := ch.Name
	if ch.Bound {
		name = ""
	}
	parts := [][]byte{c.chainAttrs(ch)}
	for _, r := range ch.Rules {
		d := c.rule(r)
		parts = append(parts, d[:])
	}
	return digestOf("chain "+name, parts...)
}

// chainAttrs returns a chain's attributes without its counters.
func (c *contents) chainAttrs(ch *Chain) []byte { return without(ch.Attrs, unix.NFTA_CHAIN_COUNTERS) }

// rule returns the digest of a rule's expressions and user data.
func (c *contents) rule(r Rule) Digest {
	return digestOf("rule", c.list(r.expressions()), attrOf(r.Attrs, unix.NFTA_RULE_USERDATA))
}

// set returns the digest of a set's attributes and elements.
func (c *contents) set(s *Set, name string) Digest { return c.setOf(s, name, c.elements(s)) }

func (c *contents) setOf(s *Set, name string, elements xor) Digest {
	return digestOf("set "+name, c.setAttrs(s), elements[:])
}

// elements returns the digest of a set's elements, which have no order. Fleeting elements do
// not count: time or packets change them without a notification.
func (c *contents) elements(s *Set) (elements xor) {
	for _, e := range s.Elements {
		if !fleeting(s, e) {
			elements.add(c.element(e))
		}
	}
	return elements
}

// setAttrs returns a set's attributes for its digest. The expressions that its elements get are
// among them, without counted values.
func (c *contents) setAttrs(s *Set) []byte {
	var out []byte
	for a, err := range attributes(s.Attrs) {
		switch {
		case err != nil:
			return s.Attrs
		case a.kind == setExpr:
			out = appendNested(out, a.kind, c.elem(a.value))
		case a.kind == setExpressions:
			out = appendNested(out, a.kind, c.list(a.value))
		default:
			out = appendRaw(out, a)
		}
	}
	return out
}

// fleeting reports whether time or packets may remove an element without a notification. The end of
// an interval expires with its beginning, but has no time of its own.
func fleeting(s *Set, e Element) bool {
	return s.Dynamic() || s.Flags&setTimeout != 0 && (has(e, unix.NFTA_SET_ELEM_EXPIRATION) || isEnd(e))
}

// leadsToBound reports whether an element's verdict leads to a chain that belongs to a rule.
func (c *contents) leadsToBound(e Element) bool {
	return c.chainOfRule(jumpOf(attrOf(e, unix.NFTA_SET_ELEM_DATA))) != nil
}

// element returns the digest of an element's attributes, without counted values and the rest of
// its timeout. Digests of sets are made of it, and comparisons find the same element in two
// tables by it.
func (c *contents) element(e Element) Digest {
	var out []byte
	for a, err := range attributes(e) {
		switch {
		case err != nil:
			return digestOf("element", e)
		case a.kind == unix.NFTA_SET_ELEM_EXPIRATION:
		case a.kind == unix.NFTA_SET_ELEM_EXPR:
			out = appendNested(out, a.kind, c.elem(a.value))
		case a.kind == elemExpressions:
			out = appendNested(out, a.kind, c.list(a.value))
		case a.kind == unix.NFTA_SET_ELEM_DATA && c.chainOfRule(jumpOf(a.value)) != nil:
			out = c.appendBound(out, jumpOf(a.value))
		default:
			out = appendRaw(out, a)
		}
	}
	return digestOf("element", out)
}

// object returns the digest of an object's name and settings.
func (c *contents) object(o Object) Digest {
	return digestOf("object "+o.Name, without(o.Attrs, unix.NFTA_OBJ_DATA), o.settings())
}

// elem returns the content of one expression for the digest of a set or element, and a damaged
// expression unchanged.
func (c *contents) elem(elem []byte) []byte {
	out, err := mapExpression(elem, c.expression)
	if err != nil {
		return elem
	}
	return out
}

// list returns the content of a list of expressions for the digest of a rule, set or element,
// and a damaged list unchanged.
func (c *contents) list(list []byte) []byte {
	out, err := mapExpressions(list, c.expression)
	if err != nil {
		return list
	}
	return out
}

// expression returns the content of the expression of that name, without counted values, for
// mapExpression; nil: it is as in data. A set or chain that belongs to it appears as a digest
// instead of a name. It returns no error.
func (c *contents) expression(name string, data []byte) ([]byte, error) {
	if kind := setNameOf(name); kind != 0 {
		if s := c.setOfRule(nft.String(attrOf(data, kind))); s != nil {
			d := once(c.foundSets, s.Name, func() Digest { return c.set(s, "") })
			return append(without(data, kind), d[:]...), nil
		}
	}
	if name == "immediate" {
		to := jumpOf(attrOf(data, immediateData))
		if c.chainOfRule(to) != nil {
			return c.appendBound(without(data, immediateData), to), nil
		}
	}
	return withoutState(name, data), nil
}

// appendBound appends the digest of a chain that belongs to a rule, in place of the jump to it;
// nothing for another chain.
func (c *contents) appendBound(out []byte, name string) []byte {
	ch := c.chainOfRule(name)
	if ch == nil {
		return out
	}
	d := once(c.foundChains, name, func() Digest { return c.chain(ch) })
	return append(out, d[:]...)
}

// once returns the digest of that name in found, and computes it by f on first use. Within f
// the digest is zero, so that a loop ends.
func once(found map[string]Digest, name string, f func() Digest) Digest {
	d, known := found[name]
	if !known {
		found[name] = Digest{}
		d = f()
		found[name] = d
	}
	return d
}

// jumps yields the target chain of each verdict in rules and elements, as often as it is a
// target. refersTo and largeRemovals find chains by it to which something leads; complete
// counts them.
func (t *Table) jumps() iter.Seq[string] {
	return func(yield func(string) bool) {
		going := true
		jump := func(name string) {
			if going {
				going = yield(name)
			}
		}
		for i := range t.Chains {
			for _, r := range t.Chains[i].Rules {
				names(r.expressions(), func(string) {}, jump)
			}
		}
		for i := range t.Sets {
			for _, e := range t.Sets[i].Elements {
				if to := jumpOf(attrOf(e, unix.NFTA_SET_ELEM_DATA)); to != "" {
					jump(to)
				}
			}
		}
	}
}

// referred has the chains and sets that the rules and elements of a table name.
type referred struct{ chains, sets map[string]bool }

// refersTo collects the chains and sets that the table still uses. judgeParts uses it after a
// change: an emptied chain to which nothing refers is its owner's cleaning and no loss.
func (t *Table) refersTo() referred {
	r := referred{map[string]bool{}, map[string]bool{}}
	for name := range t.jumps() {
		r.chains[name] = true
	}
	for i := range t.Chains {
		for _, rule := range t.Chains[i].Rules {
			names(rule.expressions(), func(set string) { r.sets[set] = true }, func(string) {})
		}
	}
	return r
}
