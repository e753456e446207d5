package iptables

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A mirror holds what nf_tables' iptables tables hold, and keeps up with it at
// a cost in proportion to what changes: notifications say which chains to read
// anew, and nothing is executed for rules whose text is known.
//
// A read is accepted when every notification up to the kernel's present genid
// was heard and no chain that one of them named has yet to be read: then no
// commit came in between, and the state is exactly that of this genid, however
// long ago each chain was read. The kernel raises the genid, makes a commit
// visible, and only then tells of it (nf_tables_commit), so that none can hide.
// Unlike a read between two equal genids this comes to an end beside a busy
// writer: what must fit between two of its commits is only what it changed.
type mirror struct {
	genid    func() (uint32, error) // the kernel's, asked for at least twice a read
	printer  printer
	timeout  time.Duration // of a read
	turn     chan struct{} // of capacity 1: one read at a time
	events   *nft.Events   // nil before the first read and after an overflow
	families map[rules.Family]*mirrored
	own      func(port, pid uint32) bool // whether a commit is ours
	taken    takingsLog                  // what commits took
}

func newMirror(conn *nft.Conn, genid func() (uint32, error), printer printer, known lexicons, budgets map[rules.Family]*budget, shelf *shelf, own func(port, pid uint32) bool, timeout time.Duration) *mirror {
	m := &mirror{genid: genid, own: own, printer: printer, timeout: timeout, turn: make(chan struct{}, 1), families: map[rules.Family]*mirrored{}}
	for family, lexicon := range known {
		m.families[family] = &mirrored{family: family, lexicon: lexicon, conn: conn, shelf: shelf, budget: budgets[family]}
	}
	return m
}

func (m *mirror) close() error {
	if m.events == nil {
		return nil
	}
	return m.events.Close()
}

// patience is how long notifications are waited for at a time. Those of a
// commit of 40,000 rules come up to a second after it became visible.
const patience = 100 * time.Millisecond

// read returns the present state. It may be called concurrently.
func (m *mirror) read(ctx context.Context, family rules.Family) (Snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, m.timeout)
	defer cancel()
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	case <-ctx.Done():
		return Snapshot{}, fmt.Errorf("waiting for another read of the tables: %w", ctx.Err())
	}
	f := m.families[family]
	f.doubt(time.Now())
	f.countAgain(time.Now())
	for {
		if err := ctx.Err(); err != nil {
			return Snapshot{}, fmt.Errorf("the %v tables changed all the time while they were read: %w", family, err)
		}
		genid, heard, err := m.listen()
		if err != nil {
			return Snapshot{}, err
		}
		if heard && f.current() {
			f.forgetUnused()
			return f.snapshot(uint64(genid)), nil
		}
		if err := f.refresh(ctx, m.printer); err != nil {
			return Snapshot{}, err
		}
	}
}

// listen takes in what was heard and reports whether that is everything up to
// the present genid.
func (m *mirror) listen() (genid uint32, heard bool, err error) {
	if m.events == nil {
		if m.events, err = nft.OpenEvents(m.genid, m.own); err != nil {
			m.events = nil
			return 0, false, err
		}
		m.taken.restart(m.events.UpTo())
		for _, f := range m.families {
			f.forgetAll()
		}
	}
	if genid, err = m.genid(); err != nil {
		return 0, false, err
	}
	heard, err = m.events.Wait(genid, time.Now().Add(patience), m.mark)
	if err == nil {
		return genid, heard, nil
	}
	// Overflow, or a message that cannot be read: what it told is lost.
	lost := m.events
	m.events = nil
	if cerr := lost.Close(); cerr != nil || !errors.Is(err, unix.ENOBUFS) {
		return 0, false, errors.Join(err, cerr)
	}
	return genid, false, nil
}

func (m *mirror) mark(e nft.Event) {
	if e.Kind == unix.NFT_MSG_NEWGEN {
		m.taken.end(e.By, time.Now())
		return
	}
	f, table := m.families[e.Family], tableName(e.Table)
	if f != nil && table != "" {
		m.taken.note(e, table)
		f.mark(e, table)
	}
}

// A mirrored is the mirror of one family.
type mirrored struct {
	family  rules.Family
	lexicon *lexicon
	conn    *nft.Conn
	shelf   *shelf
	tables  map[rules.TableName]*mirrorTable // those that exist
	// stale: which tables and chains exist must be asked.
	stale bool
	// dirty are the chains to read anew; true: the chain itself, not only
	// its rules.
	dirty   map[Place]bool
	changed int // how many of dirty are true
	budget  *budget
	kept    int // units of all chains of which the rules are kept, as of the last trim
	wasted  int // units of rules that the lexicon has and no chain of ours has any more
}

// forgetAll makes the next refresh read everything. What the lexicon knows
// stays.
func (f *mirrored) forgetAll() {
	f.stale, f.dirty, f.changed = true, map[Place]bool{}, 0
	for _, t := range f.tables {
		for name := range t.chains {
			f.dirty[Place{t.name, name}] = false
		}
	}
}

// mark takes in one notification.
func (f *mirrored) mark(e nft.Event, table rules.TableName) {
	t := f.tables[table]
	switch e.Kind {
	case unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE:
		f.stale = true
		delete(f.tables, table)
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		if t == nil {
			f.stale = true
			return
		}
		if t.renamed(e) {
			// The jumps to it changed too, of which nobody tells.
			f.stale = true
			delete(f.tables, table)
			return
		}
		if place := (Place{table, string(e.Chain)}); !f.dirty[place] {
			f.dirty[place] = true
			f.changed++
		}
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		if t == nil {
			f.stale = true
			return
		}
		if c := t.chains[string(e.Chain)]; c != nil && c.out != nil && !f.wantsCount(c, e.Kind, time.Now()) {
			return
		}
		if _, ok := f.dirty[Place{table, string(e.Chain)}]; !ok {
			f.dirty[Place{table, string(e.Chain)}] = false
		}
	}
}

// listFrom is how many changed chains cost more, asked for one by one (7 µs),
// than a list of the chains of 5,000 services.
const listFrom = 1000

// current reports whether nothing has to be read.
func (f *mirrored) current() bool {
	if f.stale || len(f.dirty) > 0 {
		return false
	}
	for _, t := range f.tables {
		if t.wantsText() {
			return false
		}
	}
	return true
}

// refresh reads what has to be read. What commits interrupt it leaves for the
// next time.
func (f *mirrored) refresh(ctx context.Context, printer printer) error {
	if f.stale || f.changed > listFrom {
		if err := f.list(); err != nil {
			return err
		}
	}
	if err := f.rereadTables(); err != nil {
		return err
	}
	for place, itself := range f.dirty {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := f.reread(place, itself); err != nil {
			return err
		}
	}
	if len(f.dirty) == 0 {
		f.dirty, f.changed = map[Place]bool{}, 0 // it may have been large
	}
	f.trim()
	return f.findTexts(ctx, printer)
}

// list asks which tables and chains exist, and marks those that are new.
func (f *mirrored) list() error {
	exist, err := iptablesTables(f.conn, f.family)
	if err != nil {
		return err
	}
	fresh := map[rules.TableName]*mirrorTable{}
	add := func(name rules.TableName) *mirrorTable {
		t := fresh[name]
		if t == nil {
			t = newMirrorTable(name)
			fresh[name] = t
		}
		return t
	}
	for _, name := range exist {
		add(name)
	}
	err = f.conn.EachChain(f.family, func(raw nft.Chain) error {
		if table := tableName(raw.Table); table != "" {
			add(table).see(raw)
		}
		return nil
	})
	if errors.Is(err, nft.ErrInterrupted) {
		f.stale = true
		return nil
	}
	if err != nil {
		return err
	}
	for name, t := range fresh {
		for _, unread := range t.adopt(f.tables[name], f.lexicon) {
			f.dirty[Place{name, unread}] = false
		}
	}
	f.tables = fresh
	f.stale, f.changed = false, 0
	for place := range f.dirty {
		if t := fresh[place.Table]; t == nil || t.chains[place.Chain] == nil {
			delete(f.dirty, place)
			continue
		}
		f.dirty[place] = false
	}
	return nil
}

// forgetUnused drops from the lexicon what no chain has held for long.
func (f *mirrored) forgetUnused() {
	if !f.lexicon.crowded() {
		return
	}
	f.lexicon.forget(f.held())
}

// snapshot returns what is mirrored.
func (f *mirrored) snapshot(genid uint64) Snapshot {
	s := Snapshot{Family: f.family, Tables: rules.Ruleset{}, Unreadable: map[rules.TableName]error{}, Digest: genid}
	changed := false
	for name, t := range f.tables {
		shown := t.view.ready
		s.Tables[name] = t.table()
		changed = changed || s.Tables[name] != shown
	}
	if changed {
		f.shelf.put(f.family, s.Tables, time.Now())
	}
	return s
}
