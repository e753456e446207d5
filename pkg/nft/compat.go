package nft

import (
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Compat is what NFTA_RULE_COMPAT says of a rule. The matches and targets of x_tables were made
// for rules that keep their protocol in a field of its own, and refuse one with the wrong protocol
// there. A rule of nf_tables has no such field: this attribute has what would be in it, and the
// kernel forgets it at once (nft_parse_compat in nft_compat.c). So it is read from the expressions.
//
// The zero value is for a rule without expressions; Take adds them in order.
type Compat struct {
	// Wanted: a match or target of x_tables is among the expressions.
	Wanted bool
	// Protocol is the field's value, 0 for all, and Inverted its "!".
	Protocol uint8
	Inverted bool
	loaded   bool // the expression before the next one loaded the protocol
}

// Take takes in the next expression of a rule.
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

// Compat writes the attribute, if the rule wants one.
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

// compared returns the byte that a cmp expression compares with, and whether
// it wants another one.
func compared(data []byte) (value uint8, inverted bool) {
	b := AttrPath(data, unix.NFTA_CMP_DATA, unix.NFTA_DATA_VALUE)
	if len(b) != 1 {
		return 0, false
	}
	return b[0], AttrNumber(data, unix.NFTA_CMP_OP) == unix.NFT_CMP_NEQ
}
