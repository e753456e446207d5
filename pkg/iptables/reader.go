package iptables

import (
	"context"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A reader asks what one backend's tables hold, without creating anything.
// Its methods may be called concurrently.
type reader interface {
	stamp(ctx context.Context, family rules.Family) (Stamp, error)
	probe(ctx context.Context, family rules.Family, places []Place) (Sighting, error)
	// digest returns what probe would put into Sighting.Digest.
	digest(ctx context.Context, family rules.Family) (uint64, error)
	// tables returns the tables that exist.
	tables(ctx context.Context, family rules.Family) ([]rules.TableName, error)
	close() error
}

// Stamp returns a cheap fingerprint of what the family's tables hold: on nft
// the genid, which is exact; on legacy a hash over the shape of each table
// that exists. It creates nothing. It may be called concurrently.
func (k *Kernel) Stamp(ctx context.Context, family rules.Family) (Stamp, error) {
	if err := k.ready(ctx, family); err != nil {
		return Stamp{}, err
	}
	return k.reader.stamp(ctx, family)
}

// Probe looks at the given places and digests the family. A place that cannot
// be read is an error, never "missing". It creates nothing. It may be called
// concurrently.
func (k *Kernel) Probe(ctx context.Context, family rules.Family, places []Place) (Sighting, error) {
	if err := k.ready(ctx, family); err != nil {
		return Sighting{}, err
	}
	return k.reader.probe(ctx, family, places)
}

// ready refuses a family that is not open, and work for a context that ended.
func (k *Kernel) ready(ctx context.Context, family rules.Family) error {
	if _, ok := k.tools[family]; !ok {
		return k.noFamily(family)
	}
	return ctx.Err()
}
