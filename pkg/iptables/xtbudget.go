package iptables

import (
	"context"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// weigh decides which chains are left out, before read walks a family. The kernel's sizes of
// the tables are enough while everything fits and no chain is left out.
func (r xtReader) weigh(ctx context.Context, family rules.Family, b *budget) error {
	s := r.sockets[family]
	most := 0 // in units
	err := s.shapes(func(_ rules.TableName, info xtInfo) {
		most += nft.Weight{Rules: int(info.entries), Bytes: int(info.size)}.Units()
	})
	if err != nil || b.Fits(most) && b.Left() == nil {
		return err
	}
	all := map[Place]nft.Weight{}
	err = s.walk(ctx, nil, func(table rules.TableName, info xtInfo, data []byte) error {
		return weighTable(family, table, info, data, all)
	})
	if err == nil {
		b.Choose(all)
	}
	return err
}

// weighTable notes in all the weight of each chain of a table, for weigh.
func weighTable(family rules.Family, table rules.TableName, info xtInfo, data []byte, all map[Place]nft.Weight) error {
	var here Place
	var now nft.Weight
	return walkEntries(family, info, data, xtVisitor{
		chain: func(chain string, _ int) { here, now = Place{Table: table, Chain: chain}, nft.Weight{} },
		rule:  func(r xtRule) { now.Add(len(r.entry.whole)) },
		end:   func(xtRule) { all[here] = now },
	})
}
