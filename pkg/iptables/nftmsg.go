package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/rules"
)

// This file reads and writes nf_tables' netlink messages. What the kernel
// sends is treated as hostile: no message may make these functions panic.

// nfgenmsgLen is the size of struct nfgenmsg, which begins every message.
const nfgenmsgLen = 4

var errShort = errors.New("a netlink message is too short")

// udataComment is the type of a rule's comment in NFTA_RULE_USERDATA
// (NFTNL_UDATA_RULE_COMMENT in libnftnl's udata.h).
const udataComment = 0

// An nftRule is what is needed to know of one rule.
type nftRule struct {
	place      Place
	comment    string
	hasComment bool
	// target reports that the rule does something: it has a verdict, a
	// target, or any expression that is not known to only match or count.
	target bool
}

// An nftChain is one chain of a dump.
type nftChain struct {
	place Place
	use   uint32 // rules in the chain plus jumps to it
}

type StringAttr struct {
	Kind  uint16
	Value string
}

func nftType(message uint16) netlink.HeaderType {
	return netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | message)
}

func nfproto(family rules.Family) uint8 {
	if family == rules.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// encodeStrings writes attributes that are NUL-terminated strings. Written by
// hand because it cannot fail and Probe calls it all the time.
func Strings(attrs ...StringAttr) []byte {
	var out []byte
	for _, a := range attrs {
		out = binary.NativeEndian.AppendUint16(out, uint16(4+len(a.Value)+1))
		out = binary.NativeEndian.AppendUint16(out, a.Kind)
		out = append(append(out, a.Value...), 0)
		for len(out)%4 != 0 {
			out = append(out, 0)
		}
	}
	return out
}

// decode returns a decoder for the attributes behind the nfgenmsg. Numbers in
// nf_tables' attributes are big-endian.
func decode(data []byte) (*netlink.AttributeDecoder, error) {
	if len(data) < nfgenmsgLen {
		return nil, errShort
	}
	return decodeNested(data[nfgenmsgLen:])
}

func decodeNested(data []byte) (*netlink.AttributeDecoder, error) {
	ad, err := netlink.NewAttributeDecoder(data)
	if err != nil {
		return nil, err
	}
	ad.ByteOrder = binary.BigEndian
	return ad, nil
}

// parseCommit reads NFT_MSG_NEWGEN, as an event or as GETGEN's answer.
func ParseCommit(data []byte) (Commit, error) {
	ad, err := decode(data)
	if err != nil {
		return Commit{}, err
	}
	var c Commit
	found := false
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_GEN_ID:
			c.Genid, found = ad.Uint32(), true
		case unix.NFTA_GEN_PROC_PID:
			c.PID = ad.Uint32()
		case unix.NFTA_GEN_PROC_NAME:
			c.Comm = ad.String()
		}
	}
	if err := ad.Err(); err != nil {
		return Commit{}, err
	}
	if !found {
		return Commit{}, errors.New("a NEWGEN message has no NFTA_GEN_ID")
	}
	return c, nil
}

// parseChain reads NFT_MSG_NEWCHAIN.
func parseChain(data []byte) (nftChain, error) {
	ad, err := decode(data)
	if err != nil {
		return nftChain{}, err
	}
	var c nftChain
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_CHAIN_TABLE:
			c.place.Table = rules.TableName(ad.String())
		case unix.NFTA_CHAIN_NAME:
			c.place.Chain = ad.String()
		case unix.NFTA_CHAIN_USE:
			c.use = ad.Uint32()
		}
	}
	return c, ad.Err()
}

// parseRule reads NFT_MSG_NEWRULE.
func parseRule(data []byte) (nftRule, error) {
	ad, err := decode(data)
	if err != nil {
		return nftRule{}, err
	}
	var r nftRule
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_RULE_TABLE:
			r.place.Table = rules.TableName(ad.String())
		case unix.NFTA_RULE_CHAIN:
			r.place.Chain = ad.String()
		case unix.NFTA_RULE_EXPRESSIONS:
			ad.Do(r.parseExpressions)
		case unix.NFTA_RULE_USERDATA:
			if text, ok := userdataComment(ad.Bytes()); ok && !r.hasComment {
				r.comment, r.hasComment = text, true
			}
		}
	}
	return r, ad.Err()
}

func (r *nftRule) parseExpressions(list []byte) error {
	ad, err := decodeNested(list)
	if err != nil {
		return err
	}
	for ad.Next() {
		if ad.Type() == unix.NFTA_LIST_ELEM {
			ad.Do(r.parseExpression)
		}
	}
	return ad.Err()
}

// parseExpression reads one NFTA_LIST_ELEM: a name and what belongs to it.
func (r *nftRule) parseExpression(elem []byte) error {
	ad, err := decodeNested(elem)
	if err != nil {
		return err
	}
	var name string
	var data []byte
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_EXPR_NAME:
			name = ad.String()
		case unix.NFTA_EXPR_DATA:
			data = ad.Bytes()
		}
	}
	if err := ad.Err(); err != nil {
		return err
	}
	acts, err := acts(name, data)
	if err != nil {
		return err
	}
	r.target = r.target || acts
	if name == "match" {
		return r.parseMatch(data)
	}
	return nil
}

// acts reports whether an expression does more than match and count. One that
// is not known does: a rule of ours has none, and only ours must be certain.
func acts(name string, data []byte) (bool, error) {
	var source uint16 // the attribute with which the expression writes
	switch name {
	case "match", "counter", "cmp", "bitwise", "range", "lookup", "limit":
		return false, nil
	case "meta": // "meta mark set" is how newer iptables spell -j MARK
		source = unix.NFTA_META_SREG
	case "payload":
		source = unix.NFTA_PAYLOAD_SREG
	case "ct":
		source = unix.NFTA_CT_SREG
	default:
		return true, nil
	}
	ad, err := decodeNested(data)
	if err != nil {
		return false, err
	}
	writes := false
	for ad.Next() {
		writes = writes || ad.Type() == source
	}
	return writes, ad.Err()
}

// parseMatch reads the data of a "match" expression, which carries an xt
// match. iptables-nft 1.8.9 stores -m comment as match "comment" revision 0
// with the 256 bytes of struct xt_comment_info.
func (r *nftRule) parseMatch(data []byte) error {
	ad, err := decodeNested(data)
	if err != nil {
		return err
	}
	var name string
	var info []byte
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_MATCH_NAME:
			name = ad.String()
		case unix.NFTA_MATCH_INFO:
			info = ad.Bytes()
		}
	}
	if name == "comment" {
		r.comment, r.hasComment = String(info), true
	}
	return ad.Err()
}

// userdataComment finds a comment among the type-length-value triples of
// NFTA_RULE_USERDATA, where nft and newer iptables keep it.
func userdataComment(data []byte) (string, bool) {
	for len(data) >= 2 {
		kind, size := data[0], int(data[1])
		data = data[2:]
		if size > len(data) {
			return "", false
		}
		if kind == udataComment {
			return String(data[:size]), true
		}
		data = data[size:]
	}
	return "", false
}

// untilNUL returns the bytes before the first NUL, or all.
func UntilNUL(b []byte) []byte {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		return b[:i]
	}
	return b
}

func String(b []byte) string { return string(UntilNUL(b)) }

// sortedTables returns names sorted and without doubles.
func sortedTables(names []rules.TableName) []rules.TableName {
	slices.Sort(names)
	return slices.Compact(names)
}
