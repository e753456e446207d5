package iptables

import (
	"context"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A reader reads one backend's tables, without creating anything. Its methods may be called
// concurrently.
type reader interface {
	stamp(ctx context.Context, family rules.Family) (Stamp, error)
	probe(ctx context.Context, family rules.Family, places []Place) (Probed, error)
	// digest returns the value that probe would put into Probed.Digest.
	digest(ctx context.Context, family rules.Family) (uint64, error)
	close() error
}

// Stamp returns a cheap fingerprint of the family's tables; the daemon probes only after it
// changed. On nft it is the genid, which is exact. On legacy it has the shape of each existing
// table, and a hash over all of them. It creates nothing. It may be called concurrently.
func (k *Kernel) Stamp(ctx context.Context, family rules.Family) (Stamp, error) {
	if err := k.ready(ctx, family); err != nil {
		return Stamp{}, err
	}
	return k.reader.stamp(ctx, family)
}

// Probe looks at the given places and digests the family: the daemon finds lost marks by it. An
// unreadable place is an error, never "missing". It creates nothing. It may be called
// concurrently.
func (k *Kernel) Probe(ctx context.Context, family rules.Family, places []Place) (Probed, error) {
	if err := k.ready(ctx, family); err != nil {
		return Probed{}, err
	}
	return k.reader.probe(ctx, family, places)
}

// ProbeOnly is Probe of the places alone, for urgent looks before a long walk (see
// Stamp.Urgent). On legacy it walks only their tables, so that it has no digest of the whole
// family. It may be called concurrently.
func (k *Kernel) ProbeOnly(ctx context.Context, family rules.Family, places []Place) (Probed, error) {
	if err := k.ready(ctx, family); err != nil {
		return Probed{}, err
	}
	if r, ok := k.reader.(xtReader); ok {
		holdings, err := r.probeOnly(ctx, family, places)
		return Probed{Holdings: holdings}, err
	}
	return k.reader.probe(ctx, family, places)
}

// ready returns an error for a family that is not open, or a context that ended. Every read and
// write of a family calls it first.
func (k *Kernel) ready(ctx context.Context, family rules.Family) error {
	if _, ok := k.tools[family]; !ok {
		return k.noFamily(family)
	}
	return ctx.Err()
}
