package iptables

import (
	"context"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A mirror is the text of an nft.Mirror: what iptables-save would print of iptables' tables, kept
// up to date at a cost in proportion to what changes. It executes nothing for rules whose text is
// known.
type mirror struct {
	raw      *nft.Mirror
	timeout  time.Duration // of a read
	families map[rules.Family]*familyText
	taken    takingsLog // what commits took
}

// A mirrorConfig is what a mirror is made of.
type mirrorConfig struct {
	conn    *nft.Conn
	genid   func() (uint32, error)
	own     func(port, pid uint32) bool // whether a commit is ours
	printer printer
	known   lexicons
	budgets map[rules.Family]*budget
	shelf   *shelf
	timeout time.Duration // of a read
}

func newMirror(cfg mirrorConfig) *mirror {
	m := &mirror{timeout: cfg.timeout, families: map[rules.Family]*familyText{}}
	m.raw = nft.NewMirror(cfg.conn, nft.MirrorConfig{Genid: cfg.genid, Own: cfg.own, Begun: m.taken.restart, Heard: m.hear})
	for family, lexicon := range cfg.known {
		f := &familyText{family: family, lexicon: lexicon, printer: cfg.printer, shelf: cfg.shelf, tables: map[rules.TableName]*tableText{}}
		f.raw = m.raw.Add(nft.FamilyConfig{
			Family: family,
			Tables: func(name string) bool { return tableName(name) != "" },
			Rules:  lexicon,
			Budget: mirrorBudget{cfg.budgets[family], func() { cfg.shelf.drop(family) }},
			View:   f,
		})
		m.families[family] = f
	}
	return m
}

func (m *mirror) close() error { return m.raw.Close() }

// read returns the present state. It may be called concurrently.
func (m *mirror) read(ctx context.Context, family rules.Family) (Snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, m.timeout)
	defer cancel()
	done, err := m.raw.Turn(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	defer done()
	f := m.families[family]
	f.doubt(time.Now())
	genid, err := m.raw.Read(ctx, f.raw, f)
	if err != nil {
		return Snapshot{}, err
	}
	f.forgetUnused()
	return f.snapshot(uint64(genid)), nil
}

// hear takes in one notification, for what commits took.
func (m *mirror) hear(e nft.Event) {
	if e.Kind == unix.NFT_MSG_NEWGEN {
		m.taken.end(e.By, time.Now())
	} else if table := tableName(e.Table); m.families[e.Family] != nil && table != "" {
		m.taken.note(e, table)
	}
}

// patience is how long Takings waits for a read that has the turn.
const patience = 100 * time.Millisecond

// takings takes in what was heard since the last read.
func (m *mirror) takings(ctx context.Context) Takings {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if done, err := m.raw.Turn(ctx); err == nil {
		// What fails here fails at the next read, too, which says so.
		_, _, _ = m.raw.Listen()
		done()
	}
	return m.taken.all()
}

// A mirrorBudget is a family's budget as its mirror asks it.
type mirrorBudget struct {
	*budget
	// shed forgets texts of chains that are left out by now.
	shed func()
}

// Most implements nft.MirrorBudget.
func (b mirrorBudget) Most() int { return b.most }

// Choose implements nft.MirrorBudget.
func (b mirrorBudget) Choose(all map[Place]nft.Weight) (left map[Place]bool, back []Place) {
	out, back := b.choose(all)
	if len(out) > 0 {
		b.shed()
	}
	return b.places(), back
}
