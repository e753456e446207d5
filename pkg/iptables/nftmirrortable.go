package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

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
	// refused are chains that iptables does not understand, and why.
	refused map[string]error
	view    tableView
}

// A mirrorChain is the mirror of one chain.
type mirrorChain struct {
	handle uint64
	base   *rawChain // nil for a chain of the user's
	ids    []ruleID
	read   bool
	// rules is what content says. It is never changed in place: Snapshots
	// share it.
	rules []rules.Rule
	// fickle: it holds rules whose bytes do not say what they mean.
	fickle bool
}

func newMirrorTable(name rules.TableName) *mirrorTable {
	return &mirrorTable{name: name, chains: map[string]*mirrorChain{}, untold: map[string]content{}, refused: map[string]error{}}
}

// see notes that a chain exists. One that was not known has yet to be read.
func (t *mirrorTable) see(raw rawChain) {
	t.highest = max(t.highest, raw.handle)
	name := raw.place.Chain
	c := t.chains[name]
	if c == nil {
		c = &mirrorChain{}
		t.chains[name] = c
		t.view.added(t.name, raw)
	}
	if c.handle == raw.handle && raw.base == (c.base != nil) && (!raw.base || raw == *c.base) {
		return
	}
	if raw.base || c.base != nil {
		t.view = tableView{}
	}
	c.handle, c.base = raw.handle, nil
	if raw.base {
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
		if err := old.refused[name]; err != nil {
			t.refused[name] = err
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
func (t *mirrorTable) renamed(e nftEvent) bool {
	if c := t.chains[string(e.chain)]; c != nil && c.handle == e.handle {
		return false
	}
	known := e.handle <= t.highest
	t.highest = max(t.highest, e.handle)
	return known && e.kind == unix.NFT_MSG_NEWCHAIN
}

func (t *mirrorTable) drop(name string, l *lexicon) {
	c := t.chains[name]
	if c == nil {
		return
	}
	l.release(c.ids)
	delete(t.chains, name)
	delete(t.untold, name)
	delete(t.refused, name)
	t.view.removed(name)
}

// take notes what a chain holds now. earlier is the table as it was on the
// shelf, or nil.
func (t *mirrorTable) take(name string, now content, l *lexicon, earlier *rules.Table) {
	c := t.chains[name]
	_, untold := t.untold[name]
	if c.read && !c.fickle && !untold && slices.Equal(c.ids, now.ids) {
		return // known or refused, and nothing changed
	}
	l.release(c.ids)
	c.ids, c.read, c.fickle = now.ids, true, false
	delete(t.refused, name)
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
		baseChainOf(t.name, name) != baseChain{kind: c.base.kind, hook: c.base.hook, priority: c.base.priority}
}

// wantsText reports whether texts must be asked. A table that iptables cannot
// print as a whole is not worth it.
func (t *mirrorTable) wantsText() bool { return len(t.untold) > 0 && len(t.refused) == 0 }

// refusal says why iptables cannot print the table; nil if it can.
func (t *mirrorTable) refusal() error {
	if len(t.refused) == 0 {
		return nil
	}
	return t.refused[slices.Min(slices.Collect(maps.Keys(t.refused)))]
}

// table returns what iptables-save would have said.
func (t *mirrorTable) table() *rules.Table { return t.view.table(t) }

func (c *mirrorChain) policy() string {
	switch {
	case c.base == nil: // a chain of the user's with a built-in chain's name
		return ""
	case c.base.policy == nfAccept:
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

// ask has one batch of chains printed.
func (f *mirrored) ask(ctx context.Context, printer printer, t *mirrorTable, batch []Place) error {
	type answer struct {
		rules []rules.Rule
		err   error
	}
	answers := make(map[Place]answer, len(batch))
	err := printer.print(ctx, f.family, batch, func(place Place, found []rules.Rule, err error) {
		answers[place] = answer{found, err}
	})
	if err != nil {
		return err
	}
	earlier := f.shelf.known(f.family)(t.name)
	for _, place := range batch {
		before, said := t.untold[place.Chain], answers[place]
		after, err := f.content(place)
		if err != nil && !errors.Is(err, errInterrupted) {
			return err
		}
		if err != nil || !slices.Equal(after.ids, before.ids) || !slices.Equal(after.handles, before.handles) {
			f.dirty[place] = true
			continue
		}
		c := t.chains[place.Chain]
		if said.err == nil {
			said.err = c.learn(said.rules, f.lexicon)
			c.rules = shared(c.rules, earlier.Chain(place.Chain))
		}
		t.view.touch(place.Chain)
		delete(t.untold, place.Chain)
		if said.err != nil {
			t.refused[place.Chain] = fmt.Errorf("chain %s: %w", place.Chain, said.err)
		}
	}
	if len(t.untold) == 0 {
		t.untold = map[string]content{} // it may have been large
	}
	return nil
}

// learn pairs the chain's rules with what iptables printed for them.
func (c *mirrorChain) learn(printed []rules.Rule, l *lexicon) error {
	if len(printed) != len(c.ids) {
		return fmt.Errorf("it holds %d rules, of which iptables prints %d", len(c.ids), len(printed))
	}
	for i, id := range c.ids {
		if err := l.tell(id, printed[i]); err != nil {
			return fmt.Errorf("rule %d: %w", i+1, err)
		}
	}
	found, certain := l.texts(c.ids)
	if !certain {
		found, c.fickle = printed, true
	}
	c.rules = found
	return nil
}
