package standby

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// This file writes expressions of nf_tables.

// From linux/netfilter/nf_tables.h, for which golang.org/x/sys has no names.
const (
	tableOwned    = 2 // NFT_TABLE_F_OWNER
	tableUserdata = 6 // NFTA_TABLE_USERDATA

	lookupInvert = 1 // NFT_LOOKUP_F_INV

	typeNFProto = 2 // nft's own number of the type nf_proto
	nfDrop      = 0
	nfAccept    = 1
)

// expression appends an expression to the content of NFTA_RULE_EXPRESSIONS, as an
// NFTA_LIST_ELEM. name is nf_tables' name of it, such as "cmp", and data has its attributes;
// nil: it has none.
func expression(list []byte, name string, data []byte) []byte {
	start := len(list)
	list = nft.AppendAttr(list, unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, "", 0)
	list = nft.AppendAttr(list, unix.NFTA_EXPR_NAME, name, 1)
	if len(data) > 0 {
		list = nft.AppendAttr(list, unix.NFTA_EXPR_DATA|unix.NLA_F_NESTED, data, 0)
	}
	binary.NativeEndian.PutUint16(list[start:], uint16(len(list)-start))
	return list
}

func number(list []byte, kind uint16, n uint32) []byte {
	return nft.AppendAttr(list, kind, binary.BigEndian.AppendUint32(nil, n), 0)
}

// value appends NFTA_DATA_VALUE within an attribute.
func value(list []byte, kind uint16, v []byte) []byte {
	return nft.AppendAttr(list, kind|unix.NLA_F_NESTED, nft.AppendAttr(nil, unix.NFTA_DATA_VALUE, v, 0), 0)
}

// load appends an expression that puts a value into a register.
func load(list []byte, register uint32, v []byte) []byte {
	return expression(list, "immediate", value(number(nil, unix.NFTA_IMMEDIATE_DREG, register), unix.NFTA_IMMEDIATE_DATA, v))
}

// payload returns the attributes of an expression that loads a part of a header into a register.
func payload(register, base, offset, size uint32) []byte {
	list := number(number(nil, unix.NFTA_PAYLOAD_DREG, register), unix.NFTA_PAYLOAD_BASE, base)
	return number(number(list, unix.NFTA_PAYLOAD_OFFSET, offset), unix.NFTA_PAYLOAD_LEN, size)
}

// verdict appends an expression that ends the walk of a packet through a chain. code is
// nfAccept or nfDrop. A gate and a rule of another owner accept; only the policy of a native
// chain drops.
func verdict(list []byte, code uint32) []byte {
	data := nft.AppendAttr(nil, unix.NFTA_DATA_VERDICT|unix.NLA_F_NESTED, number(nil, unix.NFTA_VERDICT_CODE, code), 0)
	data = nft.AppendAttr(number(nil, unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT), unix.NFTA_IMMEDIATE_DATA|unix.NLA_F_NESTED, data, 0)
	return expression(list, "immediate", data)
}

// acceptAsIs returns the only rule of a chain that is left out, for closeLeftOut. It clears
// marks, the bits of the mark that other copied rules may have set on the packet's way here.
// With kube-proxy's bit, the packet would be masqueraded but not sent to its service.
func acceptAsIs(marks uint32) rule {
	var list []byte
	if marks != 0 {
		list = expression(list, "meta", number(number(nil, unix.NFTA_META_KEY, unix.NFT_META_MARK), unix.NFTA_META_DREG, unix.NFT_REG_1))
		bits := number(number(number(nil, unix.NFTA_BITWISE_SREG, unix.NFT_REG_1), unix.NFTA_BITWISE_DREG, unix.NFT_REG_1), unix.NFTA_BITWISE_LEN, 4)
		bits = value(bits, unix.NFTA_BITWISE_MASK, binary.NativeEndian.AppendUint32(nil, ^marks))
		bits = value(bits, unix.NFTA_BITWISE_XOR, make([]byte, 4))
		list = expression(list, "bitwise", bits)
		list = expression(list, "meta", number(number(nil, unix.NFTA_META_KEY, unix.NFT_META_MARK), unix.NFTA_META_SREG, unix.NFT_REG_1))
	}
	return rule{expressions: verdict(list, nfAccept)}
}
