package native

import (
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A Held is a part of a table that a replay left out, and that waits in quarantine. It is a value
// of its own, with all parts that belong to it.
type Held struct {
	Kind nft.ObjectKind `json:"kind"` // Chains, Rules, Sets, Elements, Objects or Flowtables
	Name string         `json:"name"` // its own name, or the name of a rule's chain or an element's set
	Text string         `json:"text"` // in words
	Why  string         `json:"why"`
	// Waits: the kernel would accept it, but it must not be in force without a rule in front of it.
	Waits bool `json:"waits,omitempty"`
	// Fleeting: packets or time may remove it.
	Fleeting bool `json:"-"`

	Chain     *Chain     `json:"chain,omitempty"`
	Set       *Set       `json:"set,omitempty"`
	Object    *Object    `json:"object,omitempty"`
	Flowtable *Flowtable `json:"flowtable,omitempty"`
	Rule      *Rule      `json:"rule,omitempty"`
	Elements  []Element  `json:"elements,omitempty"` // one, or the two of an interval
	// Sets and Chains are the nameless parts that belong to it.
	Sets   []Set   `json:"sets,omitempty"`
	Chains []Chain `json:"chains,omitempty"`
	// Before and Behind are the nearest rules of its chain that are not left out; zero: none.
	Before Digest `json:"before,omitzero"`
	Behind Digest `json:"behind,omitzero"`
	// Flush is the ID of the flush that took it. The daemon sets it.
	Flush string `json:"flush,omitempty"`
}

func (h *holder) words() *words {
	return &words{family: h.t.ID.Family, chains: h.t.chainsByName(), sets: h.t.setsByName()}
}

// list returns the parts that are left out, in the order of the table, for Repair.Held.
// Nameless parts are in the part to which they belong. Both ends of an interval are one part.
func (h *holder) list() (list []Held) {
	if len(h.held) == 0 {
		return nil
	}
	w, c := h.words(), lazyContents(h.t)
	add := func(s Spot, of Held, belongs []byte) {
		hold, held := h.held[s]
		if !held || h.nameless(s) {
			return
		}
		of.Kind, of.Why, of.Waits = s.Kind, hold.why, hold.waits
		h.eachNamed(belongs, func(s Spot) {
			switch {
			case !h.nameless(s):
			case s.Kind == nft.Sets:
				of.Sets = append(of.Sets, h.t.Sets[s.At])
			case s.Kind == nft.Chains:
				of.Chains = append(of.Chains, h.t.Chains[s.At])
			}
		})
		list = append(list, of)
	}
	for i := range h.t.Objects {
		o := h.t.Objects[i]
		add(Spot{Kind: nft.Objects, At: i}, Held{Name: o.Name, Text: objectWords(o), Object: &o}, nil)
	}
	for i := range h.t.Flowtables {
		f := h.t.Flowtables[i]
		add(Spot{Kind: nft.Flowtables, At: i}, Held{Name: f.Name, Text: "flowtable " + name(f.Name), Flowtable: &f}, nil)
	}
	for i := range h.t.Sets {
		s := h.t.Sets[i]
		empty := s
		empty.Elements = nil
		add(Spot{Kind: nft.Sets, At: i}, Held{Name: s.Name, Text: w.set(&s), Set: &empty}, nil)
		for j, e := range s.Elements {
			here := Spot{nft.Elements, i, j}
			if _, held := h.held[here]; !held || isEnd(e) && j > 0 && !isEnd(s.Elements[j-1]) {
				continue // an end belongs to its beginning
			}
			of := Held{Name: s.Name, Elements: []Element{e}, Fleeting: fleeting(&s, e)}
			if j+1 < len(s.Elements) && isEnd(s.Elements[j+1]) && !isEnd(e) {
				of.Elements = append(of.Elements, s.Elements[j+1])
			}
			one := s
			one.Elements, w.inlined = of.Elements, 0
			of.Text = "element " + name(s.Name) + " " + strings.Join(w.elements(&one, typesOf(number(s.Attrs, unix.NFTA_SET_KEY_TYPE)), 0, true), ", ")
			add(here, of, expressionsOf(&s, e))
		}
	}
	for i := range h.t.Chains {
		ch := h.t.Chains[i]
		empty := ch
		empty.Rules = nil
		add(Spot{Kind: nft.Chains, At: i}, Held{Name: ch.Name, Text: w.chain(&ch), Chain: &empty}, nil)
		for j, r := range ch.Rules {
			here := Spot{nft.Rules, i, j}
			if _, held := h.held[here]; held {
				w.inlined = 0
				add(here, Held{Name: ch.Name, Text: "rule " + name(ch.Name) + " " + w.rule(r, 0), Rule: &r,
					Before: h.neighbour(c, here, -1), Behind: h.neighbour(c, here, 1)}, r.expressions())
			}
		}
	}
	return list
}

// neighbour returns the nearest rule that is not left out, in front of s (step -1) or behind it
// (1); zero: none. By these two rules With finds the place of a quarantined rule later.
func (h *holder) neighbour(c *contents, s Spot, step int) Digest {
	rules := h.t.Chains[s.At].Rules
	for s.In += step; s.In >= 0 && s.In < len(rules); s.In += step {
		if _, held := h.held[s]; !held {
			return c.rule(rules[s.In])
		}
	}
	return Digest{}
}

// reduced returns the table without the parts that are left out, for Repair.Written. Lists
// without such a part are shared with the table.
func (h *holder) reduced() *Table {
	if len(h.held) == 0 {
		return h.t
	}
	t := *h.t
	stays := func(kind nft.ObjectKind, at, in int) bool {
		_, held := h.held[Spot{kind, at, in}]
		return !held
	}
	t.Chains, t.Sets, t.Objects, t.Flowtables = nil, nil, nil, nil
	for i, c := range h.t.Chains {
		if stays(nft.Chains, i, 0) {
			c.Rules = kept(c.Rules, func(j int) bool { return stays(nft.Rules, i, j) })
			t.Chains = append(t.Chains, c)
		}
	}
	for i, s := range h.t.Sets {
		if stays(nft.Sets, i, 0) {
			s.Elements = kept(s.Elements, func(j int) bool { return stays(nft.Elements, i, j) })
			t.Sets = append(t.Sets, s)
		}
	}
	t.Objects = kept(h.t.Objects, func(i int) bool { return stays(nft.Objects, i, 0) })
	t.Flowtables = kept(h.t.Flowtables, func(i int) bool { return stays(nft.Flowtables, i, 0) })
	return &t
}

// kept returns the entries that stay; the list itself if all of them do. stays gets the index
// of an entry.
func kept[T any](list []T, stays func(i int) bool) []T {
	var out []T
	for i, v := range list {
		if stays(i) {
			out = append(out, v)
		}
	}
	if len(out) == len(list) {
		return list
	}
	return out
}
