package native

import (
	"errors"
	"maps"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
)

// refusalsMost bounds how often a transaction is written again without refused parts.
const refusalsMost = 64

// A seeker finds the parts of refused messages while their batch is written again.
type seeker struct {
	messages []int
	hits     int // the number of them that wrote a part that can be left out
	found    []sought
}

// A sought is the content of one message: a part of a table, or n elements from there on.
type sought struct {
	spot Spot
	n    int
}

// wrote notes the part that the last message writes, if a seeker searches for that message: the
// kernel refused it. of is the chain, set, object or flowtable, in the index of a rule or the
// first element, and n the number of elements. If rules are chained, only the first is noted.
func (w *writer) wrote(kind nft.ObjectKind, of any, in, n int) {
	s := w.o.seek
	if s == nil || !slices.Contains(s.messages, w.b.Messages()) {
		return
	}
	if s.hits++; !w.chained || s.hits == 1 {
		s.found = append(s.found, sought{Spot{kind, w.place(of), in}, n})
	}
}

// place returns the index of a chain, set, object or flowtable (a pointer into the table) in
// its list. With it leaves and wrote name a part by its Spot.
func (w *writer) place(of any) int {
	if w.places == nil {
		w.places = map[any]int{}
		for i := range w.t.Chains {
			w.places[&w.t.Chains[i]] = i
		}
		for i := range w.t.Sets {
			w.places[&w.t.Sets[i]] = i
		}
		for i := range w.t.Objects {
			w.places[&w.t.Objects[i]] = i
		}
		for i := range w.t.Flowtables {
			w.places[&w.t.Flowtables[i]] = i
		}
	}
	return w.places[of]
}

// leaves reports whether the writer leaves a part out: it is quarantined or, in an admission,
// in force already. of and in are as for wrote. Parts within a nameless chain or set are left
// out with it.
func (w *writer) leaves(kind nft.ObjectKind, of any, in int) bool {
	if len(w.o.held) == 0 && w.o.fresh == nil {
		return false
	}
	s := Spot{kind, w.place(of), in}
	switch {
	case kind == nft.Rules && w.t.Chains[s.At].Bound:
		s = Spot{Kind: nft.Chains, At: s.At}
	case kind == nft.Elements && w.t.Sets[s.At].Anonymous():
		s = Spot{Kind: nft.Sets, At: s.At}
	}
	_, held := w.o.held[s]
	return held || w.o.fresh != nil && !w.o.fresh[s]
}

// position returns the handle of the rule before which rule at is inserted, and the message's
// flags. Only an admission inserts; 0: the rule is appended.
func (w *writer) position(c *Chain, at int) (uint64, netlink.HeaderFlags) {
	if w.o.fresh != nil {
		for _, r := range c.Rules[at+1:] {
			if r.Handle != 0 {
				return r.Handle, netlink.Create
			}
		}
	}
	return 0, netlink.Create | netlink.Append
}

// add writes the elements that an existing set lacks, in an admission. set calls it for a set
// that is not written; in another repair it writes nothing.
func (w *writer) add(s *Set) error {
	if w.o.fresh == nil {
		return nil
	}
	if err := w.beforeElements(s); err != nil {
		return err
	}
	w.elements(s, func() { w.b.Text(unix.NFTA_SET_ELEM_LIST_SET, s.Name) })
	return nil
}

// blames reports whether the kernel refused a message for its content, and not for want of memory.
func blames(refused *nft.RefusedError) bool {
	return !slices.ContainsFunc([]error{unix.ENOMEM, unix.ENOBUFS, unix.EINTR, unix.EAGAIN}, func(e error) bool { return errors.Is(refused.Errno, e) })
}

// Held returns the parts that the last write left out, in the order of the table. The kernel
// refused them, or others that they need.
func (r Repair) Held() []Held {
	h := newHolder(r.Want, nil, r.held)
	return h.list()
}

// Whole reports whether the repair leaves nothing out.
func (r Repair) Whole() bool { return len(r.held) == 0 }

// Written returns the table that the repair makes: Want without the parts that are left out.
// Repaired compares the read after the replay with it.
func (r Repair) Written() *Table {
	if r.Whole() {
		return r.Want
	}
	return newHolder(r.Want, nil, r.held).reduced()
}

// Leave leaves a part out of the repair, with all parts that must not be written without it. It
// reports whether it can: not if the part is in force.
func (r *Repair) Leave(s Spot, why string) bool {
	return r.leave([]sought{{s, 1}}, why)
}

// leave is Leave for all parts of a refused message. If the message has several elements, the
// refused one is not known: the next try sends each in a message of its own (single). any
// reports whether the next try writes anything else than this one; without that, another try
// makes no sense.
func (r *Repair) leave(found []sought, why string) (any bool) {
	h := newHolder(r.Want, r.writes(), r.held)
	for _, f := range found {
		several := f.spot.Kind == nft.Elements && f.n > 1 && !h.nameless(f.spot)
		if several {
			list := r.Want.Sets[f.spot.At].Elements[f.spot.In:][:f.n]
			several = f.n > 2 || !isEnd(list[1]) || isEnd(list[0])
		}
		switch {
		case !several:
			any = h.take(f.spot, why) || any
		case !r.single[f.spot.At]:
			r.single = maps.Clone(r.single)
			if r.single == nil {
				r.single = map[int]bool{}
			}
			r.single[f.spot.At], any = true, true
		}
	}
	h.close()
	r.held = h.held
	return any
}

// writes returns a function that reports whether the repair writes a part. A part that is in
// force already cannot be left out, nor must it wait.
func (r *Repair) writes() func(Spot) bool {
	switch {
	case r.fresh != nil:
		return func(s Spot) bool { return r.fresh[s] }
	case r.fills() && !(owners.HabitsOf(r.Want.ID).KeepsHandles && r.emptied()):
		return prepareRefill(nft.NewBatch(), r.Want, r.Now, Options{}, r.Remedy == ByMerge).writes
	}
	return func(Spot) bool { return true }
}

// leaveRefused leaves out of repairs the parts that the kernel refused in their transaction,
// for Kernel.Write. witnesses writes the batch's first messages again, so that the numbers
// match. It reports whether another try makes sense: not if a table itself is refused, or
// memory was short.
func leaveRefused(refused *nft.RefusedError, repairs []Repair, witnesses func(b *nft.Batch) error) bool {
	if !blames(refused) {
		return false
	}
	b, any := nft.NewBatch(), false
	if witnesses(b) != nil {
		return false
	}
	for i := range repairs {
		r := &repairs[i]
		s := &seeker{messages: refused.Messages}
		before := b.Messages()
		if _, err := r.writeSought(b, s); err != nil {
			return false
		}
		for _, m := range refused.Messages {
			if m > before && m <= b.Messages() {
				s.hits--
			}
		}
		if s.hits < 0 { // the table itself is refused
			return false
		}
		any = len(s.found) > 0 && r.leave(s.found, refused.Errno.Error()) || any
	}
	return any
}

// Admission returns the repair that puts quarantined parts into a table, and the parts that stay in
// quarantine: see With.
func Admission(now *Table, held []Held) (r Repair, still []Held) {
	whole, fresh, still := now.With(held)
	return Repair{Remedy: ByAdmission, Want: whole, Now: now, fresh: fresh}, still
}
