package native

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	// commitMost bounds the notifications that are kept of one commit, in bytes. kube-proxy's 5,000
	// services are 6 MB. After a larger commit all tables are read again.
	commitMost = 32 << 20
	// pieceSize is the size of one allocation for notifications, in bytes. Growing one piece cost 9
	// ms in a flush of 1,000 services.
	pieceSize = 64 << 10
	// idleMost bounds the capacity for messages that is kept for the next commit.
	idleMost = 4096
	// goneMost is the number of tables above which deleted tables are forgotten.
	goneMost = 256
)

// A follower keeps tables current by the kernel's notifications. If it cannot place a notification,
// it stops following that table until the next read. It is for one goroutine.
type follower struct {
	tables map[tableid.TableID]*followed
	most   int // the limit of all their weights; 0: none
	// messages are the notifications of the present commit. Its genid arrives last.
	messages []heard
	piece    []byte // memory for their attributes
	bytes    int    // of all messages
	tooMuch  bool
}

// A heard is a notification. For a deleted object it may have the names and the handle only.
type heard struct {
	kind   uint16
	id     tableid.TableID
	append bool // see nft.Notification
	attrs  []byte
}

// take keeps a notification until its commit ends: only end knows its genid. Notifications of
// tables that are not followed are dropped.
func (f *follower) take(n nft.Notification) {
	if len(f.tables) == 0 {
		return
	}
	id := n.Family.Table(nft.String(attrOf(n.Attrs, unix.NFTA_TABLE_NAME)))
	switch {
	case f.tables[id] == nil:
	case f.bytes+len(n.Attrs) > commitMost:
		f.tooMuch = true
	default:
		f.messages = append(f.messages, heard{n.Kind, id, n.Append, f.keep(n)})
	}
}

// keep copies the necessary attributes of a notification, because n's memory is used again. The
// copy lives until the end of the commit.
func (f *follower) keep(n nft.Notification) []byte {
	if cap(f.piece)-len(f.piece) < len(n.Attrs)+4 {
		f.piece = make([]byte, 0, max(pieceSize, len(n.Attrs)+4))
	}
	at := f.piece[len(f.piece):]
	if kind, goes := goers[n.Kind]; goes {
		at = appendNames(at, forms[kind], n.Attrs)
	} else {
		at = append(at, n.Attrs...)
	}
	f.piece, f.bytes = f.piece[:len(f.piece)+len(at)], f.bytes+len(at)
	return at
}

// goers are the deletions. The follower keeps only name and handle of them, because a flush sends
// thousands, and a rule's deletion contains the whole rule.
var goers = map[uint16]nft.ObjectKind{
	unix.NFT_MSG_DELRULE: nft.Rules, unix.NFT_MSG_DELCHAIN: nft.Chains, unix.NFT_MSG_DELSET: nft.Sets,
}

// appendNames appends the attributes that identify a message's object, in the form f. It
// appends an unreadable message unchanged, so that decode refuses it and the table is read
// again.
func appendNames(out []byte, f form, list []byte) []byte {
	from := len(out)
	for a, err := range attributes(list) {
		switch {
		case err != nil:
			return append(out[:from], list...)
		case a.kind == f.table, a.kind == f.name, a.kind == f.handle:
			out = appendRaw(out, a)
		}
	}
	return out
}

// end applies the notifications of a commit to the followed tables, for Kernel.take. It stops
// following a table that does not fit them; the next read follows it again. now is the commit's
// time, for timeouts.
func (f *follower) end(genid uint32, now time.Time) {
	if f.tooMuch {
		f.forget()
	}
	touched := map[tableid.TableID]*followed{}
	for _, m := range f.messages {
		t := f.tables[m.id]
		if t == nil || !nft.Newer(genid, t.genid) { // the read has it already
			continue
		}
		touched[m.id] = t
		err := t.apply(nft.Notification{Kind: m.kind, Attrs: m.attrs, Append: m.append}, now)
		if err != nil || f.most > 0 && t.added.Units() > f.most { // a read is broken off
			delete(f.tables, m.id)
		}
	}
	for id, t := range touched {
		if f.tables[id] != nil && (t.finish() != nil || !f.fits()) {
			delete(f.tables, id)
		}
	}
	f.drop()
}

// drop discards the notifications of the present commit: they were applied, or are incomplete.
// It keeps the memory for the next commit.
func (f *follower) drop() {
	clear(f.messages)
	f.messages, f.piece, f.bytes, f.tooMuch = f.messages[:0], f.piece[:0], 0, false
	if cap(f.messages) > idleMost {
		f.messages = nil
	}
}

// forget stops following all tables, because notifications are missing.
func (f *follower) forget() {
	f.tables = nil
	f.drop()
}

// seed begins to follow a table that was read at a genid and a time. A table that cannot be
// followed is left out, so each capture reads it.
func (f *follower) seed(t *Table, genid uint32, at time.Time) {
	if f.tables == nil {
		f.tables = map[tableid.TableID]*followed{}
	}
	if delete(f.tables, t.ID); len(f.tables) > goneMost {
		for id, other := range f.tables {
			if other.gone {
				delete(f.tables, id)
			}
		}
	}
	if now, err := follow(t, genid, at); err == nil {
		f.tables[t.ID] = now
	}
}

// standing returns a followed table; nil if it is not followed, or is gone. Then a capture
// reads it.
func (f *follower) standing(id tableid.TableID) *followed {
	if t := f.tables[id]; t != nil && !t.gone {
		return t
	}
	return nil
}

// value returns a table as it is after the last commit; nil if it is not followed, or is gone.
// A suspect commit gets it as Before, and a read is compared with it.
func (f *follower) value(id tableid.TableID) (*Table, Digest) {
	t := f.standing(id)
	if t == nil {
		return nil, Digest{}
	}
	return t.value()
}

var errNotFollowed = errors.New("a table that cannot be followed")

// A followed is one table, kept current by the notifications.
type followed struct {
	head    Table // without its content
	genid   uint32
	at      time.Time // the time to which remaining timeouts refer
	gone    bool
	chains  objectList[string, *followedChain]
	sets    objectList[string, *followedSet]
	objects objectList[objectKey, *Object]
	in      contents
	weight  nft.Weight
	added   nft.Weight // rules and elements that this commit has added so far
	// deleted has the handles of objects deleted with a rule in this commit. The kernel may notify
	// of them or not.
	deleted map[uint64]bool
	// touchedChains and touchedSets are the parts that finish must update.
	touchedChains map[*followedChain]bool
	touchedSets   map[*followedSet]bool

	last   *Table // the value; nil: it is outdated
	digest Digest
}

// follow begins to follow a table that was read at that genid and time. errNotFollowed: one
// process owns it, or it has parts on devices, which the kernel changes without a notification.
func follow(t *Table, genid uint32, at time.Time) (*followed, error) {
	f := &followed{genid: genid}
	f.begin(*t, at)
	if t.Immune() || len(t.Flowtables) > 0 || t.ID.Family == tableid.Netdev {
		return nil, errNotFollowed // devices appear and vanish without a commit
	}
	for _, c := range t.Chains {
		if hasDevice(c.Attrs) {
			return nil, errNotFollowed
		}
		if err := f.addChain(c); err != nil {
			return nil, err
		}
	}
	for _, o := range t.Objects {
		if err := f.addObject(o); err != nil {
			return nil, err
		}
	}
	for _, s := range t.Sets {
		if err := f.addSet(s); err != nil {
			return nil, err
		}
	}
	return f, f.finish()
}

// begin starts again with an empty table, whose own attributes head has. at is the time from
// which timeouts count. A new table, a deleted one and follow begin so.
func (f *followed) begin(head Table, at time.Time) {
	head.Chains, head.Objects, head.Flowtables, head.Sets = nil, nil, nil, nil
	*f = followed{head: head, genid: f.genid, at: at, in: *newContents(&head), deleted: map[uint64]bool{},
		touchedChains: map[*followedChain]bool{}, touchedSets: map[*followedSet]bool{}}
}

// hasDevice reports whether a chain is attached to devices of its own.
func hasDevice(attrs []byte) bool {
	hook := attrOf(attrs, unix.NFTA_CHAIN_HOOK)
	return has(hook, unix.NFTA_HOOK_DEV) || has(hook, hookDevs)
}

// apply applies one notification of a commit at the time now. After an error the table must be
// read again. finish must be called at the end of the commit.
func (f *followed) apply(n nft.Notification, now time.Time) error {
	f.last = nil
	attrs := n.Attrs
	switch n.Kind {
	case unix.NFT_MSG_NEWTABLE:
		return f.newTable(attrs, now)
	case unix.NFT_MSG_DELTABLE:
		f.begin(Table{ID: f.head.ID}, now)
		f.gone = true
		return nil
	}
	if f.gone {
		return nft.ErrUnplaced
	}
	var kind nft.ObjectKind
	var take func(d decoded, attrs []byte) error
	switch n.Kind {
	case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
		return f.elements(attrs, n.Kind == unix.NFT_MSG_DELSETELEM, now)
	case unix.NFT_MSG_NEWCHAIN:
		kind, take = nft.Chains, f.newChain
	case unix.NFT_MSG_DELCHAIN:
		kind, take = nft.Chains, f.deleteChain
	case unix.NFT_MSG_NEWRULE:
		kind, take = nft.Rules, func(d decoded, attrs []byte) error { return f.newRule(d, attrs, n.Append) }
	case unix.NFT_MSG_DELRULE:
		kind, take = nft.Rules, f.deleteRule
	case unix.NFT_MSG_NEWSET:
		kind, take = nft.Sets, f.newSet
	case unix.NFT_MSG_DELSET:
		kind, take = nft.Sets, f.deleteSet
	case unix.NFT_MSG_NEWOBJ:
		kind, take = nft.Objects, f.newObject
	case unix.NFT_MSG_DELOBJ:
		kind, take = nft.Objects, f.deleteObject
	default:
		return fmt.Errorf("%w: number %d", nft.ErrUnplaced, n.Kind)
	}
	d, err := decode(kind, attrs)
	if err != nil {
		return err
	}
	return take(d, attrs)
}

// newTable applies a notification of the table itself: it was made again, or its attributes
// have changed. An error makes the follower read it again: one process owns the table now, or
// the handle is another.
func (f *followed) newTable(attrs []byte, now time.Time) error {
	t, err := decodeTable(f.head.ID.Family, attrs)
	switch {
	case err != nil:
		return err
	case t.Immune():
		return errNotFollowed
	case f.gone:
		f.begin(*t, now)
	case t.Handle != f.head.Handle:
		return nft.ErrUnplaced
	default:
		f.head = *t
	}
	return nil
}

// finish updates the lists that a commit changed, once all its notifications were applied.
// After an error the table must be read again.
func (f *followed) finish() error {
	clear(f.deleted)
	f.added = nft.Weight{}
	for c := range f.touchedChains {
		if err := c.finish(); err != nil {
			return err
		}
		f.weigh(&c.weight, c.Chain.weight())
	}
	for s := range f.touchedSets {
		if err := s.finish(&f.in); err != nil {
			return err
		}
		f.weigh(&s.weight, s.Set.weight())
	}
	clear(f.touchedChains)
	clear(f.touchedSets)
	f.chains.compact()
	f.sets.compact()
	f.objects.compact()
	return nil
}

// value returns the table as a value, and its digest, after the last commit. A capture takes it
// in place of a read. The cost is that of the changes since the last value, and of a copy of
// the lists.
func (f *followed) value() (*Table, Digest) {
	if f.last != nil {
		return f.last, f.digest
	}
	t := f.head
	t.Chains = make([]Chain, 0, len(f.chains.list))
	t.Sets = make([]Set, 0, len(f.sets.list))
	t.Objects = make([]Object, 0, len(f.objects.list))
	sum := newSum(&t)
	for _, c := range f.chains.list {
		t.Chains = append(t.Chains, c.Chain)
		if !c.Bound {
			sum.ordered(c.sum(&f.in))
		}
	}
	for _, s := range f.sets.list {
		t.Sets = append(t.Sets, s.Set)
		if !s.Anonymous() {
			sum.others.add(s.sum(&f.in))
		}
	}
	for _, o := range f.objects.list {
		t.Objects = append(t.Objects, *o)
		sum.others.add(f.in.object(*o))
	}
	clear(f.in.foundSets) // the kernel reuses names
	clear(f.in.foundChains)
	f.last, f.digest = &t, sum.digest()
	return f.last, f.digest
}

// An objectList has objects by key, and in the order of their handles, as in the kernel.
type objectList[K, V comparable] struct {
	byKey   map[K]V
	list    []V
	gone    map[V]bool // removed objects that are still in the list
	highest uint64
}

// add adds the newest object. An error means that the notifications do not fit the table: the
// key exists, or the handle is not the highest.
func (r *objectList[K, V]) add(key K, handle uint64, v V) error {
	if _, there := r.byKey[key]; there || handle <= r.highest {
		return nft.ErrUnplaced // a renamed chain keeps its handle
	}
	if r.byKey == nil {
		r.byKey, r.gone = map[K]V{}, map[V]bool{}
	}
	r.byKey[key], r.highest = v, handle
	r.list = append(r.list, v)
	return nil
}

func (r *objectList[K, V]) remove(key K) {
	r.gone[r.byKey[key]] = true
	delete(r.byKey, key)
}

// compact takes the removed objects out of the list, once after each commit. A flush removes
// thousands, and each removal alone would move the rest of the list.
func (r *objectList[K, V]) compact() {
	if len(r.gone) == 0 {
		return
	}
	left := r.list[:0]
	for _, v := range r.list {
		if !r.gone[v] {
			left = append(left, v)
		}
	}
	clear(r.list[len(left):])
	r.list, r.gone = left, map[V]bool{}
}
