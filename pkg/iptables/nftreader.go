package iptables

import (
	"context"

	"github.com/canaryd/canaryd/pkg/rules"
)

// probeTries is how often a probe is repeated when somebody commits
// meanwhile. A probe takes some ten microseconds for each place, so that more
// than one repetition is rare even beside 20 commits a second.
const probeTries = 4

// An nftReader reads nf_tables. Its digest is the genid: any commit in the
// network namespace, of whichever family, changes it.
type nftReader struct{ conn *nftConn }

func (r nftReader) close() error { return r.conn.close() }

func (r nftReader) stamp(context.Context, rules.Family) (Stamp, error) {
	id, err := r.conn.genid()
	return Stamp{Value: uint64(id), Exact: true}, err
}

func (r nftReader) digest(context.Context, rules.Family) (uint64, error) {
	id, err := r.conn.genid()
	return uint64(id), err
}

func (r nftReader) tables(_ context.Context, family rules.Family) ([]rules.TableName, error) {
	return r.conn.tables(family)
}

// probe asks between two equal genids. If commits keep coming it returns the
// last answer with the genid from before, so that the next probe sees a
// difference.
func (r nftReader) probe(ctx context.Context, family rules.Family, places []Place) (Sighting, error) {
	var sighting Sighting
	before, err := r.conn.genid()
	if err != nil {
		return Sighting{}, err
	}
	for range probeTries {
		if err := ctx.Err(); err != nil {
			return Sighting{}, err
		}
		sighting = Sighting{Holdings: make(map[Place]Holding, len(places)), Digest: uint64(before)}
		for _, place := range places {
			holding, err := r.holding(family, place)
			if err != nil {
				return Sighting{}, err
			}
			sighting.Holdings[place] = holding
		}
		after, err := r.conn.genid()
		if err != nil {
			return Sighting{}, err
		}
		if after == before {
			break
		}
		before = after
	}
	return sighting, nil
}

// holding reads one chain. Only a chain without rules costs more than one
// question.
func (r nftReader) holding(family rules.Family, place Place) (Holding, error) {
	var h Holding
	err := r.conn.eachRule(family, place, func(rule nftRule) {
		h.Rules++
		if rule.hasComment && !rule.target {
			h.Comments = append(h.Comments, rule.comment)
		}
	})
	if err != nil {
		return Holding{}, err
	}
	if h.Rules == 0 {
		h.Presence, err = r.presence(family, place)
		return h, err
	}
	h.Presence = Present
	return h, nil
}

func (r nftReader) presence(family rules.Family, place Place) (Presence, error) {
	chain, err := r.conn.hasChain(family, place)
	if err != nil || chain {
		return Present, err
	}
	table, err := r.conn.hasTable(family, place.Table)
	if err != nil || table {
		return NoChain, err
	}
	return NoTable, nil
}
