package native

import (
	"errors"
	"fmt"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// elementsSize bounds one message of elements: their list is an attribute, of 64 KiB at most.
const elementsSize = 32 << 10

// Options say how a table is written.
type Options struct {
	// Age is the time since the table was read. It is subtracted from the rest of elements'
	// timeouts. An element with no rest is not written.
	Age time.Duration
	// Lacks reports whether to leave a network device out of a chain or flowtable, because the node
	// no longer has it; nil: none. A kernel may refuse a whole transaction for one such device.
	Lacks func(of nft.ObjectKind, device string) bool

	held   map[Spot]hold // left out
	single map[int]bool  // sets whose elements have a message each
	fresh  map[Spot]bool // missing parts; nil: all parts
	seek   *seeker
}

// ErrImmune reports that one process owns the table, and the kernel lets no other write it.
var ErrImmune = errors.New("the table is owned by one process, which alone may write it")

// A writer writes the messages of one table into a batch.
type writer struct {
	b *nft.Batch
	t *Table
	o Options
	// name is the table's name in the messages. A rehearsal uses another name.
	name string
	// rename has other names for sets of rules, where the kernel has given theirs to others.
	rename  map[string]string
	sets    map[string]*Set // the sets of rules that are not written yet
	bound   map[string]*Chain
	chained bool            // a rule names the rule before it, and is refused without it
	late    bool            // chains that belong to rules are made right before their rules
	stand   map[string]bool // keys of the elements that the written set has already; nil: none
	leftBy  []string        // devices that were left out
	places  map[any]int     // the indices of the parts in their lists, once they are needed
	// cut may send the present batch and begin another; nil: all is one batch.
	cut func() error
}

// newWriter returns a writer of the table t into b. It notes the sets and chains of rules,
// which are written with their rules.
func newWriter(b *nft.Batch, t *Table, o Options) *writer {
	w := &writer{b: b, t: t, o: o, name: t.ID.Name, sets: map[string]*Set{}, bound: map[string]*Chain{}}
	for i := range t.Sets {
		if s := &t.Sets[i]; s.Anonymous() {
			w.sets[s.Name] = s
		}
	}
	for i := range t.Chains {
		if c := &t.Chains[i]; c.Bound {
			w.bound[c.Name] = c
		}
	}
	return w
}

// Create writes the table and everything in it into a batch, which the kernel accepts only if there
// is no such table. Create returns the devices that it left out. After an error cut the batch back.
func (t *Table) Create(b *nft.Batch, o Options) (left []string, err error) {
	if t.Immune() {
		return nil, fmt.Errorf("table %s: %w", t.ID, ErrImmune)
	}
	w := newWriter(b, t, o)
	w.table(t.Attrs)
	err = w.contents()
	return w.leftBy, err
}

// FillInPieces writes the table's content into an existing empty table, such as a new standby.
// It makes several transactions of little more than piece bytes each, which send sends; send's
// error ends it. They have no guard. An attached chain works before all of its rules are there.
func (t *Table) FillInPieces(piece int, send func(*nft.Batch) error) error {
	w := newWriter(nft.NewBatch(), t, Options{})
	w.cut = func() error {
		if w.b.Bytes() < piece {
			return nil
		}
		full := w.b
		w.b = nft.NewBatch()
		return send(full)
	}
	if err := w.contents(); err != nil {
		return err
	}
	return send(w.b)
}

// Replace is Create for an existing table. The same transaction deletes that table.
func (t *Table) Replace(b *nft.Batch, o Options) (left []string, err error) {
	Delete(b, t.ID)
	return t.Create(b, o)
}

// Delete writes the deletion of a table with everything in it. The kernel refuses the whole
// batch if there is no such table.
func Delete(b *nft.Batch, id tableid.TableID) {
	b.Begin(unix.NFT_MSG_DELTABLE, 0, id.Family)
	b.Text(unix.NFTA_TABLE_NAME, id.Name)
	b.End()
}

// table writes the table itself, with these attributes. The kernel refuses it if the table
// exists.
func (w *writer) table(attrs []byte) {
	w.begin(nft.Tables)
	w.b.Raw(attrs)
	w.b.End()
}

// begin begins a message that makes an object, and is refused if the object exists.
func (w *writer) begin(kind nft.ObjectKind) {
	w.b.Begin(uint16(kind), netlink.Create|netlink.Excl, w.t.ID.Family)
	w.b.Text(unix.NFTA_TABLE_NAME, w.name) // 1 in all kinds
}

// contents writes the table's content in an order in which each named part is written first:
// chains, objects, flowtables, sets, rules. The parts that belong to a rule are right before it.
// The kernel searches for them from the end of the transaction (nft_set_lookup_byid,
// nft_set_trans_bind; Linux 6.18).
func (w *writer) contents() error {
	for i := range w.t.Chains {
		w.chain(&w.t.Chains[i])
		if err := w.then(nil); err != nil {
			return err
		}
	}
	for i := range w.t.Objects {
		w.object(&w.t.Objects[i])
	}
	for i := range w.t.Flowtables {
		w.flowtable(&w.t.Flowtables[i])
	}
	for i := range w.t.Sets {
		if s := &w.t.Sets[i]; !s.Anonymous() {
			if err := w.then(w.set(s)); err != nil {
				return err
			}
		}
	}
	for i := range w.t.Chains {
		if c := &w.t.Chains[i]; !c.Bound {
			if err := w.then(w.rules(c)); err != nil {
				return err
			}
		}
	}
	return nil
}

// then ends a batch if it is large, for FillInPieces. No later message belongs to a rule in it.
// err is the error of the last write; if there is one, then returns it and ends nothing.
func (w *writer) then(err error) error {
	if err != nil || w.cut == nil {
		return err
	}
	return w.cut()
}

// chain writes a chain without its rules, on the devices that the node has. A part in
// quarantine, or in force already, is left out, as by all such functions.
func (w *writer) chain(c *Chain) {
	if w.leaves(nft.Chains, c, 0) {
		return
	}
	w.begin(nft.Chains)
	w.b.Text(unix.NFTA_CHAIN_NAME, c.Name)
	w.b.Raw(w.present(nft.Chains, c.Attrs, unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_DEV, hookDevs))
	w.b.End()
	w.wrote(nft.Chains, c, 0, 1)
}

// object writes a stateful object with its settings and counted values. contents writes objects
// before the rules and sets that name them.
func (w *writer) object(o *Object) {
	if w.leaves(nft.Objects, o, 0) {
		return
	}
	w.begin(nft.Objects)
	w.b.Text(unix.NFTA_OBJ_NAME, o.Name)
	w.b.Raw(o.Attrs)
	w.b.End()
	w.wrote(nft.Objects, o, 0, 1)
}

// flowtable writes a flowtable, on the devices that the node has. contents writes flowtables
// before the rules that name them.
func (w *writer) flowtable(f *Flowtable) {
	if w.leaves(nft.Flowtables, f, 0) {
		return
	}
	w.begin(nft.Flowtables)
	w.b.Text(unix.NFTA_OBJ_NAME, f.Name) // NFTA_FLOWTABLE_NAME
	w.b.Raw(w.present(nft.Flowtables, f.Attrs, flowHook, 0, flowHookDevs))
	w.b.End()
	w.wrote(nft.Flowtables, f, 0, 1)
}

// set writes a set and its elements. Elements name their set by its number in the transaction,
// because the kernel would search all sets of the table for a name. An admission adds only the
// missing elements to a set that is in force.
func (w *writer) set(s *Set) error {
	if w.leaves(nft.Sets, s, 0) {
		return w.add(s)
	}
	if err := w.beforeElements(s); err != nil {
		return err
	}
	number := w.newSet(s)
	w.elements(s, func() { w.b.Number(unix.NFTA_SET_ELEM_LIST_SET_ID, number) })
	return nil
}

// beforeElements writes the rules of chains that belong to elements of s. The kernel accepts
// them only before the elements that lead there.
func (w *writer) beforeElements(s *Set) error {
	for i, e := range s.Elements {
		if to := jumpOf(attrOf(e, unix.NFTA_SET_ELEM_DATA)); w.bound[to] != nil && !w.leaves(nft.Elements, s, i) {
			if err := w.before(to); err != nil {
				return err
			}
		}
	}
	return nil
}

// newSet writes a set without its elements, and returns its number in the transaction, by which
// elements name it. The set may get another name (rename).
func (w *writer) newSet(s *Set) uint32 {
	w.begin(nft.Sets)
	number := uint32(w.b.Messages())
	name := s.Name
	if to, ok := w.rename[name]; ok {
		name = to
	}
	w.b.Text(unix.NFTA_SET_NAME, name)
	w.b.Number(unix.NFTA_SET_ID, number)
	w.b.Raw(s.Attrs)
	w.b.End()
	w.wrote(nft.Sets, s, 0, 1)
	return number
}

// elements writes the elements of a set; of writes the attribute that names the set. It leaves
// out the end of an interval whose beginning has expired. The elements are sorted, so an end
// follows its beginning. The kernel may have dropped that beginning and still dump the end.
func (w *writer) elements(s *Set, of func()) {
	var list []byte
	first, end := 0, 0 // the elements in list
	flush := func() {
		if len(list) == 0 {
			return
		}
		w.begin(nft.Elements)
		of()
		w.b.Blob(unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED, list)
		w.b.End()
		w.wrote(nft.Elements, s, first, end-first)
		list = list[:0]
	}
	single := len(w.o.single) > 0 && w.o.single[w.place(s)]
	// The set's timeout in milliseconds; 0: it has none.
	timeout, _ := nft.AttrUint64(attrOf(s.Attrs, unix.NFTA_SET_TIMEOUT))
	begun := true // nft puts an end at 0 into a set that does not begin there
	for i, e := range s.Elements {
		if w.leaves(nft.Elements, s, i) {
			continue // with both ends of an interval
		}
		if w.stand != nil && w.stand[elementKey(e)] {
			continue
		}
		aged := e.aged(w.o.Age, timeout)
		if isEnd(e) && !begun {
			aged = nil
		}
		begun = aged != nil && !isEnd(e)
		if aged == nil {
			continue
		}
		if len(list)+len(aged) > elementsSize || single && !isEnd(e) {
			flush()
		}
		if len(list) == 0 {
			first = i
		}
		list, end = appendNested(list, unix.NFTA_LIST_ELEM, aged), i+1
	}
	flush()
}

// aged returns the element with the rest of its timeout reduced by age, nil if no rest is left:
// elements leaves it out. timeout is the set's in milliseconds, 0: none. The rest never exceeds
// it. An element added after the read of its table has a longer rest (Element.later), which
// Linux 6.12 refuses with ERANGE (nft_add_set_elem).
func (e Element) aged(age time.Duration, timeout uint64) Element {
	value := attrOf(e, unix.NFTA_SET_ELEM_EXPIRATION)
	left, err := nft.AttrUint64(value)
	if err != nil {
		return e
	}
	rest := left
	if gone := uint64(max(age, 0).Milliseconds()); left > gone {
		rest = left - gone
	} else if gone > 0 {
		return nil
	}
	if own, err := nft.AttrUint64(attrOf(e, unix.NFTA_SET_ELEM_TIMEOUT)); err == nil && own > 0 {
		rest = min(rest, own)
	} else if timeout > 0 {
		rest = min(rest, timeout)
	}
	if rest == left {
		return e
	}
	return append(without(e, unix.NFTA_SET_ELEM_EXPIRATION), milliseconds(unix.NFTA_SET_ELEM_EXPIRATION, rest)...)
}

// before writes the rules of a chain that belongs to the following rule or map; for another chain
// it writes nothing. The kernel accepts rules of such a chain only until a verdict leads to it.
func (w *writer) before(chain string) error {
	c := w.bound[chain]
	if c == nil {
		return nil
	}
	delete(w.bound, chain)
	if w.late {
		w.chain(c)
	}
	return w.rules(c)
}

// rules writes the rules of one chain, each behind the parts that belong to it. contents,
// refill and amendment call it once the chain itself is written.
func (w *writer) rules(c *Chain) error {
	for i, r := range c.Rules {
		if w.leaves(nft.Rules, c, i) {
			continue
		}
		expressions := r.expressions()
		var failed error
		each := func(err error) {
			if failed == nil {
				failed = err
			}
		}
		names(expressions, func(set string) {
			if s := w.sets[set]; s != nil {
				delete(w.sets, set)
				each(w.set(s))
			}
		}, func(chain string) { each(w.before(chain)) })
		if failed != nil {
			return failed
		}
		renamed, err := w.renamed(r, expressions)
		if err != nil {
			return err
		}
		position, flags := w.position(c, i)
		w.b.Begin(unix.NFT_MSG_NEWRULE, flags, w.t.ID.Family)
		w.b.Text(unix.NFTA_RULE_TABLE, w.name)
		w.b.Text(unix.NFTA_RULE_CHAIN, c.Name)
		if position != 0 {
			w.b.Number64(unix.NFTA_RULE_POSITION, position)
		}
		w.b.Raw(renamed)
		w.b.End()
		w.wrote(nft.Rules, c, i, 1)
	}
	return nil
}

// renamed returns a rule's attributes with the names under which its own sets were written
// (rename). expressions is the content of the rule's list. Without a rename it returns them
// unchanged.
func (w *writer) renamed(r Rule, expressions []byte) ([]byte, error) {
	if len(w.rename) == 0 {
		return r.Attrs, nil
	}
	list, err := mapExpressions(expressions, func(name string, data []byte) ([]byte, error) {
		kind := setNameOf(name)
		to, ok := w.rename[nft.String(attrOf(data, kind))]
		if kind == 0 || !ok {
			return nil, nil
		}
		return nft.AppendAttr(without(data, kind), kind, to, 1), nil
	})
	if err != nil || sameList(list, expressions) {
		return r.Attrs, err
	}
	return appendNested(without(r.Attrs, unix.NFTA_RULE_EXPRESSIONS), unix.NFTA_RULE_EXPRESSIONS, list), nil
}
