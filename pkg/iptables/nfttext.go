package iptables

import (
	"maps"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A familyText is one family's mirrored tables as values. It implements nft.MirrorView.
type familyText struct {
	family  rules.Family
	raw     *nft.FamilyMirror
	lexicon *lexicon
	cache   *readCache
	budget  *budget
	taken   *takingsLog // of the mirror
	before  lastMoment
	tables  map[rules.TableName]*tableText // the tables that exist
	// revealed is the lexicon's count at the last Snapshot.
	revealed uint64
}

// A tableText is one mirrored table.
type tableText struct {
	fresh map[string][]rules.Rule // the rules of chains that the view does not show yet
	view  tableView
}

// table returns a table of the view, and begins it if there is none.
func (f *familyText) table(name rules.TableName) *tableText {
	t := f.tables[name]
	if t == nil {
		t = &tableText{fresh: map[string][]rules.Rule{}}
		f.tables[name] = t
	}
	return t
}

// shown returns the rules that the next Snapshot shows of a chain. Took and reveal compare them
// with the lexicon's texts, to keep unchanged rules in the same memory.
func (t *tableText) shown(chain string) []rules.Rule {
	if fresh, changed := t.fresh[chain]; changed {
		return fresh
	}
	return t.view.ready.Rules(chain)
}

// Reshaped implements nft.MirrorView: the mirror calls it for a chain that is new, deleted, or
// has another hook or policy; chain "" means all chains of the table. The next Snapshot then
// shows the table with its present chains.
func (f *familyText) Reshaped(table, chain string) {
	if chain == "" {
		f.reshapedTable(table)
		return
	}
	t, c := f.table(table), f.raw.Chain(Place{Table: table, Chain: chain})
	switch {
	case c == nil:
		delete(t.fresh, chain)
		t.view.removed(chain)
	case c.Base != nil || rules.Builtin(table, chain):
		t.view.reshaped, t.view.order = true, nil
	default:
		t.view.added(chain)
	}
}

// reshapedTable notes that any chain of a table may have changed, for Reshaped. It drops a
// table or chains that the mirror no longer has.
func (f *familyText) reshapedTable(table string) {
	if !slices.Contains(f.raw.Tables(), table) {
		delete(f.tables, table)
		return
	}
	t := f.table(table)
	t.view.reshaped, t.view.order = true, nil
	maps.DeleteFunc(t.fresh, func(chain string, _ []rules.Rule) bool {
		return f.raw.Chain(Place{Table: table, Chain: chain}) == nil
	})
}

// Took implements nft.MirrorView: the next Snapshot shows the chain's present rules. The same
// bytes (same) may have another text than before, because iptables-restore wrote that text
// meanwhile.
func (f *familyText) Took(p Place, now nft.Content, same bool) {
	t := f.table(p.Table)
	if now.LeftOut {
		if !same {
			t.fresh[p.Chain] = rules.LeftOut(p.Chain)
		}
		return
	}
	// Callers compare an unchanged chain by its address.
	found := f.lexicon.texts(now.IDs, f.cache.chain(f.family, p))
	if same && slices.Equal(found, t.shown(p.Chain)) {
		return
	}
	t.fresh[p.Chain] = found
}

// fit returns how a chain fits its name; see hookFit. Snapshots leave out a stranger, and show
// a misfit as empty. In a dormant table no built-in chain fits.
func (f *familyText) fit(p Place, c *nft.MirrorChain) hookFit {
	fit := fitOf(p, c.Base)
	if fit != stranger && rules.Builtin(p.Table, p.Chain) && f.raw.Dormant(p.Table) {
		return misfit
	}
	return fit
}

// forgetUnused drops rules from the lexicon that no chain has had for long. The mirror's read
// calls it.
func (f *familyText) forgetUnused() {
	if f.lexicon.crowded() {
		f.raw.Purge(f.lexicon.forget)
	}
}

// reveal shows the texts of opaque rules that iptables-restore wrote meanwhile; snapshot calls
// it. A rule with a text keeps it: two texts may make the same bytes.
func (f *familyText) reveal() {
	now := f.lexicon.revealed.Load()
	if now == f.revealed {
		return
	}
	f.revealed = now
	for _, name := range f.raw.Tables() {
		t := f.table(name)
		for _, chain := range f.raw.Chains(name) {
			shown, found := t.shown(chain), f.lexicon.texts(f.raw.Chain(Place{Table: name, Chain: chain}).IDs, nil)
			if len(found) != len(shown) { // left out
				continue
			}
			changed := false
			for i, r := range shown {
				_, opaque := r.Opaque()
				if !opaque {
					found[i] = r
				}
				changed = changed || found[i] != r
			}
			if changed {
				t.fresh[chain] = found
			}
		}
	}
}

// snapshot returns the mirrored family, with the genid as its digest: for a read, and for the
// state before a flush (Taking). Unchanged tables are those of the last Snapshot.
func (f *familyText) snapshot(genid uint64) Snapshot {
	f.reveal()
	s := Snapshot{Family: f.family, Tables: rules.Ruleset{}, Unreadable: map[rules.TableName]error{}, Misfits: map[Place]error{}, Digest: genid}
	changed := false
	for _, name := range f.raw.Tables() {
		t := f.table(name)
		shown := t.view.ready
		s.Tables[name] = f.show(name, t)
		changed = changed || s.Tables[name] != shown
		f.noteMisfits(name, s.Misfits)
	}
	if changed {
		f.cache.put(f.family, s.Tables, time.Now())
	}
	return s
}
