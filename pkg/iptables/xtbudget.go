package iptables

import (
	"context"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// weigh decides which chains are left out, before a family is read. What the kernel says of each
// table's size is enough while all fits.
func (r xtReader) weigh(ctx context.Context, family rules.Family, b *budget) error {
	s := r.sockets[family]
	tables, err := s.tables()
	if err != nil {
		return err
	}
	most := 0 // in units
	for _, table := range tables {
		info, err := s.info(table)
		if err != nil {
			return err
		}
		most += nft.Weight{Rules: int(info.entries), Bytes: int(info.size)}.Units()
	}
	if b.fits(most) && !b.any() {
		return nil
	}
	all := map[Place]nft.Weight{}
	err = r.walk(ctx, family, func(rules.TableName) bool { return true }, func(name rules.TableName, info xtInfo, data []byte) error {
		return weighTable(family, name, info, data, all)
	})
	if err == nil {
		b.choose(all)
	}
	return err
}

// weighTable notes what each chain of a table weighs.
func weighTable(family rules.Family, table rules.TableName, info xtInfo, data []byte, all map[Place]nft.Weight) error {
	var here Place
	var now nft.Weight
	err := walkEntries(family, info, data, xtVisitor{
		chain: func(chain string, _ int) {
			if here.Chain != "" {
				all[here] = now
			}
			here, now = Place{Table: table, Chain: chain}, nft.Weight{}
		},
		rule: func(r xtRule) { now.Add(len(r.entry.whole)) },
	})
	if here.Chain != "" {
		all[here] = now
	}
	return err
}
