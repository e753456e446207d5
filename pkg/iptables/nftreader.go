package iptables

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// probeTries bounds the repetitions of a probe during which a process commits. A probe takes
// some ten microseconds for each place, so that more than one repetition is rare even with 20
// commits a second.
const probeTries = 4

// An nftReader reads nf_tables. Its digest is the genid, which any commit of any family in the
// network namespace changes.
type nftReader struct {
	conn   *nft.Conn
	asker  *nft.Asker
	memory *nftMemory
}

func (r nftReader) close() error { return errors.Join(r.conn.Close(), r.asker.Close()) }

func (r nftReader) stamp(context.Context, rules.Family) (Stamp, error) {
	id, err := r.genid()
	return Stamp{Value: uint64(id), Exact: true}, err
}

func (r nftReader) digest(context.Context, rules.Family) (uint64, error) {
	id, err := r.genid()
	return uint64(id), err
}

// genid reads the ruleset's counter at a third of the library's price.
func (r nftReader) genid() (id uint32, err error) {
	err = r.asker.Ask(rules.IPv4, []nft.Question{nft.AskGenid(&id)})
	return id, nft.Wrap("asking for the ruleset's counter", err)
}

// probe reads between two equal genids, for Kernel.Probe. If commits continue, it returns its
// last reading with the genid from before, so that the next probe sees a difference. Places
// without a change since the last probe cost almost nothing.
func (r nftReader) probe(ctx context.Context, family rules.Family, places []Place) (Probed, error) {
	if probed, err := r.probeUnchanged(family, places); err == nil {
		return probed, nil
	}
	var probed Probed
	before, err := r.conn.Genid()
	if err != nil {
		return Probed{}, err
	}
	for range probeTries {
		if err := ctx.Err(); err != nil {
			return Probed{}, err
		}
		probed = Probed{Holdings: make(map[Place]Holding, len(places)), Digest: uint64(before)}
		seen := make(map[Place]nftSeen, len(places))
		for _, place := range places {
			if seen[place], err = r.look(family, place); err != nil {
				return Probed{}, err
			}
			probed.Holdings[place] = seen[place].holding
		}
		after, err := r.conn.Genid()
		if err != nil {
			return Probed{}, err
		}
		if after == before {
			r.memory.remember(family, seen)
			break
		}
		before = after
	}
	return probed, nil
}

// look reads one chain for probe: its holding, and the facts by which the next probe finds it
// unchanged. Only a chain without rules costs more than two questions.
func (r nftReader) look(family rules.Family, place Place) (nftSeen, error) {
	var s nftSeen
	err := r.conn.EachRule(family, place.Table, place.Chain, func(m nft.RuleMessage) error {
		s.holding.Rules++
		rule, err := meaningOf(m.Rule)
		if err != nil || !rule.hasComment || rule.target {
			return err
		}
		s.holding.Comments = append(s.holding.Comments, rule.comment)
		s.marks = append(s.marks, nftMark{m.Handle, m.Rule.Clone()})
		return nil
	})
	// After an interrupted dump the genid is another; see probe.
	if err != nil && !errors.Is(err, nft.ErrInterrupted) {
		return nftSeen{}, err
	}
	if s.holding.Rules == 0 {
		s.holding.Presence, err = r.presence(family, place)
		return s, err
	}
	s.holding.Presence = Present
	err = r.asker.Ask(family, []nft.Question{askUse(place, func(use uint32) error { s.use = use; return nil })})
	if errors.Is(err, unix.ENOENT) {
		return s, nil // just deleted, and the genid shows it
	}
	return s, nft.Wrap(fmt.Sprintf("asking for chain %s of table %s", place.Chain, place.Table), err)
}

// presence returns whether the chain or its table exists, for a look that found no rules.
func (r nftReader) presence(family rules.Family, place Place) (Presence, error) {
	chain, err := r.conn.HasChain(family, place.Table, place.Chain)
	if err != nil || chain {
		return Present, err
	}
	table, err := r.conn.HasTable(family, place.Table)
	if err != nil || table {
		return NoChain, err
	}
	return NoTable, nil
}
