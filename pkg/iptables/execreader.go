package iptables

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"sync"

	"github.com/canaryd/canaryd/pkg/rules"
)

// An execReader is the portable floor, where iptables works but the kernel may
// not be asked (a kernel that answers the programs only, or structs laid out
// for i386).
//
// The stamp is the cheap look: what go-iptables lists of the chains that the
// last probe asked for, one short exec each. The probe is the second opinion on
// whatever moves that stamp: one iptables-save, which alone can say that
// something is missing, because the failure of a list does not tell a missing
// chain from a table that iptables cannot print.
type execReader struct {
	save  saver
	lists map[rules.Family]*lister

	mu     sync.Mutex
	stands map[rules.Family][]Place // what the last probe saw to exist
}

func (*execReader) close() error { return nil }

// stamp is not exact: it knows of the chains that were asked for and of no
// others. It creates no table, which a legacy list would do: nothing is listed
// in a table that the last probe did not see.
func (r *execReader) stamp(ctx context.Context, family rules.Family) (Stamp, error) {
	r.mu.Lock()
	places := r.stands[family]
	r.mu.Unlock()
	sum := fnv.New64a()
	for _, place := range places {
		fmt.Fprintf(sum, "%s %s\n", place.Table, place.Chain)
		lines, err := r.lists[family].list(ctx, place)
		if ctx.Err() != nil {
			return Stamp{}, ctx.Err()
		}
		if err != nil { // odd, and for the probe to explain
			lines = []string{err.Error()}
		}
		for _, line := range lines {
			fmt.Fprintln(sum, line)
		}
	}
	return Stamp{Value: sum.Sum64()}, nil
}

func (r *execReader) digest(ctx context.Context, family rules.Family) (uint64, error) {
	set, _, err := r.save.read(ctx, family)
	if err != nil {
		return 0, err
	}
	return textDigest(set), nil
}

func (r *execReader) tables(ctx context.Context, family rules.Family) ([]rules.TableName, error) {
	set, unreadable, err := r.save.read(ctx, family)
	if err != nil {
		return nil, err
	}
	names := slices.AppendSeq(slices.Collect(maps.Keys(set)), maps.Keys(unreadable))
	return sortedTables(names), nil
}

func (r *execReader) probe(ctx context.Context, family rules.Family, places []Place) (Sighting, error) {
	set, unreadable, err := r.save.read(ctx, family)
	if err != nil {
		return Sighting{}, err
	}
	sighting := Sighting{Holdings: make(map[Place]Holding, len(places)), Digest: textDigest(set)}
	var stands []Place
	for _, place := range places {
		if err := unreadable[place.Table]; err != nil {
			return Sighting{}, err
		}
		holding, err := textHolding(set[place.Table], place.Chain)
		if err == nil && holding.Presence == NoChain {
			err = r.confirmMissing(ctx, family, place)
		}
		if err != nil {
			return Sighting{}, err
		}
		sighting.Holdings[place] = holding
		if holding.Presence != NoTable {
			stands = append(stands, place)
		}
	}
	r.mu.Lock()
	r.stands[family] = stands
	r.mu.Unlock()
	return sighting, nil
}

// confirmMissing returns an error if iptables lists a chain that iptables-save
// does not print: missing is what both say.
func (r *execReader) confirmMissing(ctx context.Context, family rules.Family, place Place) error {
	_, err := r.lists[family].list(ctx, place)
	if err == nil && !rules.Builtin(place.Table, place.Chain) { // nft's programs list built-in chains that are not there
		return fmt.Errorf("%s %s: iptables lists it and iptables-save does not print it", place.Table, place.Chain)
	}
	return ctx.Err()
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
