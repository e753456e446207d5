package iptables

import (
	"context"
	"fmt"
	"hash/fnv"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// GatherEvidence reads every table of both backends again; the daemon calls it after Moved. The
// Kernel continues with the backend that it was opened with, whatever the evidence says. If
// that backend was forced, the Evidence is forced, too. It may be called concurrently.
func (k *Kernel) GatherEvidence(ctx context.Context) (Evidence, error) {
	evidence, err := Choose(ctx, k.cfg.chooseConfig())
	if err == nil && k.cfg.Backend != "" {
		evidence = evidence.Force(k.cfg.Backend)
	}
	return evidence, err
}

// Moved reports whether the tables behind last may have changed. It reads no rules: on legacy it
// reads the shapes of the existing tables, on nft the genid. It looks at the backend that is not
// in use. The other one changes all the time and only becomes heavier. If last.speaksForItself
// is false, Moved looks at both backends. It may be called concurrently.
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

// speaksForItself reports that more rules in ours would only confirm e. This is false while e is
// thin: its reason must name the decisive fact, such as the hint chain of a kubelet that starts
// later. Counting so few rules again costs nothing. It is also false while ours is empty and the
// other backend is not: the first rule in ours would make the backends mixed.
func (e Evidence) speaksForItself(ours Backend) bool {
	own, other := e.Total(ours), e.Total(ours.Other())
	thin := own.weight()+other.weight() < hintWeight
	alone := own.Rules == 0 && other.Rules > 0
	return !thin && !alone
}

// Other returns the other backend: Legacy for NFT, and NFT for any other value.
func (b Backend) Other() Backend {
	if b == NFT {
		return Legacy
	}
	return NFT
}

// stampBackends takes a cheap fingerprint of each backend, for Choose; Moved compares it with a
// later one. For a backend that the kernel does not have, it is a constant.
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

// stampNFT returns the genid, 0 without nf_tables.
func stampNFT() (uint64, error) {
	conn, genid, err := nft.DialIfAny()
	if conn == nil {
		return 0, err
	}
	return uint64(genid), conn.Close()
}

// stampLegacy hashes the shape of each table that exists, for stampBackends.
func stampLegacy(families []rules.Family) (uint64, error) {
	sum := fnv.New64a()
	err := eachLegacy(families, func(s *xtSocket) error {
		return s.shapes(func(_ rules.TableName, info xtInfo) { sum.Write(info.raw[:]) })
	})
	return sum.Sum64(), err
}
