// Package nfttest builds netlink messages of nf_tables, for tests of the packages that read them.
package nfttest

import (
	"encoding/binary"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Message builds the data of a netlink message: an nfgenmsg and attributes.
func Message(t testing.TB, attrs func(*netlink.AttributeEncoder)) []byte {
	t.Helper()
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	attrs(ae)
	data, err := ae.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return append([]byte{unix.NFPROTO_IPV4, 0, 0, 0}, data...)
}

type Encode = func(*netlink.AttributeEncoder) error

// RuleMessage builds a rule in mangle's chain C of the given expressions.
func RuleMessage(t testing.TB, userdata []byte, expressions ...Encode) []byte {
	return Message(t, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_RULE_TABLE, "mangle")
		ae.String(unix.NFTA_RULE_CHAIN, "C")
		ae.Nested(unix.NFTA_RULE_EXPRESSIONS, func(list *netlink.AttributeEncoder) error {
			for _, e := range expressions {
				list.Nested(unix.NFTA_LIST_ELEM, e)
			}
			return nil
		})
		if userdata != nil {
			ae.Bytes(unix.NFTA_RULE_USERDATA, userdata)
		}
	})
}

// Expression encodes an expression of nf_tables for RuleMessage; data encodes its
// attributes, nil for none.
func Expression(name string, data Encode) Encode {
	return func(ae *netlink.AttributeEncoder) error {
		ae.String(unix.NFTA_EXPR_NAME, name)
		if data != nil {
			ae.Nested(unix.NFTA_EXPR_DATA, data)
		}
		return nil
	}
}

// XTMatch encodes a match of x_tables, of revision 0, with that data.
func XTMatch(name string, info []byte) Encode {
	return Expression("match", func(ae *netlink.AttributeEncoder) error {
		ae.String(unix.NFTA_MATCH_NAME, name)
		ae.Uint32(unix.NFTA_MATCH_REV, 0)
		ae.Bytes(unix.NFTA_MATCH_INFO, info)
		return nil
	})
}

// CommentInfo returns the data of match comment (struct xt_comment_info), for XTMatch.
func CommentInfo(text string) []byte {
	info := make([]byte, 256)
	copy(info, text)
	return info
}

// Meta encodes an expression that loads or sets the packet's data of key 1. register is its
// attribute, NFTA_META_DREG or NFTA_META_SREG.
func Meta(register uint16) Encode {
	return Expression("meta", func(ae *netlink.AttributeEncoder) error {
		ae.Uint32(register, 1)
		return nil
	})
}

// Counter encodes a counter, whose numbers ParseRule must set to zero.
func Counter(bytes, packets uint64) Encode {
	return Expression("counter", func(ae *netlink.AttributeEncoder) error {
		ae.Uint64(unix.NFTA_COUNTER_BYTES, bytes)
		ae.Uint64(unix.NFTA_COUNTER_PACKETS, packets)
		return nil
	})
}

// XTTarget encodes a target of x_tables with eight zero bytes of data.
func XTTarget(name string) Encode {
	return Expression("target", func(ae *netlink.AttributeEncoder) error {
		ae.String(unix.NFTA_TARGET_NAME, name)
		ae.Bytes(unix.NFTA_TARGET_INFO, make([]byte, 8))
		return nil
	})
}
