package iptables

import (
	"context"
	"fmt"
	"hash/fnv"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// GatherEvidence reads both backends again. The Kernel goes on with
// the backend that it was opened with, whatever the evidence says; where that
// one was forced, so is the Evidence's. It reads every table of both backends
// (see Moved). It may be called concurrently.
func (k *Kernel) GatherEvidence(ctx context.Context) (Evidence, error) {
	evidence, err := Choose(ctx, k.cfg.chooseConfig())
	if err == nil && k.cfg.Backend != "" {
		evidence = evidence.Force(k.cfg.Backend)
	}
	return evidence, err
}

// Moved reports whether what last rests on may be another by now. It reads no
// rule: on legacy it asks for the shape of the tables that exist, on nft for
// the genid. It looks at the backend that is not in use, because the one that
// is changes all the time and only becomes heavier. Where last.speaksForItself
// is false, it looks at both. It may be called concurrently.
func (k *Kernel) Moved(ctx context.Context, last Evidence) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	now, err := stampBackends(k.cfg.Families)
	if err != nil {
		return false, fmt.Errorf("looking at the other backend: %w", err)
	}
	ours, other := k.info.Backend, k.info.Backend.Other()
	if now[other] != last.stamps[other] {
		return true, nil
	}
	return !last.speaksForItself(ours) && now[ours] != last.stamps[ours], nil
}

// speaksForItself reports that more rules in ours would only confirm what e says.
// They would not while e is thin: its reason must name what decides, such as the
// hint chain of a kubelet that starts after canaryd. To count so little again
// costs nothing. Nor would they while ours is empty and the other backend is not: its
// first rule would make the backends mixed.
func (e Evidence) speaksForItself(ours Backend) bool {
	own, other := e.Total(ours), e.Total(ours.Other())
	thin := own.weight()+other.weight() < hintWeight
	alone := own.Rules == 0 && other.Rules > 0
	return !thin && !alone
}

// Other returns the other backend.
func (b Backend) Other() Backend {
	if b == NFT {
		return Legacy
	}
	return NFT
}

// stampBackends takes a cheap fingerprint of each backend; of one that the
// kernel does not have it is 0.
func stampBackends(families []rules.Family) (map[Backend]uint64, error) {
	nft, err := stampNFT()
	if err != nil {
		return nil, err
	}
	legacy, err := stampLegacy(families)
	if err != nil {
		return nil, err
	}
	return map[Backend]uint64{NFT: nft, Legacy: legacy}, nil
}

func stampNFT() (uint64, error) {
	conn, genid, err := nft.DialIfAny()
	if conn == nil {
		return 0, err
	}
	return uint64(genid), conn.Close()
}

// stampLegacy hashes the shape of each table that exists.
func stampLegacy(families []rules.Family) (uint64, error) {
	sum := fnv.New64a()
	err := eachLegacy(families, func(s *xtSocket) error {
		return s.shapes(func(_ rules.TableName, info xtInfo) { sum.Write(info.raw[:]) })
	})
	return sum.Sum64(), err
}
