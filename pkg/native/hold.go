package native

import (
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A Spot is the place of a part in a table. It names a chain, set, object or flowtable by its
// index, or a rule or element within it.
type Spot struct {
	Kind nft.ObjectKind // Chains, Rules, Sets, Elements, Objects or Flowtables
	At   int            // index of the chain, set, object or flowtable
	In   int            // index of the rule or element
}

// A hold is the reason why a part is left out.
type hold struct {
	why   string
	waits bool // the kernel would accept it, but it waits for a rule in front of it
}

// A holder finds the parts that a replay must leave out together with a refused part. Such parts
// belong to it, name it, or must not be in force without it.
type holder struct {
	t *Table
	// writes reports whether the replay writes a part. The other parts are in force already.
	writes func(Spot) bool
	held   map[Spot]hold
	chains map[string]int
	sets   map[string]int
	// owners has, for each nameless chain or set, the rule or element to which it belongs.
	owners map[Spot]Spot
	plain  bool // all base chains are of type filter
	grown  bool
}

// newHolder returns a holder in which the parts held are left out already. A Repair makes one
// to leave out another part, or to list its parts. writes may be nil if no part is added.
func newHolder(t *Table, writes func(Spot) bool, held map[Spot]hold) *holder {
	h := indexed(t)
	h.writes, h.owners = writes, map[Spot]Spot{}
	maps.Copy(h.held, held)
	h.eachOwner(func(owner Spot, list []byte) {
		h.eachNamed(list, func(s Spot) {
			if h.nameless(s) {
				h.owners[s] = owner
			}
		})
	})
	return h
}

// indexed returns a holder that can look up the names in expressions, and leaves out nothing.
// newHolder adds the rest; a cutter needs no more.
func indexed(t *Table) *holder {
	h := &holder{t: t, held: map[Spot]hold{}, chains: map[string]int{}, sets: map[string]int{}, plain: true}
	for i := range t.Chains {
		c := &t.Chains[i]
		h.chains[c.Name] = i
		h.plain = h.plain && (!c.Base || nft.String(attrOf(c.Attrs, unix.NFTA_CHAIN_TYPE)) == "filter")
	}
	for i := range t.Sets {
		h.sets[t.Sets[i].Name] = i
	}
	return h
}

// nameless reports whether a part is a chain or set that belongs to a rule or element, or is
// within one. It is never left out alone, but with its owner.
func (h *holder) nameless(s Spot) bool {
	switch s.Kind {
	case nft.Chains, nft.Rules:
		return h.t.Chains[s.At].Bound
	case nft.Sets, nft.Elements:
		return h.t.Sets[s.At].Anonymous()
	}
	return false
}

// eachOwner calls f for each rule and element of named chains and sets, with the rule's
// expressions. These parts can be left out, with the nameless parts that they name. For an
// element, list has the expressions of a rule with its verdict or object.
func (h *holder) eachOwner(f func(owner Spot, list []byte)) {
	for i := range h.t.Chains {
		if c := &h.t.Chains[i]; !c.Bound {
			for j, r := range c.Rules {
				f(Spot{nft.Rules, i, j}, r.expressions())
			}
		}
	}
	for i := range h.t.Sets {
		if s := &h.t.Sets[i]; !s.Anonymous() {
			for j, e := range s.Elements {
				f(Spot{nft.Elements, i, j}, expressionsOf(s, e))
			}
		}
	}
}

// expressionsOf returns the verdict or object of e, an element of s, as expressions of a rule;
// nil if it has none. So the search for named parts treats rules and elements alike.
func expressionsOf(s *Set, e Element) (list []byte) {
	say := func(name string, data []byte) {
		expression := appendNested(nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, name, 1), unix.NFTA_EXPR_DATA, data)
		list = appendNested(list, unix.NFTA_LIST_ELEM, expression)
	}
	if data := attrOf(e, unix.NFTA_SET_ELEM_DATA); has(data, unix.NFTA_DATA_VERDICT) {
		say("immediate", appendNested(nil, immediateData, data))
	}
	if object := attrOf(e, unix.NFTA_SET_ELEM_OBJREF); object != nil {
		data := appendNumber(nil, unix.NFTA_OBJREF_IMM_TYPE, number(s.Attrs, unix.NFTA_SET_OBJ_TYPE))
		say("objref", nft.AppendAttr(data, unix.NFTA_OBJREF_IMM_NAME, nft.String(object), 1))
	}
	return list
}

// eachNamed calls f for each chain, set, object and flowtable that expressions name. It also
// looks into the nameless chains and sets among them. So callers find the parts that a rule
// needs.
func (h *holder) eachNamed(list []byte, f func(Spot)) {
	seen := map[Spot]bool{} // data from a file may have loops
	var each func(list []byte)
	found := func(s Spot, inner func()) {
		if f(s); h.nameless(s) && !seen[s] {
			seen[s] = true
			inner()
		}
	}
	chain := func(name string) {
		if i, ok := h.chains[name]; ok {
			found(Spot{Kind: nft.Chains, At: i}, func() {
				for _, r := range h.t.Chains[i].Rules {
					each(r.expressions())
				}
			})
		}
	}
	set := func(name string) {
		if i, ok := h.sets[name]; ok {
			found(Spot{Kind: nft.Sets, At: i}, func() {
				s := &h.t.Sets[i]
				for _, e := range s.Elements {
					each(expressionsOf(s, e))
				}
			})
		}
	}
	each = func(list []byte) {
		names(list, set, chain)
		_, _ = mapExpressions(list, func(name string, data []byte) ([]byte, error) {
			switch name {
			case "objref":
				called, kind := nft.String(attrOf(data, unix.NFTA_OBJREF_IMM_NAME)), number(data, unix.NFTA_OBJREF_IMM_TYPE)
				if i := slices.IndexFunc(h.t.Objects, func(o Object) bool { return o.Name == called && o.Type == kind }); i >= 0 {
					f(Spot{Kind: nft.Objects, At: i})
				}
			case "flow_offload":
				called := nft.String(attrOf(data, flowOffloadTable))
				if i := slices.IndexFunc(h.t.Flowtables, func(t Flowtable) bool { return t.Name == called }); i >= 0 {
					f(Spot{Kind: nft.Flowtables, At: i})
				}
			}
			return nil, nil
		})
	}
	each(list)
}

// take leaves out a refused part, for Repair.leave, and reports whether it can: not if the part
// is in force already. For a nameless part it leaves out the owner.
func (h *holder) take(s Spot, why string) bool {
	if s = h.owner(s); h.nameless(s) || !h.writes(s) {
		return false
	}
	h.put(s, hold{why: why})
	return true
}

// owner returns the rule or element to which a part belongs, or the part itself if it has a
// name. Only owners are left out.
func (h *holder) owner(s Spot) Spot {
	if owner, ok := h.owners[h.whole(s)]; ok {
		return owner
	}
	return s
}

// whole returns the nameless chain or set that a rule or element is in, under which owners has
// its owner; else the part itself.
func (h *holder) whole(s Spot) Spot {
	switch {
	case !h.nameless(s):
		return s
	case s.Kind == nft.Rules:
		return Spot{Kind: nft.Chains, At: s.At}
	case s.Kind == nft.Elements:
		return Spot{Kind: nft.Sets, At: s.At}
	}
	return s
}

// put leaves out a part, and the other end of an interval with it. take puts refused parts, and
// close the parts that depend on them. A part keeps its first reason, but a missing part
// replaces the reason that it only waits.
func (h *holder) put(s Spot, w hold) {
	if old, known := h.held[s]; known && (!old.waits || w.waits) {
		return
	}
	h.held[s], h.grown = w, true
	if s.Kind != nft.Elements {
		return
	}
	// An interval needs both its beginning and its end.
	if list := h.t.Sets[s.At].Elements; isEnd(list[s.In]) {
		if s.In--; s.In >= 0 && !isEnd(list[s.In]) {
			h.put(s, w)
		}
	} else if s.In++; s.In < len(list) && isEnd(list[s.In]) {
		h.put(s, w)
	}
}

// close leaves out all dependent parts, until there are no more, and last the nameless parts of
// those. Repair.leave calls it once it has taken all refused parts.
func (h *holder) close() {
	for h.grown = true; h.grown; {
		h.grown = false
		h.holdNaming()
		h.holdBehind()
	}
	h.eachOwner(func(owner Spot, list []byte) {
		w, held := h.held[owner]
		if !held {
			return
		}
		h.eachNamed(list, func(s Spot) {
			if h.nameless(s) {
				h.held[s] = w
			}
		})
	})
}

// holdNaming leaves out the rules and elements that are in a missing part, or name one: the
// kernel would refuse them, too. A rule that only waits is no reason.
func (h *holder) holdNaming() {
	h.eachOwner(func(owner Spot, list []byte) {
		if _, held := h.held[owner]; held || !h.writes(owner) {
			return
		}
		in := Spot{Kind: nft.Chains, At: owner.At}
		if owner.Kind == nft.Elements {
			in.Kind = nft.Sets
		}
		if w, held := h.held[in]; held {
			h.put(owner, hold{why: w.why})
			return
		}
		h.eachNamed(list, func(s Spot) {
			if w, held := h.held[s]; held && !w.waits {
				h.put(owner, hold{why: "it needs " + h.called(s) + ", which is missing: " + w.why})
			}
		})
	})
}

// called names a part that is missing, for the reason why another part is left out.
func (h *holder) called(s Spot) string {
	switch s.Kind {
	case nft.Sets:
		return "set " + name(h.t.Sets[s.At].Name)
	case nft.Objects:
		return "object " + name(h.t.Objects[s.At].Name)
	case nft.Flowtables:
		return "flowtable " + name(h.t.Flowtables[s.At].Name)
	}
	return "chain " + name(h.t.Chains[s.At].Name)
}
