package iptables

import (
	"context"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A mirror shows an nft.Mirror as values: iptables' tables as iptables-save would print them. An
// update costs in proportion to the changes. It executes nothing.
type mirror struct {
	raw      *nft.Mirror
	timeout  time.Duration // of a read
	families map[rules.Family]*familyText
	taken    takingsLog // the takings of commits
}

// newMirror returns a mirror of the families that are open, for openReader. It also makes their
// lexicons, which are the source of the direct path.
func (k *Kernel) newMirror(r nftReader) *mirror {
	k.source = lexicons{}
	m := &mirror{timeout: k.cfg.ReadTimeout, families: map[rules.Family]*familyText{}}
	m.raw = nft.NewMirror(r.conn, nft.MirrorConfig{Genid: r.genid, Own: k.OwnCommit, Muted: k.Muted, Begun: m.taken.restart, Heard: m.hear})
	for family, budget := range k.budgets {
		k.source[family] = newLexicon(family, false, k.sets)
		f := &familyText{
			family: family, lexicon: k.source[family], cache: k.cache, budget: budget, taken: &m.taken,
			tables: map[rules.TableName]*tableText{},
		}
		f.raw = m.raw.Add(nft.FamilyConfig{
			Family: family,
			Tables: func(name string) bool { return tableName(name) != "" },
			Rules:  f.lexicon,
			Budget: budget.Budget,
			View:   f,
		})
		m.families[family] = f
	}
	return m
}

func (m *mirror) close() error { return m.raw.Close() }

// read updates the mirror and returns its present state, for Kernel.Read on nft. It may be
// called concurrently.
func (m *mirror) read(ctx context.Context, family rules.Family) (Snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, m.timeout)
	defer cancel()
	done, err := m.raw.Turn(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	defer done()
	f := m.families[family]
	genid, err := m.raw.Read(ctx, f.raw)
	if err != nil {
		return Snapshot{}, err
	}
	if f.budget.Shed() { // the cache has rules that are left out by now
		f.cache.drop(family)
	}
	f.forgetUnused()
	f.before.named = f.lexicon.numbers()
	return f.snapshot(uint64(genid)), nil
}

// hear passes one notification to the takingsLog: the end of a commit, or a change of an
// iptables table. nft.Mirror calls it.
func (m *mirror) hear(e nft.Event) {
	if e.Kind == unix.NFT_MSG_NEWGEN {
		m.taken.end(e.By, time.Now())
	} else if table := tableName(e.Table); m.families[e.Family] != nil && table != "" {
		m.taken.note(e, table)
	}
}

// patience is the time that Takings waits while a read has the turn.
const patience = 100 * time.Millisecond

// takings takes in the notifications since the last read, and returns all known takings, for
// Kernel.Takings. If a read has the turn for longer than patience, they lack the newest.
func (m *mirror) takings(ctx context.Context) Takings {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if done, err := m.raw.Turn(ctx); err == nil {
		// The next read fails for the same reason, and returns the error.
		_, _, _ = m.raw.Listen()
		done()
	}
	return m.taken.all()
}
