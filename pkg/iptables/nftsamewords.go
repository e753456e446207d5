package iptables

import (
	"bytes"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// inSameWords reports whether two rules that iptables prints in the same words are different ones.
// They are made of the same expressions, of which one says something else: the match esp with an
// inverted range of all SPIs is printed like the match alone. Rules of other expressions are other
// spellings of one rule: a version writes a match of x_tables where another one writes expressions
// of nf_tables.
func inSameWords(family rules.Family, a, b nft.Rule) bool {
	one, errA := statements(family, a)
	other, errB := statements(family, b)
	sameKind := func(x, y statement) bool { return x.kind == y.kind }
	return errA == nil && errB == nil && slices.EqualFunc(one, other, sameKind) &&
		!slices.EqualFunc(one, other, func(x, y statement) bool { return bytes.Equal(x.says, y.says) })
}

// A statement is one expression of a rule: of which kind it is, and what it says.
type statement struct {
	kind string
	says []byte
}

// statements returns what the expressions of a rule say. Versions differ in the registers that they
// put values into, and in the ends of wide addresses, which IPv4 does not use.
func statements(family rules.Family, r nft.Rule) ([]statement, error) {
	var list []statement
	err := r.Each(func(e nft.Expression) error {
		s, extension := statement{kind: e.Name}, e.Name == "match" || e.Name == "target"
		revision := nft.AttrPath(e.Data, unix.NFTA_MATCH_REV)
		if extension {
			s.kind = fmt.Sprintf("%s %s %x", e.Name, extensionName(e), revision)
		}
		err := nft.EachAttr(e.Data, func(kind uint16, value []byte) error {
			if family == rules.IPv4 && extension && kind == unix.NFTA_MATCH_INFO && len(revision) == 4 {
				value = bytes.Clone(value)
				maskWideIn(extensionName(e), revision[3], value)
			}
			if !slices.Contains(registers[e.Name], kind) {
				s.says = nft.AppendAttr(s.says, kind, value, 0)
			}
			return nil
		})
		list = append(list, s)
		return err
	})
	return list, err
}

// registers are the attributes with which expressions name registers.
var registers = map[string][]uint16{
	"meta": {unix.NFTA_META_DREG, unix.NFTA_META_SREG}, "payload": {unix.NFTA_PAYLOAD_DREG, unix.NFTA_PAYLOAD_SREG},
	"cmp": {unix.NFTA_CMP_SREG}, "range": {unix.NFTA_RANGE_SREG}, "bitwise": {unix.NFTA_BITWISE_SREG, unix.NFTA_BITWISE_DREG},
}
