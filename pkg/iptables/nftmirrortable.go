package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A mirrorTable is the mirror of one table.
type mirrorTable struct {
	name    rules.TableName
	chains  map[string]*mirrorChain
	highest uint64 // of all chains' handles
	// untold are chains with rules whose text has to be asked, and what they
	// held when they were read.
	untold map[string]content
	// doubted are chains of which iptables printed what cannot be the text of their rules, and when.
	doubted map[string]time.Time
	view    tableView
}

// A mirrorChain is the mirror of one chain.
type mirrorChain struct {
	handle uint64
	base   *nft.Chain // nil for a chain of the user's
	ids    []ruleID
	read   bool
	// rules is what content says. It is never changed in place: Snapshots
	// share it.
	rules []rules.Rule
	// fickle: it holds rules whose bytes do not say what they mean.
	fickle bool
	weight weight // of its rules when they were read
	use    uint32 // no fewer than its rules when it was first seen
	out    *outOf // nil if its rules are kept
}

func newMirrorTable(name rules.TableName) *mirrorTable {
	return &mirrorTable{name: name, chains: map[string]*mirrorChain{}, untold: map[string]content{}, doubted: map[string]time.Time{}}
}

// see notes that a chain exists. One that was not known has yet to be read.
func (t *mirrorTable) see(raw nft.Chain) {
	t.highest = max(t.highest, raw.Handle)
	name := raw.Name
	c := t.chains[name]
	if c == nil {
		c = &mirrorChain{use: raw.Use}
		t.chains[name] = c
		t.view.added(t.name, raw)
	}
	raw.Use = 0 // it changes with each rule
	if c.handle == raw.Handle && raw.Base == (c.base != nil) && (!raw.Base || raw == *c.base) {
		return
	}
	if raw.Base || c.base != nil {
		t.view = tableView{}
	}
	c.handle, c.base = raw.Handle, nil
	if raw.Base {
		c.base = &raw
	}
}

// adopt takes over what an earlier mirror of the table, which may be nil, knows
// of the same chains, and returns the names of those that must be read.
func (t *mirrorTable) adopt(old *mirrorTable, l *lexicon) (unread []string) {
	if old == nil {
		return slices.Collect(maps.Keys(t.chains))
	}
	same := len(old.chains) == len(t.chains)
	for name, c := range t.chains {
		was := old.chains[name]
		if was == nil || was.handle != c.handle {
			same = false
			unread = append(unread, name)
			continue
		}
		same = same && (c.base == nil) == (was.base == nil) && (c.base == nil || *c.base == *was.base)
		was.base = c.base
		t.chains[name] = was
		if untold, ok := old.untold[name]; ok {
			t.untold[name] = untold
		}
		if since, ok := old.doubted[name]; ok {
			t.doubted[name] = since
		}
	}
	for name, was := range old.chains {
		if t.chains[name] != was {
			l.release(was.ids)
		}
	}
	if same {
		t.view = old.view
	}
	return unread
}

// renamed reports whether a notification can mean that a chain got another
// name: no new chain has a handle that is not higher than all before.
func (t *mirrorTable) renamed(e nft.Event) bool {
	if c := t.chains[string(e.Chain)]; c != nil && c.handle == e.Handle {
		return false
	}
	known := e.Handle <= t.highest
	t.highest = max(t.highest, e.Handle)
	return known && e.Kind == unix.NFT_MSG_NEWCHAIN
}

func (t *mirrorTable) drop(name string, l *lexicon) {
	c := t.chains[name]
	if c == nil {
		return
	}
	l.release(c.ids)
	delete(t.chains, name)
	delete(t.untold, name)
	delete(t.doubted, name)
	t.view.removed(name)
}

// take notes what a chain holds now. earlier is the table as it was on the
// shelf, or nil.
func (t *mirrorTable) take(name string, now content, l *lexicon, earlier *rules.Table) {
	c := t.chains[name]
	_, untold := t.untold[name]
	c.weight = now.weight
	if c.read && c.out == nil && !c.fickle && !untold && slices.Equal(c.ids, now.ids) {
		return // known, or as opaque as it was, and nothing changed
	}
	l.release(c.ids)
	c.ids, c.read, c.fickle, c.out = now.ids, true, false, nil
	delete(t.doubted, name)
	delete(t.untold, name)
	t.view.touch(name)
	found, known := l.texts(now.ids)
	if !known && !t.odd(name, c) {
		t.untold[name] = now
	}
	c.rules = shared(found, earlier.Chain(name))
}

// shared returns found, or what an earlier chain has in memory of the same.
func shared(found []rules.Rule, earlier *rules.Chain) []rules.Rule {
	if earlier != nil && slices.Equal(found, earlier.Rules) {
		return earlier.Rules
	}
	return found
}

// odd reports whether the chain is none that iptables shows: it has a hook, but
// is not one of the built-in chains (iptables-nft-save 1.8.9 leaves it out:
// "contains incompatible base-chains").
func (t *mirrorTable) odd(name string, c *mirrorChain) bool {
	if c.base == nil {
		return false
	}
	return !rules.Builtin(t.name, name) ||
		baseChainOf(t.name, name) != baseChain{kind: c.base.Kind, hook: c.base.Hook, priority: c.base.Priority}
}

// wantsText reports whether texts must be asked.
func (t *mirrorTable) wantsText() bool { return len(t.untold) > 0 }

// table returns what iptables-save would have said.
func (t *mirrorTable) table() *rules.Table { return t.view.table(t) }

func (c *mirrorChain) policy() string {
	switch {
	case c.base == nil: // a chain of the user's with a built-in chain's name
		return ""
	case c.base.Policy == nfAccept:
		return "ACCEPT"
	default:
		return "DROP"
	}
}

// findTexts asks iptables for what the lexicon lacks. It believes what is
// printed of a chain only if the chain holds the very same rules before and
// after; other chains stay dirty.
func (f *mirrored) findTexts(ctx context.Context, printer printer) error {
	for name, t := range f.tables {
		for t.wantsText() {
			// What is dirty may have changed again; the rest of its table
			// can be asked for nevertheless.
			var batch []Place
			for chain := range t.untold {
				if batch = append(batch, Place{name, chain}); len(batch) == printMost {
					break
				}
			}
			slices.SortFunc(batch, func(a, b Place) int { return strings.Compare(a.Chain, b.Chain) })
			if err := f.ask(ctx, printer, t, batch); err != nil {
				return err
			}
			if len(f.dirty) > 0 {
				return nil // hear first what happened
			}
		}
	}
	return nil
}

// A chainAnswer is what was printed of a chain, rule by rule: an opaque rule where it could not be
// read, and an error for all of them if iptables does not understand the chain.
type chainAnswer struct {
	rules   []rules.Rule
	err     error
	skipped map[int]error // rules that were not asked for, and why
}

// ask has one batch of chains printed.
func (f *mirrored) ask(ctx context.Context, printer printer, t *mirrorTable, batch []Place) error {
	answers := make(map[Place]chainAnswer, len(batch))
	var plain []printedChain // of which each rule takes one line, as far as is known
	for _, place := range batch {
		if before := t.untold[place.Chain]; f.lexicon.anyOdd(before.ids) {
			answers[place] = chainAnswer{err: errLines}
		} else {
			plain = append(plain, printedChain{place, len(before.ids)})
		}
	}
	err := printer.print(ctx, f.family, plain, func(place Place, found []rules.Rule, err error) {
		answers[place] = chainAnswer{rules: found, err: err}
	})
	if err != nil {
		return err
	}
	earlier := f.shelf.known(f.family)(t.name)
	for _, place := range batch {
		before, said := t.untold[place.Chain], answers[place]
		same, err := f.still(place, before)
		if err == nil && same && errors.Is(said.err, errLines) {
			if said, err = f.askRules(ctx, printer, place, before.ids); err == nil {
				same, err = f.still(place, before)
			}
		}
		if err != nil {
			return err
		}
		if !same {
			f.dirty[place] = true
			continue
		}
		c := t.chains[place.Chain]
		if c.learn(said, f.lexicon) {
			t.doubted[place.Chain] = time.Now()
		}
		c.rules = shared(c.rules, earlier.Chain(place.Chain))
		t.view.touch(place.Chain)
		delete(t.untold, place.Chain)
	}
	if len(t.untold) == 0 {
		t.untold = map[string]content{} // it may have been large
	}
	return nil
}

// still reports whether a chain holds what it held.
func (f *mirrored) still(place Place, before content) (bool, error) {
	after, err := f.content(place)
	if errors.Is(err, nft.ErrInterrupted) {
		return false, nil
	}
	return err == nil && slices.Equal(after.ids, before.ids) && slices.Equal(after.handles, before.handles), err
}

// askRules has those rules of a chain printed of which the text is not known, one by one.
func (f *mirrored) askRules(ctx context.Context, printer printer, place Place, ids []ruleID) (chainAnswer, error) {
	said := chainAnswer{rules: make([]rules.Rule, len(ids)), skipped: map[int]error{}}
	var unknown []int
	for i, id := range ids {
		rule, certain := f.lexicon.known(id)
		if said.rules[i] = rule; !certain {
			unknown = append(unknown, i)
		}
	}
	err := printer.printRules(ctx, f.family, place, unknown, func(i int, rule rules.Rule, err error) {
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

// learn pairs the chain's rules with what iptables printed for them. What it did not print, or
// not of the very same rule, is opaque, and the chain is doubted.
func (c *mirrorChain) learn(said chainAnswer, l *lexicon) (doubted bool) {
	if said.err == nil && len(said.rules) != len(c.ids) {
		said.err = fmt.Errorf("its chain holds %d rules, of which iptables prints %d", len(c.ids), len(said.rules))
	}
	c.rules, c.fickle = make([]rules.Rule, len(c.ids)), false
	for i, id := range c.ids {
		failed := said.err
		if failed == nil {
			failed = said.skipped[i]
		}
		if failed == nil {
			failed = l.tell(id, said.rules[i])
		}
		rule, certain := l.known(id)
		switch {
		case certain:
		case failed != nil:
			rule, doubted = l.opaque(id, failed.Error()), true
		default:
			rule, c.fickle = said.rules[i], true
		}
		c.rules[i] = rule
	}
	return doubted
}

// doubtFor is how long a chain stays as it is of which iptables printed what cannot be its rules,
// or did not understand it: the bytes say nothing of that, so that another try may do better.
const doubtFor = 5 * time.Minute

// doubt has those chains read again that were doubted for long enough.
func (f *mirrored) doubt(now time.Time) {
	for name, t := range f.tables {
		for chain, since := range t.doubted {
			if now.Sub(since) < doubtFor {
				continue
			}
			t.chains[chain].read, t.doubted[chain] = false, now
			if place := (Place{name, chain}); !f.dirty[place] {
				f.dirty[place] = false
			}
		}
	}
}
