package nft

import (
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Compat is the content of a rule's NFTA_RULE_COMPAT. x_tables keeps a rule's
// protocol in a field of its own, and its matches and targets refuse a rule with
// the wrong protocol there. A rule of nf_tables lacks that field. This attribute
// replaces it, but the kernel drops it after use (nft_parse_compat in
// nft_compat.c). So Compat finds the protocol in the expressions.
//
// The zero value is for a rule without expressions; Take adds them in order.
type Compat struct {
	// Wanted: the expressions include a match or target of x_tables.
	Wanted bool
	// Protocol is the field's value, 0 for all, and Inverted its "!".
	Protocol uint8
	Inverted bool
	loaded   bool // the previous expression loaded the protocol
}

// Take adds the rule's next expression. Writers of a rule call it for each before they write
// the attribute.
func (c *Compat) Take(e Expression, family tableid.Family) {
	wasLoaded := c.loaded
	c.loaded = false
	switch e.Name {
	case "match", "target":
		c.Wanted = true
	case "meta":
		c.loaded = AttrNumber(e.Data, unix.NFTA_META_KEY) == unix.NFT_META_L4PROTO
	case "payload":
		c.loaded = family == tableid.IPv4 && loadsProtocol(e.Data)
	case "cmp":
		if wasLoaded && c.Protocol == 0 {
			c.Protocol, c.Inverted = compared(e.Data)
		}
	}
}

// Compat writes the attribute NFTA_RULE_COMPAT into a new rule's message, if the rule has a
// match or target of x_tables. Without it the kernel would refuse such a rule.
func (b *Batch) Compat(c Compat) {
	if !c.Wanted {
		return
	}
	var flags uint32
	if c.Inverted {
		flags = unix.NFT_RULE_COMPAT_F_INV
	}
	b.Pair(unix.NFTA_RULE_COMPAT|unix.NLA_F_NESTED, uint32(c.Protocol), flags)
}

// loadsProtocol reports whether a payload expression loads the protocol from
// the IPv4 header (byte 9), as iptables-nft did before it used meta l4proto.
func loadsProtocol(data []byte) bool {
	return AttrNumber(data, unix.NFTA_PAYLOAD_BASE) == unix.NFT_PAYLOAD_NETWORK_HEADER &&
		AttrNumber(data, unix.NFTA_PAYLOAD_OFFSET) == 9 && AttrNumber(data, unix.NFTA_PAYLOAD_LEN) == 1
}

// compared returns the byte in a cmp expression, and whether the expression matches only
// other bytes. It is 0 for a comparison of several bytes. Take calls it.
func compared(data []byte) (value uint8, inverted bool) {
	b := AttrPath(data, unix.NFTA_CMP_DATA, unix.NFTA_DATA_VALUE)
	if len(b) != 1 {
		return 0, false
	}
	return b[0], AttrNumber(data, unix.NFTA_CMP_OP) == unix.NFT_CMP_NEQ
}
