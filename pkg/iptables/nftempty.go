package iptables

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// RemoveEmpty deletes a table of iptables-nft if it has only built-in chains without rules and
// with their initial policy. It reports whether it did. The kernel itself checks that all are
// empty, and deletes all in one transaction. On legacy a table cannot be deleted.
func (k *Kernel) RemoveEmpty(ctx context.Context, family rules.Family, table rules.TableName) (bool, error) {
	if k.info.Backend != NFT {
		return false, nil
	}
	snapshot, err := k.Read(ctx, family)
	if err != nil {
		return false, err
	}
	t := snapshot.Tables[table]
	if t == nil || !EmptyTable(t) {
		return false, nil
	}
	b := nft.NewBatch()
	b.Port = k.port // the commit is canaryd's own
	// A snapshot also shows built-in chains that do not exist.
	err = k.reader.(nftReader).conn.EachChain(family, func(c nft.Chain) error {
		if c.Table == table {
			b.Begin(unix.NFT_MSG_DELCHAIN, unix.NLM_F_NONREC, family)
			b.Text(unix.NFTA_CHAIN_TABLE, string(table))
			b.Text(unix.NFTA_CHAIN_NAME, c.Name)
			b.End()
		}
		return nil
	})
	if err != nil {
		return false, nft.Wrap("listing the chains of an empty table", err)
	}
	b.Begin(unix.NFT_MSG_DELTABLE, unix.NLM_F_NONREC, family)
	b.Text(unix.NFTA_TABLE_NAME, string(table))
	b.End()
	b.Finish()
	var refused *nft.RefusedError
	switch err := b.Send(); {
	case err == nil:
		return true, nil
	case errors.As(err, &refused) && (refused.Errno == unix.EBUSY || refused.Errno == unix.ENOENT):
		return false, nil // another process has just written to it, or deleted it
	default:
		return false, fmt.Errorf("deleting the empty table %s %s: %w", family, table, err)
	}
}

// EmptyTable reports whether a table has only built-in chains without rules and with the policy
// ACCEPT, so that RemoveEmpty may delete it.
func EmptyTable(t *rules.Table) bool {
	for _, c := range t.Chains {
		if !rules.Builtin(t.Name, c.Name) || len(c.Rules) > 0 || c.Policy != "ACCEPT" {
			return false
		}
	}
	return true
}
