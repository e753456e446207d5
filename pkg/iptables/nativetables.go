package iptables

import (
	"context"
	"errors"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/rules"
)

// nftFamilies are nf_tables' families as nft names them.
var nftFamilies = map[uint8]string{
	unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_ARP: "arp", unix.NFPROTO_NETDEV: "netdev",
	unix.NFPROTO_BRIDGE: "bridge", unix.NFPROTO_IPV6: "ip6",
}

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
	err = conn.each(unix.NFT_MSG_GETTABLE, netlink.Dump, unix.AF_UNSPEC, nil, func(m netlink.Message) error {
		if len(m.Data) < 4 {
			return nil // the end of the dump
		}
		attrs, err := netlink.NewAttributeDecoder(m.Data[4:])
		if err != nil {
			return err
		}
		for attrs.Next() {
			if attrs.Type() == unix.NFTA_TABLE_NAME && !ofIptables(m.Data[0], attrs.String()) {
				found = append(found, nftFamilies[m.Data[0]]+" "+attrs.String())
			}
		}
		return attrs.Err()
	})
	if err != nil {
		return nil, Wrap("listing the native tables", err)
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

// ofIptables reports whether a table is one of iptables-nft's, or our own.
func ofIptables(family uint8, name string) bool {
	if family != unix.NFPROTO_IPV4 && family != unix.NFPROTO_IPV6 {
		return false
	}
	return name == KeeperTable || slices.Contains(rules.AllTables(), rules.TableName(name))
}
