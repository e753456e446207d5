package nat

import "net/netip"

// Bounds for unusual rules. The rules of real nodes stay far below.
const (
	maxDepth = 16 // jumps in a row, as in the kernel (NFT_JUMP_STACK_SIZE)
	// maxWays is the number of ways that a walk follows. A flow to a service takes about 20, any
	// other flow 5.
	maxWays = 20000
	// maxSteps is the number of ways that are followed for all flows together.
	maxSteps = 10000000
)

// A cursor iterates in order over the places of some rules. It has sorted lists of them.
type cursor [3][]int32

// next returns the next place; false at the end.
func (c *cursor) next() (place int32, ok bool) {
	from := -1
	for i, list := range c {
		if len(list) > 0 && (from < 0 || list[0] < place) {
			place, from = list[0], i
		}
	}
	if from >= 0 {
		c[from] = c[from][1:]
	}
	return place, from >= 0
}

// A walk takes one packet through a base chain.
type walk struct {
	*Translations
	until   int            // the bound of steps
	backend netip.AddrPort // valid, if leads are of interest
	// leads are the packet's marks at the translations that may lead to backend.
	leads []Mark
	// changes says that the packet may reach a translation.
	changes bool
	// keeps says that such a translation may change nothing.
	keeps bool
	// left is the course of the packet where it leaves the base chain without a translation.
	left course
	// unclear says that some ways were not followed to their ends. The walk then ends.
	unclear bool
}

// A course describes the packet at a place: whether it may reach the place, and its mark there.
type course struct {
	Mark
	reached bool
}

// join returns the course of a packet that may arrive by either of two courses. Bits in which
// their marks differ are unknown.
func (c course) join(other course) course {
	switch {
	case !other.reached:
		return c
	case !c.reached:
		return other
	}
	return course{c.either(other.Mark), true}
}

// walk takes a packet through the base chain c, for Translates and Masquerades.
func (t *Translations) walk(p Packet, c Chain, backend netip.AddrPort) walk {
	t.packet, t.ways = p, t.ways[:0]
	w := walk{Translations: t, until: min(t.steps+maxWays, maxSteps), backend: backend}
	w.left = w.left.join(w.chain(c, course{p.Mark, true}, 0))
	return w
}

// translate notes a translation that the packet may reach.
func (w *walk) translate(way Way) {
	w.changes = true
	w.keeps = w.keeps || !w.packet.changedBy(way)
	if w.backend.IsValid() && way.Verdict == DNAT && way.To.mayBe(w.backend, w.packet.Destination.Port()) {
		w.leads = append(w.leads, way.Mark)
	}
}

// chain takes the packet through one chain, and returns its course behind it. at is its course
// at the first rule, depth the number of jumps before.
func (w *walk) chain(c Chain, at course, depth int) (back course) {
	w.unclear = w.unclear || c == nil || depth > maxDepth
	if w.unclear {
		return course{}
	}
	rules := cursor(c.Candidates(w.packet.Destination))
	for place, ok := rules.next(); ok; place, ok = rules.next() {
		w.packet.Mark = at.Mark
		first := len(w.ways)
		w.ways = c.Ways(place, &w.packet, w.ways)
		ways := w.ways[first:]
		w.steps += max(1, len(ways))
		w.unclear = w.unclear || w.steps > w.until
		if len(ways) > 0 {
			at = course{}
		}
		for _, way := range ways { // the ways in a deeper chain are appended behind
			on := course{way.Mark, true}
			switch way.Verdict {
			case Next:
				at = at.join(on)
			case Return:
				back = back.join(on)
			case Jump:
				at = at.join(w.chain(way.Chain, on, depth+1))
			case Goto:
				back = back.join(w.chain(way.Chain, on, depth+1))
			case DNAT, SNAT, Masquerade:
				w.translate(way)
			case Leave:
				w.left = w.left.join(on)
			default:
				w.unclear = true
			}
		}
		w.ways = w.ways[:first]
		if w.unclear {
			return course{}
		}
		if !at.reached {
			return back
		}
	}
	return back.join(at)
}
