package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A familyText is the text of one family's mirrored tables. It implements nft.MirrorView and
// nft.MirrorFiller.
type familyText struct {
	family  rules.Family
	raw     *nft.FamilyMirror
	lexicon *lexicon
	printer printer
	shelf   *shelf
	budget  *budget
	taken   *takingsLog // of the mirror
	before  lastMoment
	tables  map[rules.TableName]*tableText // those that exist
}

// A tableText is the text of one mirrored table.
type tableText struct {
	// fresh are the rules of chains that the view does not show yet.
	fresh map[string][]rules.Rule
	// textless are chains with rules whose text has to be asked, and what they held when they
	// were read.
	textless map[string]nft.Content
	// fickle are chains with rules whose bytes do not say what they mean.
	fickle map[string]bool
	// doubted are chains of which iptables printed what cannot be the text of their rules, and
	// when.
	doubted map[string]time.Time
	view    tableView
}

// table returns the text of a table, which it begins if there is none.
func (f *familyText) table(name rules.TableName) *tableText {
	t := f.tables[name]
	if t == nil {
		t = &tableText{fresh: map[string][]rules.Rule{}, textless: map[string]nft.Content{}, fickle: map[string]bool{}, doubted: map[string]time.Time{}}
		f.tables[name] = t
	}
	return t
}

// forget drops what is known of a chain.
func (t *tableText) forget(chain string) {
	delete(t.fresh, chain)
	delete(t.textless, chain)
	delete(t.fickle, chain)
	delete(t.doubted, chain)
}

// Reshaped implements nft.MirrorView.
func (f *familyText) Reshaped(table, chain string) {
	if chain == "" {
		f.reshapedTable(table)
		return
	}
	t, c := f.table(table), f.raw.Chain(Place{Table: table, Chain: chain})
	switch {
	case c == nil:
		t.forget(chain)
		t.view.removed(chain)
	case c.Base != nil || rules.Builtin(table, chain):
		t.view.reshaped, t.view.order = true, nil
	default:
		t.view.added(chain)
	}
}

// reshapedTable notes that any chain of a table may be another one.
func (f *familyText) reshapedTable(table string) {
	if !slices.Contains(f.raw.Tables(), table) {
		delete(f.tables, table)
		return
	}
	t := f.table(table)
	t.view.reshaped, t.view.order = true, nil
	gone := func(chain string) bool { return f.raw.Chain(Place{Table: table, Chain: chain}) == nil }
	maps.DeleteFunc(t.fresh, func(chain string, _ []rules.Rule) bool { return gone(chain) })
	maps.DeleteFunc(t.textless, func(chain string, _ nft.Content) bool { return gone(chain) })
	maps.DeleteFunc(t.fickle, func(chain string, _ bool) bool { return gone(chain) })
	maps.DeleteFunc(t.doubted, func(chain string, _ time.Time) bool { return gone(chain) })
}

// Took implements nft.MirrorView.
func (f *familyText) Took(p Place, now nft.Content, same bool) {
	t := f.table(p.Table)
	_, textless := t.textless[p.Chain]
	if same && !textless && !t.fickle[p.Chain] {
		return // known, or as opaque as it was
	}
	t.forget(p.Chain)
	if now.LeftOut {
		t.fresh[p.Chain] = rules.LeftOut(p.Chain)
		return
	}
	found, known := f.lexicon.texts(now.IDs)
	if !known {
		fit, missing := f.fit(p, f.raw.Chain(p)), f.printer.tools[f.family].missing
		switch {
		case fit == fits && missing != nil:
			found = f.lexicon.textsOr(now.IDs, missing.Error())
		case fit == fits:
			t.textless[p.Chain] = now
		case fit == shifted:
			found = f.lexicon.textsOr(now.IDs, errShifted.Error())
		default: // a misfit or a stranger is not shown
		}
	}
	t.fresh[p.Chain] = f.shared(p, found)
}

// shared returns found, or what the shelf has in memory of the same.
func (f *familyText) shared(p Place, found []rules.Rule) []rules.Rule {
	if earlier := f.shelf.chain(f.family, p); earlier != nil && slices.Equal(found, earlier.Rules) {
		return earlier.Rules
	}
	return found
}

// fit returns how a chain fits its name; see hookFit. In a dormant table no built-in chain does.
func (f *familyText) fit(p Place, c *nft.MirrorChain) hookFit {
	fit := fitOf(p, c.Base)
	if fit != stranger && rules.Builtin(p.Table, p.Chain) && f.raw.Dormant(p.Table) {
		return misfit
	}
	return fit
}

// Wants implements nft.MirrorFiller.
func (f *familyText) Wants() bool {
	for _, t := range f.tables {
		if len(t.textless) > 0 {
			return true
		}
	}
	return false
}

// Fill implements nft.MirrorFiller: it asks iptables for what the lexicon lacks. It believes what
// is printed of a chain only if the chain holds the very same rules before and after; other chains
// are read again. Before is when iptables has started, as far as its version allows that: a chain
// that changes more often than a program starts is learned all the same.
func (f *familyText) Fill(ctx context.Context, catchUp func() error) error {
	for _, name := range slices.Collect(maps.Keys(f.tables)) {
		// A table may go, or be another one, while it is asked for.
		for t := f.tables[name]; t != nil && len(t.textless) > 0; t = f.tables[name] {
			// What is to be read may have changed again; the rest of its table
			// can be asked for nevertheless.
			var batch []Place
			for chain := range t.textless {
				if batch = append(batch, Place{Table: name, Chain: chain}); len(batch) == printMost {
					break
				}
			}
			slices.SortFunc(batch, func(a, b Place) int { return strings.Compare(a.Chain, b.Chain) })
			if err := f.ask(ctx, name, batch, catchUp); err != nil {
				return err
			}
			if f.raw.Dirty() {
				return nil // listen first to what happened
			}
		}
	}
	return nil
}

// read returns what a chain without text held when it was last read; nothing of any other chain.
func (f *familyText) read(p Place) nft.Content {
	if t := f.tables[p.Table]; t != nil {
		return t.textless[p.Chain]
	}
	return nft.Content{}
}

// errNotAsked: a chain was not printed, because it had no rules then, or its text was known.
var errNotAsked = errors.New("was not asked for")

// A chainAnswer is what was printed of a chain, rule by rule: an opaque rule where it could not be
// read, and an error for all of them if iptables does not understand the chain.
type chainAnswer struct {
	of      nft.Content // as it was read before it was asked for
	rules   []rules.Rule
	err     error
	skipped map[int]error // rules that were not asked for, and why
}

// ask has one batch of a table's chains printed.
func (f *familyText) ask(ctx context.Context, table rules.TableName, batch []Place, catchUp func() error) error {
	answers := make(map[Place]chainAnswer, len(batch))
	begin := func(place Place) (rules int) { // none: it is not printed as a whole
		before := f.read(place)
		if f.lexicon.anyOdd(before.IDs) { // a rule is known to take several lines
			answers[place] = chainAnswer{of: before, err: errLines}
			return 0
		}
		answers[place] = chainAnswer{of: before, err: errNotAsked}
		return len(before.IDs)
	}
	var whole []printedChain
	for _, place := range batch {
		if n := begin(place); n > 0 {
			whole = append(whole, printedChain{place, n})
		}
	}
	p := f.printer
	if p.late {
		p.ready = func(chains []printedChain) error {
			err := catchUp()
			for i, c := range chains {
				chains[i].rules = begin(c.place)
			}
			return err
		}
	}
	err := p.print(ctx, f.family, whole, func(place Place, found []rules.Rule, err error) {
		answers[place] = chainAnswer{of: answers[place].of, rules: found, err: err}
	})
	t := f.tables[table]
	if err != nil || t == nil {
		return err
	}
	for _, place := range batch {
		before, wanted := t.textless[place.Chain]
		if !wanted {
			continue // it changed meanwhile, and is known or gone
		}
		said := answers[place]
		same, err := false, error(nil)
		// Another program that started later may have had it read again.
		if !errors.Is(said.err, errNotAsked) && before.Equal(said.of) {
			same, err = f.raw.Still(place, before)
		}
		if err == nil && same && errors.Is(said.err, errLines) {
			if said, err = f.askRules(ctx, place, before.IDs); errors.As(err, &failedPrint{}) {
				said.err, err = err, nil
			}
			if err == nil {
				same, err = f.raw.Still(place, before)
			}
		}
		if err != nil {
			return err
		}
		if !same {
			f.raw.RereadItself(place)
			continue
		}
		if errors.As(said.err, &failedPrint{}) {
			return said.err
		}
		doubted := f.learn(t, place, before.IDs, said)
		delete(t.textless, place.Chain)
		if doubted {
			t.doubted[place.Chain] = time.Now()
		}
	}
	if len(t.textless) == 0 {
		t.textless = map[string]nft.Content{} // it may have been large
	}
	return nil
}

// askRules has those rules of a chain printed of which the text is not known, one by one.
func (f *familyText) askRules(ctx context.Context, place Place, ids []nft.RuleID) (chainAnswer, error) {
	said := chainAnswer{rules: make([]rules.Rule, len(ids)), skipped: map[int]error{}}
	var unknown []int
	for i, id := range ids {
		rule, certain := f.lexicon.known(id)
		if said.rules[i] = rule; !certain {
			unknown = append(unknown, i)
		}
	}
	err := f.printer.printRules(ctx, f.family, place, unknown, func(i int, rule rules.Rule, err error) {
		switch {
		case errors.Is(err, errOverLines):
			rule = rules.OpaqueRule(nil, "", err.Error())
		case err != nil:
			said.skipped[i] = err
		}
		said.rules[i] = rule
	})
	return said, err
}

// learn pairs a chain's rules with what iptables printed for them. What it did not print, or
// not of the very same rule, is opaque, and the chain is doubted.
func (f *familyText) learn(t *tableText, place Place, ids []nft.RuleID, said chainAnswer) (doubted bool) {
	if said.err == nil && len(said.rules) != len(ids) {
		said.err = fmt.Errorf("its chain holds %d rules, of which iptables prints %d", len(ids), len(said.rules))
	}
	fickle, found := false, make([]rules.Rule, len(ids))
	for i, id := range ids {
		failed := said.err
		if failed == nil {
			failed = said.skipped[i]
		}
		if failed == nil {
			failed = f.lexicon.learn(id, said.rules[i])
		}
		rule, certain := f.lexicon.known(id)
		switch {
		case certain:
		case failed != nil:
			rule, doubted = f.lexicon.opaque(id, failed.Error()), true
		default:
			rule, fickle = said.rules[i], true
		}
		found[i] = rule
	}
	if fickle {
		t.fickle[place.Chain] = true
	}
	t.fresh[place.Chain] = f.shared(place, found)
	return doubted
}

// doubtFor is how long a chain stays as it is of which iptables printed what cannot be its rules,
// or did not understand it: the bytes say nothing of that, so that another try may do better.
const doubtFor = 5 * time.Minute

// doubt has those chains read again that were doubted for long enough.
func (f *familyText) doubt(now time.Time) {
	for name, t := range f.tables {
		for chain, since := range t.doubted {
			if now.Sub(since) >= doubtFor {
				t.fickle[chain], t.doubted[chain] = true, now
				f.raw.Reread(Place{Table: name, Chain: chain})
			}
		}
	}
}

// relearn shows the rules of doubted chains by the text that was learned of them since: the same
// rule may stand in another chain, which iptables can print.
func (f *familyText) relearn() {
	for name, t := range f.tables {
		for chain := range t.doubted {
			c, shown := f.raw.Chain(Place{Table: name, Chain: chain}), t.fresh[chain]
			if shown == nil {
				shown = t.view.ready.Rules(chain)
			}
			if c == nil || len(c.IDs) != len(shown) {
				continue // it is about to be read again
			}
			for i, id := range c.IDs {
				if rule, certain := f.lexicon.known(id); certain && rule != shown[i] {
					shown = slices.Clone(shown)
					shown[i] = rule
					t.fresh[chain] = shown
				}
			}
		}
	}
}

// forgetUnused drops from the lexicon what no chain has held for long.
func (f *familyText) forgetUnused() {
	if f.lexicon.crowded() {
		f.raw.Purge(f.lexicon.forget)
	}
}

// snapshot returns what is mirrored.
func (f *familyText) snapshot(genid uint64) Snapshot {
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
		f.shelf.put(f.family, s.Tables, time.Now())
	}
	return s
}
