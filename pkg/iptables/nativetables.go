package iptables

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// NativeTables names the nftables tables that are no iptables' and not our own, such
// as "ip kube-proxy". canaryd does not guard them. Where the kernel has no nf_tables
// there are none.
func (k *Kernel) NativeTables(ctx context.Context) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	conn, err := nft.Dial()
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }() // it was read from only
	if _, err := conn.Genid(); errors.Is(err, nft.ErrNone) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var found []string
	err = conn.EachTable(func(t nft.Table) error {
		if !ofIptables(t) {
			found = append(found, t.Family.NFT()+" "+t.Name)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

// ofIptables reports whether a table is one of iptables-nft's, or our own.
func ofIptables(t nft.Table) bool {
	if strings.HasPrefix(t.Name, protect.OwnTables) {
		return true
	}
	if t.Family != rules.IPv4 && t.Family != rules.IPv6 {
		return false
	}
	return slices.Contains(rules.AllTables(), t.Name)
}
