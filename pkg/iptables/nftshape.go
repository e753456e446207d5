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
		var err error
		switch e.Name {
		case "meta":
			loaded, err = metaKey(e.Data)
			header = noPart
			if source, _ := nft.AttrOf(e.Data, unix.NFTA_META_SREG); source != nil {
				s.sets(loaded)
			}
		case "payload":
			header, err = s.packet(family, e.Data)
			loaded = noKey
		case "bitwise":
			err = s.bits(header, e.Data)
		case "lookup", "dynset", "objref":
			s.odd = "it uses a set or an object of nft's, which iptables cannot print"
		case "cmp", "range":
			if !comparesEqual(e) {
				s.ordered(header, loaded)
			}
			if e.Name == "cmp" {
				err = s.compare(loaded, e.Data)
			}
			loaded, header = noKey, noPart
		case "immediate":
			s.target, err = immediateVerdict(e.Data)
		case "target", "match":
			err = s.extension(e)
		}
		return err
	})
	if err != nil {
		s.odd = "its bytes cannot be read: " + err.Error()
	}
	return s
}

// nativeMatches are matches that iptables-nft writes, or reads, as expressions of nf_tables (1.8.4
// to 1.8.11). A comment may be among a rule's user data.
var (
	nativeMatches   = []string{"limit", "mark", "tcp", "udp", "icmp", "icmp6", "ttl", "hl", "pkttype", "iprange", "conntrack"}
	nativeOrComment = append(nativeMatches[:len(nativeMatches):len(nativeMatches)], "comment")
)

// noKey stands for no key of a meta expression: the key 0 is the length of a packet.
const noKey = ^uint32(0)

// metaKey returns the key of a meta expression.
func metaKey(data []byte) (uint32, error) {
	key, err := nft.AttrOf(data, unix.NFTA_META_KEY)
	if err != nil || len(key) != 4 {
		return noKey, err
	}
	return binary.BigEndian.Uint32(key), nil
}

// sets notes a meta expression that sets something.
func (s *ruleShape) sets(key uint32) {
	if key == unix.NFT_META_MARK {
		s.target = "MARK" // as 1.8.10 and later print it
		return
	}
	s.odd = fmt.Sprintf("it sets what iptables has no word for (meta key %d)", key)
}

// compare reads the name of an interface. iptables writes one with the zero behind it, and the
// beginning of one, which it prints with a +, without.
func (s *ruleShape) compare(loaded uint32, data []byte) error {
	switch loaded {
	case noKey, unix.NFT_META_PROTOCOL, unix.NFT_META_NFPROTO, unix.NFT_META_L4PROTO:
	case unix.NFT_META_MARK:
		s.needs = append(s.needs, []string{"mark"})
	case unix.NFT_META_PKTTYPE:
		s.needs = append(s.needs, []string{"pkttype"})
	case unix.NFT_META_IIFNAME, unix.NFT_META_OIFNAME:
	default:
		s.odd = fmt.Sprintf("it compares what iptables has no word for (meta key %d)", loaded)
	}
	if loaded != unix.NFT_META_IIFNAME && loaded != unix.NFT_META_OIFNAME {
		return nil
	}
	list, err := nft.AttrOf(data, unix.NFTA_CMP_DATA)
	if err != nil {
		return err
	}
	value, err := nft.AttrOf(list, unix.NFTA_DATA_VALUE)
	if err != nil || len(value) == 0 {
		return err
	}
	whole := value[len(value)-1] == 0
	name := interfaceName(value, whole, &s.odd)
	if loaded == unix.NFT_META_IIFNAME {
		s.in = name
	} else {
		s.out = name
	}
	return nil
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
func (s *ruleShape) extension(e nft.Expression) error {
	// NFTA_TARGET_* and NFTA_MATCH_* are the same numbers.
	name, err := nft.AttrOf(e.Data, unix.NFTA_MATCH_NAME)
	if err != nil {
		return err
	}
	revision, err := nft.AttrOf(e.Data, unix.NFTA_MATCH_REV)
	if err != nil {
		return err
	}
	info, err := nft.AttrOf(e.Data, unix.NFTA_MATCH_INFO)
	if err != nil {
		return err
	}
	var rev byte
	if len(revision) == 4 {
		rev = revision[3]
	}
	kind := nft.String(name)
	if reason := oddExtension(kind, rev, info); reason != "" && s.odd == "" {
		s.odd = reason
	}
	if e.Name == "target" {
		s.target = kind
		return nil
	}
	s.matches = append(s.matches, matchName(kind))
	if kind == "comment" {
		s.comments = append(s.comments, nft.String(info))
	}
	return nil
}

// matchName returns one name for the matches that iptables prints by two.
func matchName(name string) string {
	if name == "state" {
		return "conntrack"
	}
	return name
}

// opaque returns an opaque rule of such bytes.
func opaque(family rules.Family, r nft.Rule, reason string) rules.Rule {
	identity := append(append([]byte(nil), r.Expressions...), r.Userdata...)
	return rules.OpaqueRule(identity, shapeOf(family, r).target, reason)
}
