package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// This file reads rules as nf_tables holds them, without understanding what
// they mean. Formats: linux/netfilter/nf_tables.h, and what
// net/netfilter/nf_tables_api.c (nf_tables_fill_rule_info) and nft_compat.c
// put into it. As in nftmsg.go, no message may make these functions panic.

// A rawRule is the content of a rule as nf_tables holds it, apart from where it
// stands: no table, chain, handle or position. Rules whose raw rules have the
// same bytes are the same rule, unless they are indexed.
//
// NFTA_RULE_COMPAT is no part of it: the kernel does not report it.
type Rule struct {
	// expressions is the content of NFTA_RULE_EXPRESSIONS, a list of
	// NFTA_LIST_ELEM; what counters counted is zeroed.
	Expressions []byte
	// userdata is the content of NFTA_RULE_USERDATA; nil if there is none.
	Userdata []byte
}

// A rawMessage is an NFT_MSG_NEWRULE. Its slices point into the message.
type RuleMessage struct {
	Table, Chain []byte
	Handle       uint64
	Rule         Rule
}

var ErrAttribute = errors.New("a netlink attribute is longer than what holds it, or too short")

// nlaTypeMask leaves the type without NLA_F_NESTED and NLA_F_NET_BYTEORDER.
const nlaTypeMask = 0x3fff

// nextAttr splits the first attribute from list. The library's decoder would
// allocate for each of the half million attributes of 46,578 rules.
func NextAttr(list []byte) (kind uint16, data, rest []byte, err error) {
	if len(list) < unix.SizeofNlAttr {
		return 0, nil, nil, ErrAttribute
	}
	size := int(binary.NativeEndian.Uint16(list))
	if size < unix.SizeofNlAttr || size > len(list) {
		return 0, nil, nil, ErrAttribute
	}
	kind = binary.NativeEndian.Uint16(list[2:]) & nlaTypeMask
	// The last attribute may lack its padding.
	padded := min((size+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1), len(list))
	return kind, list[unix.SizeofNlAttr:size], list[padded:], nil
}

// parseRaw reads NFT_MSG_NEWRULE without copying. It sets the counters inside
// data to zero.
func ParseRule(data []byte) (m RuleMessage, err error) {
	if len(data) < nfgenmsgLen {
		return RuleMessage{}, errShort
	}
	for rest := data[nfgenmsgLen:]; len(rest) > 0; {
		var kind uint16
		var value []byte
		if kind, value, rest, err = NextAttr(rest); err != nil {
			return RuleMessage{}, err
		}
		switch kind {
		case unix.NFTA_RULE_TABLE:
			m.Table = UntilNUL(value)
		case unix.NFTA_RULE_CHAIN:
			m.Chain = UntilNUL(value)
		case unix.NFTA_RULE_HANDLE:
			if m.Handle, err = AttrUint64(value); err != nil {
				return RuleMessage{}, err
			}
		case unix.NFTA_RULE_EXPRESSIONS:
			m.Rule.Expressions = value
		case unix.NFTA_RULE_USERDATA:
			m.Rule.Userdata = value
		}
	}
	return m, m.Rule.zeroCounters()
}

// A rawExpression is one NFTA_LIST_ELEM: the name of what the rule does, and
// that one's own attributes.
type Expression struct {
	Name string
	Data []byte
}

// parseRawExpression reads the content of an NFTA_LIST_ELEM.
func parseExpression(elem []byte) (e Expression, err error) {
	for len(elem) > 0 {
		var kind uint16
		var value []byte
		if kind, value, elem, err = NextAttr(elem); err != nil {
			return Expression{}, err
		}
		switch kind {
		case unix.NFTA_EXPR_NAME:
			e.Name = expressionName(UntilNUL(value))
		case unix.NFTA_EXPR_DATA:
			e.Data = value
		}
	}
	return e, nil
}

// expressionName spares an allocation for the names that iptables uses.
func expressionName(name []byte) string {
	switch string(name) {
	case "meta":
		return "meta"
	case "cmp":
		return "cmp"
	case "counter":
		return "counter"
	case "immediate":
		return "immediate"
	case "match":
		return "match"
	case "target":
		return "target"
	case "payload":
		return "payload"
	case "bitwise":
		return "bitwise"
	}
	return string(name)
}

// each calls f for every expression, in order, until f returns an error.
func (r Rule) Each(f func(Expression) error) error {
	for rest := r.Expressions; len(rest) > 0; {
		kind, elem, after, err := NextAttr(rest)
		if err != nil {
			return err
		}
		rest = after
		if kind != unix.NFTA_LIST_ELEM {
			return fmt.Errorf("%w: attribute %d in a list of expressions", ErrAttribute, kind)
		}
		e, err := parseExpression(elem)
		if err != nil {
			return err
		}
		if err := f(e); err != nil {
			return err
		}
	}
	return nil
}

// zeroCounters sets what was counted to zero, in place.
func (r Rule) zeroCounters() error {
	return r.Each(func(e Expression) error {
		if e.Name != "counter" {
			return nil
		}
		for rest := e.Data; len(rest) > 0; {
			_, value, after, err := NextAttr(rest)
			if err != nil {
				return err
			}
			clear(value)
			rest = after
		}
		return nil
	})
}

// indexed reports whether the rule holds numbers that mean something only as
// long as it stands: ipset's match "set" and target "SET" name their set by
// its index in the kernel, which another set may have tomorrow, and lookup,
// dynset and objref refer to objects of the same table. A rule that cannot be
// read counts as indexed.
func (r Rule) indexed() bool {
	found := false
	err := r.Each(func(e Expression) error {
		switch e.Name {
		case "lookup", "dynset", "objref":
			found = true
		case "match", "target":
			// NFTA_TARGET_NAME and NFTA_MATCH_NAME are both 1.
			name, err := AttrOf(e.Data, unix.NFTA_MATCH_NAME)
			if err != nil {
				return err
			}
			switch string(UntilNUL(name)) {
			case "set", "SET":
				found = true
			}
		}
		return nil
	})
	return found || err != nil
}

// attrOf returns the value of the list's first attribute of that kind, nil if
// there is none.
func AttrOf(list []byte, wanted uint16) ([]byte, error) {
	for len(list) > 0 {
		kind, value, rest, err := NextAttr(list)
		if err != nil {
			return nil, err
		}
		if kind == wanted {
			return value, nil
		}
		list = rest
	}
	return nil, nil
}

// A rawChain is a chain as nf_tables holds it.
type Chain struct {
	place  Place
	Handle uint64 // no other chain or rule of the table ever has the same
	// base reports that packets enter the chain at a hook of the kernel's;
	// kind, hook, priority and policy are set for such a chain only.
	Base     bool
	Kind     string // "filter", "nat" or "route"
	Hook     uint32
	Priority int32
	Policy   uint32 // NF_DROP is 0, NF_ACCEPT is 1
	// use counts the chain's rules and the jumps to it.
	Use uint32
}

// parseRawChain reads NFT_MSG_NEWCHAIN.
func ParseChain(data []byte) (c Chain, err error) {
	if len(data) < nfgenmsgLen {
		return Chain{}, errShort
	}
	for rest := data[nfgenmsgLen:]; len(rest) > 0; {
		var kind uint16
		var value []byte
		if kind, value, rest, err = NextAttr(rest); err != nil {
			return Chain{}, err
		}
		switch kind {
		case unix.NFTA_CHAIN_TABLE:
			c.place.Table = tableName(UntilNUL(value))
		case unix.NFTA_CHAIN_NAME:
			c.place.Chain = String(value)
		case unix.NFTA_CHAIN_HANDLE:
			c.Handle, err = AttrUint64(value)
		case unix.NFTA_CHAIN_TYPE:
			c.Kind = String(value)
		case unix.NFTA_CHAIN_POLICY:
			c.Policy, err = AttrUint32(value)
		case unix.NFTA_CHAIN_HOOK:
			err = c.parseHook(value)
		case unix.NFTA_CHAIN_USE:
			c.Use, err = AttrUint32(value)
		}
		if err != nil {
			return Chain{}, err
		}
	}
	return c, nil
}

func (c *Chain) parseHook(list []byte) error {
	c.Base = true
	for len(list) > 0 {
		kind, value, rest, err := NextAttr(list)
		if err != nil {
			return err
		}
		list = rest
		switch kind {
		case unix.NFTA_HOOK_HOOKNUM:
			if c.Hook, err = AttrUint32(value); err != nil {
				return err
			}
		case unix.NFTA_HOOK_PRIORITY:
			priority, err := AttrUint32(value)
			if err != nil {
				return err
			}
			c.Priority = int32(priority)
		}
	}
	return nil
}

func AttrUint32(value []byte) (uint32, error) {
	if len(value) != 4 {
		return 0, ErrAttribute
	}
	return binary.BigEndian.Uint32(value), nil
}

func AttrUint64(value []byte) (uint64, error) {
	if len(value) != 8 {
		return 0, ErrAttribute
	}
	return binary.BigEndian.Uint64(value), nil
}
