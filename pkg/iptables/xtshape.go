package iptables

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// shape collects from a rule's bytes the facts that its text must show; agrees then refuses the
// text of another rule. A legacy read calls it for rules without a known text (shapes). goal is
// the target that the text must name: chain, verdict or extension; "" if there is none.
func (r xtRule) shape(family rules.Family, goal string) *ruleShape {
	at, e := xtLayoutOf(family), r.entry
	s := &ruleShape{target: goal, noTarget: !r.target}
	s.in = e.printedInterface(at.in, at.inMask, &s.odd)
	s.out = e.printedInterface(at.out, at.outMask, &s.odd)
	inverse := e.whole[at.inverse]
	s.everyIn, s.everyOut = s.in == "" && inverse&viaIn != 0, s.out == "" && inverse&viaOut != 0
	extension := func(ext []byte) {
		s.kinds = append(s.kinds, ext[xtExtNameAt:xtExtDataAt]...)
		if reason := oddExtension(string(extName(ext)), ext[xtExtDataAt-1], ext[xtExtDataAt:]); reason != "" && s.odd == "" {
			s.odd = reason
		}
	}
	size := 0
	e.eachMatch(func(m []byte) {
		size += len(m)
		s.matches = append(s.matches, matchName(string(extName(m))))
		if string(extName(m)) == "comment" {
			s.comments = append(s.comments, nft.String(m[xtExtDataAt:]))
		}
		extension(m)
	})
	if !e.isStandard {
		extension(e.target)
	}
	if size != len(e.matches) && s.odd == "" {
		s.odd = "the sizes of its matches do not add up"
	}
	s.identity = r.identity(goal)
	s.plain = r.plain(family)
	s.base = r.base(family, s)
	return s
}

// base returns the facts that all rules of the same text share: addresses, protocol and
// inversions, interfaces, the names of matches and the target. It omits extensions' data:
// another version of iptables has other revisions, and prints the same. differs compares it.
func (r xtRule) base(family rules.Family, s *ruleShape) []byte {
	whole, at := r.entry.whole, xtLayoutOf(family)
	base := slices.Concat(whole[:at.in], whole[at.protocol:at.protocol+2], whole[at.inverse:at.inverse+1])
	for _, word := range append([]string{s.in, s.out, s.target}, s.matches...) {
		base = append(append(base, word...), 0)
	}
	return base
}

// printedInterface returns the name of an interface as iptables-legacy prints it (save_iface in
// iptables.c), for shape. It has as many characters as the mask, and a + if the name continues.
// It sets odd if iptables would read back another name.
func (e xtEntry) printedInterface(nameAt, maskAt int, odd *string) string {
	name, mask := e.whole[nameAt:nameAt+xtInterfaceLen], e.whole[maskAt:maskAt+xtInterfaceLen]
	n := 0
	for n < xtInterfaceLen && mask[n] != 0 {
		n++
	}
	if n == 0 {
		return ""
	}
	return interfaceName(name[:n], n == xtInterfaceLen || name[n-1] == 0, odd)
}

// identity returns the digest that identifies an opaque rule, for its shape. It omits the
// offset of a jump, which moves with the rules before it, and has goal instead.
func (r xtRule) identity(goal string) rules.Identity {
	whole := r.entry.whole
	if r.entry.isStandard && len(r.entry.target) == xtStandardLen {
		whole = whole[:len(whole)-xtStandardLen+xtExtDataAt]
	}
	return rules.IdentityOf(whole, []byte(goal))
}

// withoutIndexes returns the rule's bytes without the offset of a jump, and without the
// kernel's numbers of ipsets (struct xt_set_info). contentOf identifies a rule by them.
func (r xtRule) withoutIndexes() []byte {
	e := r.entry
	whole := slices.Clone(e.whole)
	clearAt := func(at int) {
		if at+2 <= len(whole) {
			clear(whole[at : at+2])
		}
	}
	at := len(whole) - len(e.target) - len(e.matches)
	e.eachMatch(func(m []byte) {
		if string(extName(m)) == "set" {
			clearAt(at + xtExtDataAt)
		}
		at += len(m)
	})
	target := len(whole) - len(e.target) + xtExtDataAt
	switch {
	case string(extName(e.target)) == "SET":
		for i := range 3 { // to add, to delete, to map
			clearAt(target + 4*i)
		}
	case e.isStandard && len(e.target) == xtStandardLen:
		whole = whole[:target]
	}
	return whole
}

// opaque returns the rule without a text, for that reason, and with its bytes if these can be
// written. Reads show it if no text agrees with the bytes.
func (s *ruleShape) opaque(reason string) rules.Rule {
	if s.exact != nil {
		return rules.OpaqueBytes(s.exact, []byte(s.goal), s.target, reason)
	}
	return s.identity.OpaqueRule(s.target, reason)
}
