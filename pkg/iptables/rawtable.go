package iptables

import (
	"context"
	"errors"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// ErrNoRaw: the Kernel has no nf_tables objects for its tables, as on the legacy backend.
var ErrNoRaw = errors.New("the tables are not known as objects of nf_tables")

// RawTable updates the mirror of a family, and passes a table to use as raw objects; the
// standby translates nat from them. It executes nothing, and costs in proportion to the changes
// since the last read. The table is valid until use returns; other reads wait meanwhile. A
// missing table has no chains. The error is ErrNoRaw, the read's, or use's.
func (k *Kernel) RawTable(ctx context.Context, id tableid.TableID, use func(nft.RawTable) error) error {
	if k.mirror == nil || k.mirror.families[id.Family] == nil || tableName(id.Name) == "" {
		return ErrNoRaw
	}
	ctx, cancel := context.WithTimeout(ctx, k.mirror.timeout)
	defer cancel()
	done, err := k.mirror.raw.Turn(ctx)
	if err != nil {
		return err
	}
	defer done()
	f := k.mirror.families[id.Family]
	genid, err := k.mirror.raw.Read(ctx, f.raw)
	if err != nil {
		return err
	}
	raw, found := f.raw.RawTable(id.Name, genid, f.lexicon.bytes)
	if !found {
		raw = nft.RawTable{ID: id, Genid: genid, Chains: nft.ChainMap{}}
	}
	return use(raw)
}

// bytes returns the rule with that number as nf_tables stores it, for RawTable. It uses room as
// far as that suffices.
func (l *lexicon) bytes(id nft.RuleID, room []byte) nft.Rule {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.store.Rule(id, room)
}
