package iptables

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
)

// An execReader is the portable floor: it learns everything from
// iptables-save, where iptables works but the kernel may not be asked (a
// kernel that answers the programs only, or structs laid out for i386).
//
// It does not use go-iptables' List: that executes "iptables -S", which on
// legacy creates the table, takes the lock that wakes our own watcher (and go-
// iptables hands the child our environment, so the lock could be moved only
// by os.Setenv for the whole process), and whose "missing" would need this
// full read as a second opinion anyway. So every answer is the second opinion.
type execReader struct{ save saver }

func (execReader) close() error { return nil }

func (r execReader) stamp(ctx context.Context, family rules.Family) (Stamp, error) {
	digest, err := r.digest(ctx, family)
	return Stamp{Value: digest, Exact: true}, err
}

func (r execReader) digest(ctx context.Context, family rules.Family) (uint64, error) {
	set, _, err := r.save.read(ctx, family)
	if err != nil {
		return 0, err
	}
	return textDigest(set), nil
}

func (r execReader) tables(ctx context.Context, family rules.Family) ([]rules.TableName, error) {
	set, unreadable, err := r.save.read(ctx, family)
	if err != nil {
		return nil, err
	}
	names := slices.AppendSeq(slices.Collect(maps.Keys(set)), maps.Keys(unreadable))
	return sortedTables(names), nil
}

func (r execReader) probe(ctx context.Context, family rules.Family, places []Place) (Sighting, error) {
	set, unreadable, err := r.save.read(ctx, family)
	if err != nil {
		return Sighting{}, err
	}
	sighting := Sighting{Holdings: make(map[Place]Holding, len(places)), Digest: textDigest(set)}
	for _, place := range places {
		if err := unreadable[place.Table]; err != nil {
			return Sighting{}, err
		}
		holding, err := textHolding(set[place.Table], place.Chain)
		if err != nil {
			return Sighting{}, err
		}
		sighting.Holdings[place] = holding
	}
	return sighting, nil
}

func textHolding(table *rules.Table, name string) (Holding, error) {
	if table == nil {
		return Holding{Presence: NoTable}, nil
	}
	chain := table.Chain(name)
	if chain == nil {
		return Holding{Presence: NoChain}, nil
	}
	h := Holding{Presence: Present, Rules: len(chain.Rules)}
	for _, rule := range chain.Rules {
		if rule.Target != "" {
			continue
		}
		words, err := rules.Split(rule.Spec)
		if err != nil {
			return Holding{}, err
		}
		if i := slices.Index(words, "--comment"); i >= 0 && i+1 < len(words) {
			h.Comments = append(h.Comments, words[i+1])
		}
	}
	return h, nil
}

func textDigest(set rules.Ruleset) uint64 {
	sum := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(set)) {
		sum.Write([]byte("*" + name + "\n"))
		for _, chain := range set[name].Chains {
			sum.Write([]byte(":" + chain.Name + " " + chain.Policy + "\n"))
			for _, rule := range chain.Rules {
				sum.Write([]byte(rule.Spec + "\n"))
			}
		}
	}
	return binary.BigEndian.Uint64(sum.Sum(nil))
}
