package nft

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Place is a chain in a table.
type Place struct {
	Table string
	Chain string
}

// A FamilyConfig says which tables of a family a Mirror holds, and how.
type FamilyConfig struct {
	Family tableid.Family
	Tables func(name string) bool // whether the mirror holds a table
	Rules  Rulebook
	Budget *Budget[Place] // chooses the chains whose rules are kept; nil: all
	View   MirrorView     // nil: the user calls Chain
}

// A Rulebook numbers rules for a Mirror. A RuleStore is one.
type Rulebook interface {
	// Intern returns the rule's number, which is valid until a Purge.
	Intern(Rule) (RuleID, error)
	// Release says that a chain does not have these rules any more. If forGood,
	// they are to be kept only while another chain has them.
	Release(ids []RuleID, forGood bool)
	// Purge forgets rules. held points to the numbers of the rules that stay;
	// they get new values.
	Purge(held []*[]RuleID)
}

// A MirrorView is notified of a Mirror's reads. Its methods may read the mirror,
// but must not change it.
type MirrorView interface {
	// Reshaped says that a chain is new or deleted, or has another hook or
	// policy. If chain is empty, this may hold for the table and each of its
	// chains.
	Reshaped(table, chain string)
	// Took reports a chain's present content; same says that its rules are the
	// same as before.
	Took(place Place, now Content, same bool)
	// Taking is called before a commit of another process that took something is
	// applied. The tables are then as they were at genid. missed: notifications
	// of commits are lost.
	Taking(genid uint32, tables []string, missed bool)
}

// blind is the view of a mirror without a MirrorView.
type blind struct{}

func (blind) Reshaped(string, string)       {}
func (blind) Took(Place, Content, bool)     {}
func (blind) Taking(uint32, []string, bool) {}

// A FamilyMirror is a Mirror's part for one family.
type FamilyMirror struct {
	cfg    FamilyConfig
	conn   *Conn
	tables map[string]*mirrorTable // the existing tables
	// stale: tables and chains must be listed.
	stale bool
	// dirty are the chains to read again; true: the chain itself, not only its
	// rules.
	dirty    map[Place]bool
	changed  int                  // how many of dirty are true
	open     commitChanges        // the commit whose end was not received yet
	live     map[Place]*following // chains that commits changed since they were shown
	settling bool                 // settle runs
	wrote    []Place              // chains that the user's own commits wrote since the last read
	// versions numbers the contents of chains.
	versions uint64
	room
}

// A mirrorTable is the mirror of one table.
type mirrorTable struct {
	chains  map[string]*MirrorChain
	highest uint64 // of all chains' handles
	before  uint64 // highest before the present commit
	// upTo bounds the commits that the last read of the table may contain. Until
	// all commits up to upTo were received, the table is of no certain genid.
	upTo    uint32
	dormant bool
}

// A MirrorChain is the mirror of one chain. Users only read its fields.
type MirrorChain struct {
	Handle  uint64
	Base    *Chain   // nil for a chain without a hook
	IDs     []RuleID // its rules; nil if they are not kept
	Handles []uint64 // of its rules
	name    string   // the text of its key
	version uint64   // see RawChain
	read    bool
	weight  Weight // of its rules when they were read
	use     uint32 // at least the number of its rules when it was first seen
	out     *outOf // nil if its rules are kept
}

// Chain returns a chain as of the last read; nil if it does not exist. The caller has the
// turn.
func (f *FamilyMirror) Chain(p Place) *MirrorChain {
	if t := f.tables[p.Table]; t != nil {
		return t.chains[p.Chain]
	}
	return nil
}

// Tables returns the names of the tables that exist.
func (f *FamilyMirror) Tables() []string { return slices.Sorted(maps.Keys(f.tables)) }

// Chains returns the names of a table's chains, in no order; nil without the table. Views
// list a table so. The caller has the turn.
func (f *FamilyMirror) Chains(table string) []string {
	t := f.tables[table]
	if t == nil {
		return nil
	}
	return slices.Collect(maps.Keys(t.chains))
}

// Dormant reports whether the table's chains get no packets.
func (f *FamilyMirror) Dormant(table string) bool {
	t := f.tables[table]
	return t != nil && t.dormant
}

// ForgetAll makes the next read read everything. The mirror calls it when it begins to
// receive notifications, because it has missed some, and when the genid cannot be read.
func (f *FamilyMirror) ForgetAll() {
	f.stale, f.dirty, f.changed, f.open, f.live = true, map[Place]bool{}, 0, commitChanges{}, nil
	for table, t := range f.tables {
		for chain := range t.chains {
			f.dirty[Place{table, chain}] = false
		}
	}
}

// Reread makes the next read read a chain's rules. It serves after the user's own commits,
// after changes that do not fit, and for chains that may fit into the budget again.
func (f *FamilyMirror) Reread(p Place) {
	if _, ok := f.dirty[p]; !ok {
		f.dirty[p] = false
	}
}

// RereadItself makes the next read read a chain and its rules.
func (f *FamilyMirror) RereadItself(p Place) { f.dirty[p] = true }

// Purge lets the rulebook forget rules that no chain has.
func (f *FamilyMirror) Purge(purge func(held []*[]RuleID)) { purge(f.held()) }

// forget makes the next read read a whole table, after a commit that made or deleted it, or
// after a chain was renamed.
func (f *FamilyMirror) forget(table string) {
	f.stale = true
	if f.tables[table] != nil {
		maps.DeleteFunc(f.live, func(p Place, _ *following) bool { return p.Table == table })
		delete(f.tables, table)
		f.cfg.View.Reshaped(table, "")
	}
}

// listFrom is the number of changed chains from which reading each (7 µs) costs
// more than a list of the chains of 5,000 services.
const listFrom = 1000

// Dirty reports whether chains have to be read.
func (f *FamilyMirror) Dirty() bool { return len(f.dirty) > 0 }

// lists reports whether the next refresh lists tables and chains.
func (f *FamilyMirror) lists() bool { return f.stale || f.changed > listFrom }

// refresh reads the changed chains, and lists tables and chains if needed; Mirror.refresh
// calls it. If a commit interrupts, the rest stays dirty for the next refresh.
func (f *FamilyMirror) refresh(ctx context.Context) error {
	if f.lists() {
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
		f.dirty, f.changed = map[Place]bool{}, 0 // releases a map that may have been large
	}
	f.trim()
	return nil
}

// list reads the names of tables and chains, and marks new chains for a read; refresh calls
// it. If a commit interrupts, it changes nothing and leaves f.stale set for the next
// refresh.
func (f *FamilyMirror) list() error {
	fresh := map[string]*mirrorTable{}
	in := func(table string) *mirrorTable {
		if fresh[table] == nil {
			fresh[table] = &mirrorTable{chains: map[string]*MirrorChain{}}
		}
		return fresh[table]
	}
	err := f.conn.eachTableOf(f.cfg.Family, func(t Table) error {
		if t.Family == f.cfg.Family && f.cfg.Tables(t.Name) {
			in(t.Name).dormant = t.Dormant
		}
		return nil
	})
	if err == nil {
		err = f.conn.EachChain(f.cfg.Family, func(raw Chain) error {
			if f.cfg.Tables(raw.Table) {
				in(raw.Table).see(raw)
			}
			return nil
		})
	}
	if errors.Is(err, ErrInterrupted) {
		f.stale = true
		return nil
	}
	if err != nil {
		return err
	}
	old := f.tables
	f.tables = fresh
	f.stale, f.changed = false, 0
	for table, t := range fresh {
		was := old[table]
		if was != nil && was.dormant != t.dormant {
			was = nil // a view shows its chains differently now
		}
		f.adopt(table, t, was)
	}
	for table := range old {
		if fresh[table] == nil {
			f.cfg.View.Reshaped(table, "")
		}
	}
	for place := range f.dirty {
		if f.Chain(place) == nil {
			delete(f.dirty, place)
			continue
		}
		f.dirty[place] = false
	}
	return nil
}

// see notes that a chain exists. It reports whether the chain is new or has another hook or
// policy: then its caller calls the view's Reshaped. A new chain has yet to be read.
func (t *mirrorTable) see(raw Chain) (reshaped bool) {
	t.highest = max(t.highest, raw.Handle)
	c := t.chains[raw.Name]
	if c == nil {
		c = &MirrorChain{name: raw.Name, use: raw.Use}
		t.chains[raw.Name] = c
		reshaped = true
	}
	raw.Use = 0 // it changes with each rule
	if c.Handle == raw.Handle && raw.Base == (c.Base != nil) && (!raw.Base || raw == *c.Base) {
		return reshaped
	}
	reshaped = reshaped || raw.Base || c.Base != nil
	c.Handle, c.Base = raw.Handle, nil
	if raw.Base {
		base := raw // most chains are none, and need no copy
		c.Base = &base
	}
	return reshaped
}

// adopt takes the contents of unchanged chains from old, an earlier list of the table, or
// nil. It marks the other chains for a read. list calls it for each table.
func (f *FamilyMirror) adopt(table string, t, old *mirrorTable) {
	if old == nil {
		old = &mirrorTable{}
	}
	same := len(old.chains) == len(t.chains)
	for name, was := range old.chains {
		c := t.chains[name]
		if c == nil || was.Handle != c.Handle {
			f.cfg.Rules.Release(was.IDs, false)
			continue
		}
		same = same && (c.Base == nil) == (was.Base == nil) && (c.Base == nil || *c.Base == *was.Base)
		was.Base = c.Base
		t.chains[name] = was // the key is the earlier text, which views hold
	}
	for name, c := range t.chains {
		if old.chains[name] != c {
			same = false
			f.dirty[Place{table, name}] = false
		}
	}
	if !same {
		f.cfg.View.Reshaped(table, "")
	}
}
