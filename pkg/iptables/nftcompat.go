package iptables

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The needs of a rule are what its expressions ask of who writes it again.
type needs struct {
	// xt: an xt match or target is among the expressions. Those were made
	// for rules that keep their protocol in a field of its own, and refuse
	// one with the wrong protocol there. A rule of nf_tables has no such
	// field: NFTA_RULE_COMPAT has for xt what would be in it, and the kernel
	// forgets it at once (nft_parse_compat in nft_compat.c).
	xt bool
	// protocol is the field's value, 0 for all, and inverted its "!".
	protocol uint8
	inverted bool
	// jump is the chain that the rule jumps or goes to, nil if none.
	jump []byte
}

// errNotPortable: the rule's bytes alone do not make the rule again.
var errNotPortable = errors.New("cannot be written again as the kernel shows it")

// needsOf reads what a rule needs. A rule with an expression that is not known
// to be complete in itself is refused.
func needsOf(r nft.Rule, family rules.Family) (needs, error) {
	var n needs
	loaded := false // the expression before this one loaded the protocol
	err := r.Each(func(e nft.Expression) error {
		if !portable(e) {
			return fmt.Errorf("a rule with expression %q %w", e.Name, errNotPortable)
		}
		wasLoaded := loaded
		loaded = false
		switch e.Name {
		case "match", "target":
			n.xt = true
		case "meta":
			loaded = nft.AttrNumber(e.Data, unix.NFTA_META_KEY) == unix.NFT_META_L4PROTO
		case "payload":
			loaded = family == rules.IPv4 && loadsProtocol(e.Data)
		case "cmp":
			if wasLoaded && n.protocol == 0 {
				n.protocol, n.inverted = compared(e.Data)
			}
		case "immediate":
			if chain := nft.AttrPath(e.Data, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CHAIN); chain != nil {
				n.jump = nft.UntilNUL(chain)
			}
		}
		return nil
	})
	return n, err
}

// portable reports whether an expression means the same wherever it is
// written. The list is what iptables-nft 1.8.9 writes (iptables/nft.c,
// nft-shared.c); others refer to objects outside the rule (lookup, dynset,
// objref), or are nothing that iptables prints. Of xt's extensions, those do
// not that hold an ipset's index (xt_set.h) or a file descriptor (xt_bpf.h).
func portable(e nft.Expression) bool {
	switch e.Name {
	case "counter", "cmp", "bitwise", "meta", "payload", "immediate", "limit", "log", "range":
		return true
	case "match", "target":
		// NFTA_MATCH_NAME and NFTA_TARGET_NAME are both 1.
		switch string(nft.UntilNUL(nft.AttrPath(e.Data, unix.NFTA_MATCH_NAME))) {
		case "set", "SET", "bpf", "":
			return false
		}
		return true
	default:
		return false
	}
}

// loadsProtocol reports whether a payload expression loads the protocol from
// the IPv4 header (byte 9), as iptables-nft did before it used meta l4proto.
func loadsProtocol(data []byte) bool {
	return nft.AttrNumber(data, unix.NFTA_PAYLOAD_BASE) == unix.NFT_PAYLOAD_NETWORK_HEADER &&
		nft.AttrNumber(data, unix.NFTA_PAYLOAD_OFFSET) == 9 && nft.AttrNumber(data, unix.NFTA_PAYLOAD_LEN) == 1
}

// compared returns the byte that a cmp expression compares with, and whether
// it wants another one.
func compared(data []byte) (value uint8, inverted bool) {
	b := nft.AttrPath(data, unix.NFTA_CMP_DATA, unix.NFTA_DATA_VALUE)
	if len(b) != 1 {
		return 0, false
	}
	return b[0], nft.AttrNumber(data, unix.NFTA_CMP_OP) == unix.NFT_CMP_NEQ
}
