package iptablestest

import (
	"context"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// RemoveEmpty deletes an empty table like Kernel.RemoveEmpty.
func (f *Fake) RemoveEmpty(ctx context.Context, family rules.Family, table rules.TableName) (bool, error) {
	if f.kind != iptables.NFT {
		return false, nil
	}
	snapshot, err := f.Read(ctx, family)
	if err != nil {
		return false, err
	}
	t := snapshot.Tables[table]
	if t == nil || !iptables.EmptyTable(t) {
		return false, nil
	}
	return true, f.DeleteTable(family, table)
}
