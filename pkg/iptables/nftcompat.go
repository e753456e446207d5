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
	compat nft.Compat
	// jump is the chain that the rule jumps or goes to, nil if none.
	jump []byte
}

// errNotPortable: the rule's bytes alone do not make the rule again.
var errNotPortable = errors.New("cannot be written again as the kernel shows it")

// needsOf reads what a rule needs. A rule with an expression that is not known
// to be complete in itself is an error, and its needs are right all the same.
func needsOf(r nft.Rule, family rules.Family) (needs, error) {
	var n needs
	var foreign error
	numbers, names := false, false
	err := r.Each(func(e nft.Expression) error {
		switch {
		case e.Name == setNames:
			names = true
		case namesSet(e):
			numbers = true
		case foreign == nil && !portable(e):
			foreign = fmt.Errorf("a rule with expression %q %w", e.Name, errNotPortable)
		}
		n.compat.Take(e, family)
		if chain := e.Jump(); chain != nil {
			n.jump = chain
		}
		return nil
	})
	if numbers && !names && foreign == nil {
		foreign = fmt.Errorf("a rule with an ipset's number %w", errNotPortable)
	}
	if err == nil {
		err = foreign
	}
	return n, err
}

// portable reports whether an expression means the same wherever it is
// written. The first line of the list is what iptables-nft 1.8.9 writes (iptables/nft.c,
// nft-shared.c), the others are nft's own without a state. Not on it are those that refer to
// objects outside the rule (lookup, dynset, objref), and those of which the kernel
// refuses its own words (see repair in pkg/native). Of xt's extensions, those do
// not that hold an ipset's number (xt_set.h; see nameSets) or a program by a file
// descriptor (xt_bpf.h).
func portable(e nft.Expression) bool {
	switch e.Name {
	case "counter", "cmp", "bitwise", "meta", "payload", "immediate", "limit", "log", "range",
		"ct", "masq", "nat", "redir", "reject", "tproxy", "fib", "queue", "notrack",
		"numgen", "hash", "socket", "rt", "byteorder", "synproxy", "dup", "connlimit", "xfrm":
		return true
	case "match", "target":
		name := extensionName(e)
		return !namesSet(e) && name != "" && (name != "bpf" || bpfMode(e) >= 0)
	default:
		return false
	}
}

// extensionName returns the name of an xt match or target, "" if it cannot be read. NFTA_MATCH_NAME
// and NFTA_TARGET_NAME are both 1.
func extensionName(e nft.Expression) string {
	return nft.String(nft.AttrPath(e.Data, unix.NFTA_MATCH_NAME))
}
