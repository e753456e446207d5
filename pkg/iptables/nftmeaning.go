package iptables

import (
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/ruleset"
)

// This file reads the meaning that nf_tables rules have for iptables, as far as a probe needs
// it. Any program may have written a rule: no rule may make these functions panic.

// udataComment is the type of a rule's comment in NFTA_RULE_USERDATA
// (NFTNL_UDATA_RULE_COMMENT in libnftnl's udata.h).
const udataComment = 0

// A ruleMeaning holds the facts about one rule that a probe needs.
type ruleMeaning struct {
	comment    string
	hasComment bool
	// target reports that the rule does something: it has a verdict, a target, or an expression
	// that may do more than match or count.
	target bool
}

// meaningOf reads a rule's meaning. A probe finds marks by it, and Choose counts rules without
// canaryd's comments. Of two comments the match's counts. An error means that the bytes cannot
// be parsed.
func meaningOf(raw nft.Rule) (ruleMeaning, error) {
	var m ruleMeaning
	err := raw.Each(func(e nft.Expression) error {
		acts, err := acts(e)
		m.target = m.target || acts
		if err == nil && e.Name == "match" {
			err = m.match(e.Data)
		}
		return err
	})
	if text, ok := userdataComment(raw.Userdata); ok && !m.hasComment {
		m.comment, m.hasComment = text, true
	}
	return m, err
}

// acts reports whether an expression does more than match and count, for meaningOf. An unknown
// expression counts as acting. canaryd's own rules have none, and only they must be judged with
// certainty.
func acts(e nft.Expression) (bool, error) {
	var source uint16 // the attribute with which the expression writes
	switch e.Name {
	case "match", "counter", "cmp", "bitwise", "range", "lookup", "limit":
		return false, nil
	case ruleset.EntryHead:
		return nft.AttrPath(e.Data, ruleset.EntryConditions) == nil, nil
	case "meta": // "meta mark set" is how newer iptables spell -j MARK
		source = unix.NFTA_META_SREG
	case "payload":
		source = unix.NFTA_PAYLOAD_SREG
	case "ct":
		source = unix.NFTA_CT_SREG
	default:
		return true, nil
	}
	value, err := nft.AttrOf(e.Data, source)
	return value != nil, err
}

// match notes the comment in the data of a "match" expression, which carries an xt match, for
// meaningOf. iptables-nft 1.8.9 stores -m comment as match "comment" revision 0 with the 256
// bytes of struct xt_comment_info.
func (m *ruleMeaning) match(data []byte) error {
	name, err := nft.AttrOf(data, unix.NFTA_MATCH_NAME)
	if err != nil || string(nft.UntilNUL(name)) != "comment" {
		return err
	}
	info, err := nft.AttrOf(data, unix.NFTA_MATCH_INFO)
	m.comment, m.hasComment = nft.String(info), err == nil
	return err
}

// userdataComment finds a comment among the type-length-value triples of NFTA_RULE_USERDATA,
// where nft and newer iptables keep it. meaningOf uses it if the rule has no match "comment".
func userdataComment(data []byte) (string, bool) {
	for len(data) >= 2 {
		kind, size := data[0], int(data[1])
		data = data[2:]
		if size > len(data) {
			return "", false
		}
		if kind == udataComment {
			return nft.String(data[:size]), true
		}
		data = data[size:]
	}
	return "", false
}

// tableName returns the iptables table of that name, "" for any other, which the mirror leaves
// out.
func tableName[T string | []byte](name T) rules.TableName {
	for _, t := range [...]rules.TableName{rules.Nat, rules.Filter, rules.Mangle, rules.Raw, rules.Security} {
		if t == string(name) {
			return t
		}
	}
	return ""
}
