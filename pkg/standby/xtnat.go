package standby

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file turns x_tables' nat targets into native expressions. The kernel accepts these targets
// only in a table with the name nat (xt_check_target). Formats: linux/netfilter/nf_nat.h.

// Flags of a range of addresses and ports (NF_NAT_RANGE_*).
const (
	mapAddresses  = 1 << 0
	mapPorts      = 1 << 1
	randomPorts   = 1 << 2
	persistent    = 1 << 3
	fullyRandom   = 1 << 4
	choosing      = randomPorts | persistent | fullyRandom // nf_tables takes these as flags
	understood    = mapAddresses | mapPorts | choosing     // not PROTO_OFFSET (1<<5), not NETMAP (1<<6)
	compatSize    = 20                                     // struct nf_nat_ipv4_multi_range_compat
	rangeSize     = 40                                     // struct nf_nat_range
	range2Size    = 42                                     // struct nf_nat_range2, its padding aside
	addressesFrom = 4
)

// A span is a range to which addresses and ports are mapped, with values in network order.
type span struct {
	flags                uint32
	minAddr, maxAddr     []byte
	minPort, maxPort     []byte
	hasAddress, hasPorts bool
}

// readSpan reads the range of an x_tables target. layout is the revision for DNAT and SNAT, and
// 0 for others. An error means that the range has no native form, or is damaged; the chain is
// then left out of the copy.
func readSpan(family tableid.Family, layout uint32, info []byte) (span, error) {
	var s span
	switch {
	case family == tableid.IPv4 && layout == 0:
		if len(info) < compatSize || binary.NativeEndian.Uint32(info) != 1 {
			return span{}, fmt.Errorf("a range of %d bytes that is not one range", len(info))
		}
		s.flags = binary.NativeEndian.Uint32(info[4:])
		s.minAddr, s.maxAddr = info[8:12], info[12:16]
		s.minPort, s.maxPort = info[16:18], info[18:20]
	case layout <= 2:
		if len(info) < rangeSize || layout == 2 && len(info) < range2Size {
			return span{}, fmt.Errorf("a range of %d bytes is too short", len(info))
		}
		size := 4
		if family == tableid.IPv6 {
			size = 16
		}
		s.flags = binary.NativeEndian.Uint32(info)
		s.minAddr, s.maxAddr = info[addressesFrom:addressesFrom+size], info[addressesFrom+16:addressesFrom+16+size]
		s.minPort, s.maxPort = info[36:38], info[38:40]
	default:
		return span{}, fmt.Errorf("revision %d is not known", layout)
	}
	if s.flags&^uint32(understood) != 0 {
		return span{}, fmt.Errorf("its flags %#x have no native form", s.flags)
	}
	s.hasAddress, s.hasPorts = s.flags&mapAddresses != 0, s.flags&mapPorts != 0
	return s, nil
}

// ports loads the range's ports into registers, and names these in a nat expression's
// attributes. It returns list and attrs with the additions, or unchanged if the range has no
// ports. lowest and highest are the attributes for the ports, which differ by expression.
func (s span) ports(list, attrs []byte, lowest, highest uint16) (newList, newAttrs []byte) {
	if !s.hasPorts {
		return list, attrs
	}
	list = load(list, unix.NFT_REG_3, s.minPort)
	attrs = number(attrs, lowest, unix.NFT_REG_3)
	if !bytes.Equal(s.minPort, s.maxPort) {
		list = load(list, unix.NFT_REG_4, s.maxPort)
		attrs = number(attrs, highest, unix.NFT_REG_4)
	}
	return list, attrs
}

// withFlags adds the flags that say how the kernel chooses, and that it maps ports, as the
// attribute kind. The ports of masq do not imply the latter. The flags of redir replace the
// flags that its ports have set (nft_masq_init and nft_redir_init, Linux 6.18).
func (s span) withFlags(attrs []byte, kind uint16) []byte {
	if flags := s.flags & (choosing | mapPorts); flags != 0 {
		return number(attrs, kind, flags)
	}
	return attrs
}

// nat appends the native form of DNAT or SNAT to the expressions in list; translateTarget calls
// it. kind is NFT_NAT_DNAT or NFT_NAT_SNAT.
func (s span) nat(list []byte, family tableid.Family, kind uint32) []byte {
	attrs := number(number(nil, unix.NFTA_NAT_TYPE, kind), unix.NFTA_NAT_FAMILY, uint32(family))
	if s.hasAddress {
		list = load(list, unix.NFT_REG_1, s.minAddr)
		attrs = number(attrs, unix.NFTA_NAT_REG_ADDR_MIN, unix.NFT_REG_1)
		if !bytes.Equal(s.minAddr, s.maxAddr) {
			list = load(list, unix.NFT_REG_2, s.maxAddr)
			attrs = number(attrs, unix.NFTA_NAT_REG_ADDR_MAX, unix.NFT_REG_2)
		}
	}
	list, attrs = s.ports(list, attrs, unix.NFTA_NAT_REG_PROTO_MIN, unix.NFTA_NAT_REG_PROTO_MAX)
	return expression(list, "nat", s.withFlags(attrs, unix.NFTA_NAT_FLAGS))
}

// translateTarget appends the native form of an x_tables target to the expressions in list, for
// reader.target. marks are the bits of the mark that it may set. An error means that the copy
// cannot have the target, so its chain is left out.
func translateTarget(list []byte, family tableid.Family, e nft.Expression) (out []byte, marks uint32, err error) {
	name := nft.String(nft.AttrPath(e.Data, unix.NFTA_TARGET_NAME))
	revision := nft.AttrNumber(e.Data, unix.NFTA_TARGET_REV)
	info := nft.AttrPath(e.Data, unix.NFTA_TARGET_INFO)
	switch name {
	case "MARK":
		if revision != 2 || len(info) < 8 { // struct xt_mark_tginfo2
			return nil, 0, fmt.Errorf("target MARK in revision %d is not known", revision)
		}
		return expression(list, "target", e.Data), binary.NativeEndian.Uint32(info), nil
	case "DNAT", "SNAT", "MASQUERADE", "REDIRECT":
	default:
		return nil, 0, fmt.Errorf("target %q is not copied", name)
	}
	if (name == "MASQUERADE" || name == "REDIRECT") && revision != 0 {
		return nil, 0, fmt.Errorf("target %s in revision %d is not known", name, revision)
	}
	s, err := readSpan(family, revision, info)
	if err != nil {
		return nil, 0, fmt.Errorf("target %s: %w", name, err)
	}
	switch name {
	case "DNAT":
		return s.nat(list, family, unix.NFT_NAT_DNAT), 0, nil
	case "SNAT":
		return s.nat(list, family, unix.NFT_NAT_SNAT), 0, nil
	case "MASQUERADE":
		list, attrs := s.ports(list, s.withFlags(nil, unix.NFTA_MASQ_FLAGS), unix.NFTA_MASQ_REG_PROTO_MIN, unix.NFTA_MASQ_REG_PROTO_MAX)
		return expression(list, "masq", attrs), 0, nil
	}
	list, attrs := s.ports(list, nil, unix.NFTA_REDIR_REG_PROTO_MIN, unix.NFTA_REDIR_REG_PROTO_MAX)
	return expression(list, "redir", s.withFlags(attrs, unix.NFTA_REDIR_FLAGS)), 0, nil
}
