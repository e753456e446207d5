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

// A seeker finds the parts of refused messages, while their batch is written once more.
type seeker struct {
	messages []int
	hits     int // of these, so many say something that can be left out
	found    []sought
}

// A sought is the content of one message: a part of a table, or so many elements from there on.
type sought struct {
	spot Spot
	n    int
}

// wrote notes the part that the last message writes.
func (w *writer) wrote(kind nft.ObjectKind, of any, in, n int) {
	s := w.o.seek
	if s == nil || !slices.Contains(s.messages, w.b.Messages()) {
		return
	}
	if s.hits++; !w.chained || s.hits == 1 {
		s.found = append(s.found, sought{Spot{kind, w.place(of), in}, n})
	}
}

// place returns where a chain, set, object or flowtable is in its list.
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

// leaves reports whether the writer leaves a part out: it is held, or is in force already.
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

// position returns the handle of the rule before which a rule goes, and how it is written: at the
// end, unless the chain has rules already.
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

// add writes those elements of a set that do not stand in it yet.
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

// blames reports whether a refusal is for the content of a message, and not for want of memory.
func blames(refused *nft.RefusedError) bool {
	return !slices.ContainsFunc([]error{unix.ENOMEM, unix.ENOBUFS, unix.EINTR, unix.EAGAIN}, func(e error) bool { return errors.Is(refused.Errno, e) })
}

// Held returns the parts that the last write left out, because the kernel refused them or others
// that they need, in the order of the table.
func (r Repair) Held() []Held {
	h := newHolder(r.Want, nil, r.held)
	return h.list()
}

// Whole reports whether nothing of the repair was left out.
func (r Repair) Whole() bool { return len(r.held) == 0 }

// Written returns the table that the repair makes: Want, less the parts that are left out.
func (r Repair) Written() *Table {
	if r.Whole() {
		return r.Want
	}
	return newHolder(r.Want, nil, r.held).reduced()
}

// Leave leaves something out of the repair, and everything that must not be written without it. It
// reports whether that can be: not if it stands.
func (r *Repair) Leave(s Spot, why string) bool {
	return r.leave([]sought{{s, 1}}, why)
}

// leave is Leave for the content of messages. Which of several elements in one message is refused
// is not known; they get messages of their own for the next try.
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

// writes returns a function that reports whether the repair writes a part.
func (r *Repair) writes() func(Spot) bool {
	switch {
	case r.fresh != nil:
		return func(s Spot) bool { return r.fresh[s] }
	case r.fills() && !(owners.HabitsOf(r.Want.ID).KeepsHandles && r.emptied()):
		return prepareRefill(nft.NewBatch(), r.Want, r.Now, Options{}, r.Remedy == ByMerge).writes
	}
	return func(Spot) bool { return true }
}

// leaveRefused leaves the parts out of repairs that the kernel refused in their transaction. It
// reports whether it is worth another try.
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

// Admission returns the repair that puts held parts into a table, and the parts that are still
// held: not those that are in force again, or that the owner has decided about since.
func Admission(now *Table, held []Held) (r Repair, still []Held) {
	whole, fresh, still := now.With(held)
	return Repair{Remedy: ByAdmission, Want: whole, Now: now, fresh: fresh}, still
}
