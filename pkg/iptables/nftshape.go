package iptables

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// shapeOf returns what the rule's bytes say that its text must say too. A rule that cannot be read
// is odd.
func shapeOf(family rules.Family, r nft.Rule) ruleShape {
	s := ruleShape{native: nativeMatches}
	if r.Userdata != nil {
		s.native = nativeOrComment
	}
	loaded := noKey  // of the last meta expression
	header := noPart // what the last payload expression read
	err := r.Each(func(e nft.Expression) error {
		if interfaceKey(loaded) && e.Name != "cmp" {
			s.unread()
		}
		switch e.Name {
		case "meta":
			loaded, header = s.number(e.Data, unix.NFTA_META_KEY), noPart
			if s.attr(e.Data, unix.NFTA_META_SREG) != nil {
				s.sets(loaded)
			}
		case "payload":
			loaded, header = noKey, s.packet(family, e.Data)
		case "bitwise":
			s.bits(header, e.Data)
		case "lookup", "dynset", "objref":
			s.odd = "it uses a set or an object of nft's, which iptables cannot print"
		case "cmp", "range":
			if !s.comparesEqual(e) {
				s.ordered(header, loaded)
			}
			if e.Name == "cmp" {
				s.compare(loaded, e.Data)
			}
			loaded, header = noKey, noPart
		case "immediate":
			s.target = s.verdict(e.Data)
		case "target", "match":
			s.extension(e)
		case setNames:
			s.takeSets(namesOf(e))
		}
		return nil
	})
	if err != nil {
		s.unreadable(err)
	}
	if interfaceKey(loaded) {
		s.unread()
	}
	return s
}

// takeSets notes the names of ipsets; "" stands where a target names none.
func (s *ruleShape) takeSets(names []string) {
	s.named = true
	for _, name := range names {
		if name == "" {
			continue
		}
		s.ipsets = append(s.ipsets, name)
		if reason := oddSetName(name); reason != "" && s.odd == "" {
			s.odd = reason
		}
	}
}

// interfaceKey reports whether a key of a meta expression is that of an interface's name.
func interfaceKey(key uint32) bool {
	return key == unix.NFT_META_IIFNAME || key == unix.NFT_META_OIFNAME
}

// unread notes an interface's name that is loaded and compared with nothing. iptables-nft writes
// that for -i + and prints nothing of it, so that the rule without it has the same text.
func (s *ruleShape) unread() { s.odd = "it matches any interface (+), which iptables does not print" }

func (s *ruleShape) unreadable(err error) { s.odd = "its bytes cannot be read: " + err.Error() }

// attr is nft.AttrPath that says that a rule is odd which cannot be read.
func (s *ruleShape) attr(list []byte, path ...uint16) []byte {
	for _, kind := range path {
		value, err := nft.AttrOf(list, kind)
		if err != nil {
			s.unreadable(err)
			return nil
		}
		list = value
	}
	return list
}

// number returns the attribute at that path as a number of 32 bits, noKey if it is none.
func (s *ruleShape) number(list []byte, path ...uint16) uint32 {
	n, err := nft.AttrUint32(s.attr(list, path...))
	if err != nil {
		return noKey
	}
	return n
}

// nativeMatches are matches that iptables-nft writes, or reads, as expressions of nf_tables (1.8.4
// to 1.8.11). A comment may be among a rule's user data.
var (
	nativeMatches   = []string{"limit", "mark", "tcp", "udp", "icmp", "icmp6", "ttl", "hl", "pkttype", "iprange", "conntrack"}
	nativeOrComment = append(nativeMatches[:len(nativeMatches):len(nativeMatches)], "comment")
)

// noKey stands for no key of a meta expression: the key 0 is the length of a packet.
const noKey = ^uint32(0)

// verdict returns what an "immediate" expression puts into the verdict register: a chain's name or
// a verdict's, "" if it is anything else.
func (s *ruleShape) verdict(data []byte) string {
	verdict := s.attr(data, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT)
	if chain := s.attr(verdict, unix.NFTA_VERDICT_CHAIN); chain != nil {
		return nft.String(chain)
	}
	switch int32(s.number(verdict, unix.NFTA_VERDICT_CODE)) {
	case 0: // NF_DROP
		return "DROP"
	case nfAccept:
		return "ACCEPT"
	case unix.NFT_RETURN:
		return "RETURN"
	}
	return ""
}

// sets notes a meta expression that sets something.
func (s *ruleShape) sets(key uint32) {
	if key == unix.NFT_META_MARK {
		s.target = "MARK" // as 1.8.10 and later print it
		return
	}
	s.odd = fmt.Sprintf("it sets what iptables has no word for (meta key %d)", key)
}

// compare notes a comparison of what a meta expression loaded.
func (s *ruleShape) compare(loaded uint32, data []byte) {
	switch loaded {
	case noKey, unix.NFT_META_PROTOCOL, unix.NFT_META_NFPROTO, unix.NFT_META_L4PROTO:
	case unix.NFT_META_MARK:
		s.needs = append(s.needs, []string{"mark"})
	case unix.NFT_META_PKTTYPE:
		s.needs = append(s.needs, []string{"pkttype"})
	case unix.NFT_META_IIF, unix.NFT_META_OIF:
		s.compareIndex(loaded, data)
	case unix.NFT_META_IIFNAME:
		s.compareInterface(&s.in, data)
	case unix.NFT_META_OIFNAME:
		s.compareInterface(&s.out, data)
	default:
		s.odd = fmt.Sprintf("it compares what iptables has no word for (meta key %d)", loaded)
	}
}

// compareIndex reads the number of an interface, of which one is certain: the loopback's is 1 in
// each network namespace (LOOPBACK_IFINDEX in linux/net/loopback.h). iptables prints names for
// numbers.
func (s *ruleShape) compareIndex(loaded uint32, data []byte) {
	const loopback = 1
	value := s.attr(data, unix.NFTA_CMP_DATA, unix.NFTA_DATA_VALUE)
	switch {
	case len(value) != 4 || binary.NativeEndian.Uint32(value) != loopback:
		s.odd = "it names an interface by its number"
	case loaded == unix.NFT_META_IIF:
		s.in = "lo"
	default:
		s.out = "lo"
	}
}

// compareInterface reads the name of an interface. iptables writes one with the zero behind it, and
// the beginning of one, which it prints with a +, without.
func (s *ruleShape) compareInterface(name *string, data []byte) {
	if value := s.attr(data, unix.NFTA_CMP_DATA, unix.NFTA_DATA_VALUE); len(value) > 0 {
		*name = interfaceName(value, value[len(value)-1] == 0, &s.odd)
	}
}

// interfaceName returns the name of an interface as iptables prints it. Odd is set if it would be
// read back as another one.
func interfaceName(value []byte, whole bool, odd *string) string {
	bare := string(nft.UntilNUL(value))
	name := bare
	if !whole {
		name += "+"
	}
	reason := oddName(bare)
	switch {
	case reason != "":
	case len(bytes.Trim(value[len(bare):], "\x00")) > 0:
		reason = fmt.Sprintf("(%q) has something behind its end", value)
	case whole && (bare == "" || bare[len(bare)-1] == '+'):
		reason = fmt.Sprintf("(%q) is printed like the beginning of others", bare)
	}
	if reason != "" && *odd == "" {
		*odd = "the name of an interface " + reason
	}
	return name
}

// extension reads an xt match or target.
func (s *ruleShape) extension(e nft.Expression) {
	// NFTA_TARGET_* and NFTA_MATCH_* are the same numbers.
	kind := nft.String(s.attr(e.Data, unix.NFTA_MATCH_NAME))
	info := s.attr(e.Data, unix.NFTA_MATCH_INFO)
	var rev byte
	if revision := s.attr(e.Data, unix.NFTA_MATCH_REV); len(revision) == 4 {
		rev = revision[3]
	}
	if reason := oddExtension(kind, rev, info); reason != "" && s.odd == "" {
		s.odd = reason
	}
	if e.Name == "target" {
		s.target = kind
		return
	}
	s.matches = append(s.matches, matchName(kind))
	if kind == "comment" {
		s.comments = append(s.comments, nft.String(info))
	}
}

// matchName returns one name for the matches that iptables prints by two.
func matchName(name string) string {
	if name == "state" {
		return "conntrack"
	}
	return name
}

// opaque returns an opaque rule of such bytes. It holds them if they make the rule again.
func opaque(family rules.Family, r nft.Rule, reason string) rules.Rule {
	target := shapeOf(family, r).target
	if _, err := needsOf(r, family); err != nil {
		return identityOf(r).OpaqueRule(target, reason+"; a rule with such an expression "+errNotPortable.Error())
	}
	if bare, names, has := withoutNames(r); has {
		return rules.OpaqueSets(bare.Expressions, bare.Userdata, names, target, reason)
	}
	return rules.OpaqueBytes(r.Expressions, r.Userdata, target, reason)
}
