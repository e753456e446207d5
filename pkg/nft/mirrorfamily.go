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
	Tables func(name string) bool // whether a table is held
	Rules  Rulebook
	Budget MirrorBudget // nil: all rules are kept
	View   MirrorView   // nil: the user asks Chain
}

// A Rulebook numbers rules for a Mirror. A RuleStore is one.
type Rulebook interface {
	// Intern returns the rule's number, which stays until a Purge.
	Intern(Rule) (RuleID, error)
	// Release says that a chain does not have these rules any more. Those that are released for
	// good are not to be kept, unless another chain has them.
	Release(ids []RuleID, forGood bool)
	// Purge forgets rules. held is where the numbers are that stay, which get new values.
	Purge(held []*[]RuleID)
}

// A MirrorView hears what a Mirror read. Its methods may ask the mirror, and change nothing in it.
type MirrorView interface {
	// Reshaped says that a chain is new, gone, or has another hook or policy. Without a chain's
	// name it says that of the table and of any of its chains.
	Reshaped(table, chain string)
	// Took says what a chain holds now; same reports that these are the rules that it held.
	Took(place Place, now Content, same bool)
	// Taking says that tables stand as they were at a genid, and that a commit of another process
	// is about to be taken in that took something; missed: or commits of which notifications are
	// lost.
	Taking(genid uint32, tables []string, missed bool)
}

// blind is the view of a mirror without one.
type blind struct{}

func (blind) Reshaped(string, string)       {}
func (blind) Took(Place, Content, bool)     {}
func (blind) Taking(uint32, []string, bool) {}

// A FamilyMirror is what a Mirror holds of one family.
type FamilyMirror struct {
	cfg    FamilyConfig
	conn   *Conn
	tables map[string]*mirrorTable // those that exist
	// stale: which tables and chains exist must be asked.
	stale bool
	// dirty are the chains to read again; true: the chain itself, not only its rules.
	dirty    map[Place]bool
	changed  int                  // how many of dirty are true
	open     commitChanges        // the commit of which the end was not heard yet
	live     map[Place]*following // chains that commits changed since they were shown
	settling bool                 // they are being shown
	wrote    []Place              // chains that the user's own commits wrote since the last read
	// versions counts what chains were seen to hold.
	versions uint64
	room
}

// A mirrorTable is the mirror of one table.
type mirrorTable struct {
	chains  map[string]*MirrorChain
	highest uint64 // of all chains' handles
	before  uint64 // what that was before the commit that is taken in
	// upTo is the genid up to which a commit may be in what was read last, or not. Until all
	// commits up to it were heard, the table stands at no genid.
	upTo    uint32
	dormant bool
}

// A MirrorChain is the mirror of one chain. Its fields are to be read only.
type MirrorChain struct {
	Handle  uint64
	Base    *Chain   // nil for a chain without a hook
	IDs     []RuleID // its rules; none if they are not kept
	Handles []uint64 // of its rules
	version uint64   // see RawChain
	read    bool
	weight  Weight // of its rules when they were read
	use     uint32 // no fewer than its rules when it was first seen
	out     *outOf // nil if its rules are kept
}

// Chain returns a chain, nil if it does not exist.
func (f *FamilyMirror) Chain(p Place) *MirrorChain {
	if t := f.tables[p.Table]; t != nil {
		return t.chains[p.Chain]
	}
	return nil
}

// Tables returns the names of the tables that exist.
func (f *FamilyMirror) Tables() []string { return slices.Sorted(maps.Keys(f.tables)) }

// Chains returns the names of a table's chains, in no order.
func (f *FamilyMirror) Chains(table string) []string {
	t := f.tables[table]
	if t == nil {
		return nil
	}
	return slices.Collect(maps.Keys(t.chains))
}

// Dormant reports whether packets meet no chain of a table.
func (f *FamilyMirror) Dormant(table string) bool {
	t := f.tables[table]
	return t != nil && t.dormant
}

// ForgetAll makes the next read ask for everything.
func (f *FamilyMirror) ForgetAll() {
	f.stale, f.dirty, f.changed, f.open, f.live = true, map[Place]bool{}, 0, commitChanges{}, nil
	for table, t := range f.tables {
		for chain := range t.chains {
			f.dirty[Place{table, chain}] = false
		}
	}
}

// Reread makes the next read ask for a chain's rules.
func (f *FamilyMirror) Reread(p Place) {
	if _, ok := f.dirty[p]; !ok {
		f.dirty[p] = false
	}
}

// RereadItself makes the next read ask for a chain and its rules.
func (f *FamilyMirror) RereadItself(p Place) { f.dirty[p] = true }

// Purge lets the rulebook forget what no chain has.
func (f *FamilyMirror) Purge(purge func(held []*[]RuleID)) { purge(f.held()) }

// forget makes the next read ask for all of a table.
func (f *FamilyMirror) forget(table string) {
	f.stale = true
	if f.tables[table] != nil {
		maps.DeleteFunc(f.live, func(p Place, _ *following) bool { return p.Table == table })
		delete(f.tables, table)
		f.cfg.View.Reshaped(table, "")
	}
}

// listFrom is how many changed chains cost more, asked for one by one (7 µs),
// than a list of the chains of 5,000 services.
const listFrom = 1000

// Dirty reports whether chains have to be read.
func (f *FamilyMirror) Dirty() bool { return len(f.dirty) > 0 }

// lists reports whether the next refresh asks which tables and chains exist.
func (f *FamilyMirror) lists() bool { return f.stale || f.changed > listFrom }

// refresh reads what has to be read. What commits interrupt it leaves for the next time.
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
		f.dirty, f.changed = map[Place]bool{}, 0 // it may have been large
	}
	f.trim()
	return nil
}

// list asks which tables and chains exist, and marks those that are new.
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
			was = nil // what a view shows of its chains is another thing now
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

// see notes that a chain exists, and reports whether it is new or another one. One that is new
// has yet to be read.
func (t *mirrorTable) see(raw Chain) (reshaped bool) {
	t.highest = max(t.highest, raw.Handle)
	c := t.chains[raw.Name]
	if c == nil {
		c = &MirrorChain{use: raw.Use}
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
		c.Base = &raw
	}
	return reshaped
}

// adopt takes over what an earlier list of the table, which may be nil, has of the same chains, and
// marks those that must be read.
func (f *FamilyMirror) adopt(table string, t, old *mirrorTable) {
	if old == nil {
		old = &mirrorTable{}
	}
	same := len(old.chains) == len(t.chains)
	for name, c := range t.chains {
		was := old.chains[name]
		if was == nil || was.Handle != c.Handle {
			same = false
			f.dirty[Place{table, name}] = false
			continue
		}
		same = same && (c.Base == nil) == (was.Base == nil) && (c.Base == nil || *c.Base == *was.Base)
		was.Base = c.Base
		t.chains[name] = was
	}
	for name, was := range old.chains {
		if t.chains[name] != was {
			f.cfg.Rules.Release(was.IDs, false)
		}
	}
	if !same {
		f.cfg.View.Reshaped(table, "")
	}
}
