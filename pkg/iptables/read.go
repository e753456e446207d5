package iptables

import (
	"context"

	"github.com/canaryd/canaryd/pkg/rules"
)

// Read returns the content of the family's tables. On nft it reads only the changes since the
// last Read (see mirror), on legacy everything. It executes nothing. A rule that pkg/ruleset
// cannot spell is opaque, unless a Session has had iptables-restore write it. Unchanged chains
// are those of the last Snapshot, so that callers can compare them by address.
//
// A table that exists in the kernel but that iptables cannot print is Unreadable, never absent.
// Every other failure, such as missing privileges or the deadline, is an error. Read may be
// called concurrently.
func (k *Kernel) Read(ctx context.Context, family rules.Family) (Snapshot, error) {
	if err := k.ready(ctx, family); err != nil {
		return Snapshot{}, err
	}
	if k.mirror != nil {
		return k.mirror.read(ctx, family)
	}
	return k.walk(ctx, family)
}
