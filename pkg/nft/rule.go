package nft

import (
	"bytes"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// This file reads rules as nf_tables holds them, without understanding their
// meaning. linux/netfilter/nf_tables.h and nf_tables_fill_rule_info of
// net/netfilter/nf_tables_api.c define the format.

// A Rule is the content of a rule as nf_tables holds it, without its table,
// chain, handle and position. Equal bytes mean equal rules, unless the bytes name
// an object, such as a set, by a number of the kernel's.
//
// A Rule does not have NFTA_RULE_COMPAT, because the kernel does not report it.
type Rule struct {
	// Expressions is the content of NFTA_RULE_EXPRESSIONS, a list of
	// NFTA_LIST_ELEM; counters are zeroed.
	Expressions []byte
	// Userdata is the content of NFTA_RULE_USERDATA; nil if there is none.
	Userdata []byte
}

// A RuleMessage is an NFT_MSG_NEWRULE. Its slices point into the message.
type RuleMessage struct {
	Table, Chain []byte
	Handle       uint64
	// Before is the handle of the previous rule; 0: this rule is the first, or
	// the message does not say.
	Before uint64
	Rule   Rule
}

// ParseRule reads NFT_MSG_NEWRULE, from a dump or a notification, without copying: the
// result is valid as long as data. It sets the counters inside data to zero, so that equal
// rules have equal bytes.
func ParseRule(data []byte) (m RuleMessage, err error) {
	err = eachAttrOf(data, func(kind uint16, value []byte) (err error) {
		switch kind {
		case unix.NFTA_RULE_TABLE:
			m.Table = UntilNUL(value)
		case unix.NFTA_RULE_CHAIN:
			m.Chain = UntilNUL(value)
		case unix.NFTA_RULE_HANDLE:
			m.Handle, err = AttrUint64(value)
		case unix.NFTA_RULE_POSITION:
			m.Before, err = AttrUint64(value)
		case unix.NFTA_RULE_EXPRESSIONS:
			m.Rule.Expressions = value
		case unix.NFTA_RULE_USERDATA:
			m.Rule.Userdata = value
		}
		return err
	})
	if err != nil {
		return RuleMessage{}, err
	}
	return m, m.Rule.zeroCounters()
}

// An Expression is one NFTA_LIST_ELEM: the name of a match or an action, and its
// attributes.
type Expression struct {
	Name string
	Data []byte
}

// Jump returns the chain to which an immediate verdict leads, by a jump or goto; nil for any
// other expression.
func (e Expression) Jump() []byte {
	if e.Name != "immediate" {
		return nil
	}
	return UntilNUL(AttrPath(e.Data, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CHAIN))
}

// parseExpression reads the content of an NFTA_LIST_ELEM, for Each. Data is a part of elem.
func parseExpression(elem []byte) (e Expression, err error) {
	err = EachAttr(elem, func(kind uint16, value []byte) error {
		switch kind {
		case unix.NFTA_EXPR_NAME:
			e.Name = commonName(UntilNUL(value))
		case unix.NFTA_EXPR_DATA:
			e.Data = value
		}
		return nil
	})
	return e, err
}

// commonNames are frequent names of expressions and tables.
var commonNames = [...]string{
	"match", "counter", "immediate", "meta", "cmp", "target", "payload", "bitwise", "nat", "filter", "mangle",
}

// commonName returns a name as a string. For common names it spares the allocation.
func commonName(name []byte) string {
	for _, common := range commonNames {
		if string(name) == common {
			return common
		}
	}
	return string(name)
}

// Clone returns a rule with bytes of its own.
func (r Rule) Clone() Rule { return Rule{slices.Clone(r.Expressions), slices.Clone(r.Userdata)} }

// Equal reports whether two rules have the same bytes.
func (r Rule) Equal(o Rule) bool {
	return bytes.Equal(r.Expressions, o.Expressions) && bytes.Equal(r.Userdata, o.Userdata)
}

// Each calls f for every expression, in order, until f returns an error. It returns that
// error, or says that the bytes are damaged.
func (r Rule) Each(f func(Expression) error) error {
	return EachAttr(r.Expressions, func(kind uint16, elem []byte) error {
		if kind != unix.NFTA_LIST_ELEM {
			return fmt.Errorf("%w: attribute %d in a list of expressions", ErrAttribute, kind)
		}
		e, err := parseExpression(elem)
		if err != nil {
			return err
		}
		return f(e)
	})
}

// zeroCounters sets the counters to zero, in place: ParseRule calls it, so that traffic does
// not change a rule's bytes.
func (r Rule) zeroCounters() error {
	return r.Each(func(e Expression) error {
		if e.Name != "counter" {
			return nil
		}
		return EachAttr(e.Data, func(_ uint16, value []byte) error {
			clear(value)
			return nil
		})
	})
}
