package iptables

import (
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An xtInterfaces says where struct ipt_ip or ip6t_ip6 has the names of interfaces and their
// masks, each of which has xtInterfaceLen bytes.
type xtInterfaces struct{ in, out, inMask, outMask int }

const xtInterfaceLen = 16 // IFNAMSIZ

func xtInterfacesOf(family rules.Family) xtInterfaces {
	if family == rules.IPv6 {
		return xtInterfaces{in: 64, out: 80, inMask: 96, outMask: 112}
	}
	return xtInterfaces{in: 16, out: 32, inMask: 48, outMask: 64}
}

// shape returns what a rule's bytes say that its text must say too. Where it jumps to is known
// when the table was walked.
func (r xtRule) shape(family rules.Family, goal string) *ruleShape {
	at := xtInterfacesOf(family)
	e := r.entry
	s := &ruleShape{target: goal, noTarget: !r.target}
	s.in = e.printedInterface(at.in, at.inMask, &s.odd)
	s.out = e.printedInterface(at.out, at.outMask, &s.odd)
	extension := func(ext []byte) {
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
	s.base = r.base(family, s)
	return s
}

// base returns what no two rules of the same text may differ in: addresses, protocol and what is
// inverted, interfaces, the names of matches and the target. How extensions are written is left
// out: an iptables of another version has other revisions of them, and prints the same.
func (r xtRule) base(family rules.Family, s *ruleShape) []byte {
	whole := r.entry.whole
	at := xtInterfacesOf(family)
	protocolAt, inverseAt := at.outMask+xtInterfaceLen, at.outMask+xtInterfaceLen+3
	if family == rules.IPv6 {
		inverseAt++ // a byte for the traffic class is before the flags
	}
	base := append([]byte(nil), whole[:at.in]...)
	base = append(base, whole[protocolAt], whole[protocolAt+1], whole[inverseAt])
	for _, word := range append([]string{s.in, s.out, s.target}, s.matches...) {
		base = append(append(base, word...), 0)
	}
	return base
}

// printedInterface returns the name of an interface as iptables-legacy prints it (save_iface in
// iptables.c): as many characters as the mask has, and a + if that is not the whole name.
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

// identity returns the digest by which an opaque rule is named: without the offset that it jumps
// to, which moves with the rules before it.
func (r xtRule) identity(goal string) rules.Identity {
	whole := r.entry.whole
	if r.entry.isStandard && len(r.entry.target) == xtStandardLen {
		whole = whole[:len(whole)-xtStandardLen+xtExtDataAt]
	}
	return rules.IdentityOf(whole, []byte(goal))
}

// opaque returns the rule without a text.
func (s *ruleShape) opaque(reason string) rules.Rule {
	return s.identity.OpaqueRule(s.target, reason)
}
