package iptables

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/ruleset"
)

// The needs of a rule are the facts that its expressions require for writing it again.
type needs struct {
	compat nft.Compat
	// jump is the chain that the rule jumps to, also with goto; nil if none.
	jump []byte
}

// errNotPortable: the bytes alone cannot make the rule again.
var errNotPortable = errors.New("cannot be written again as the kernel shows it")

// needsOf returns the needs of a rule. The error (errNotPortable) names an expression that may
// be incomplete in itself; the needs are right even then. After an error, opaque keeps no
// bytes, and writeRule refuses the rule unless teach has read its bytes.
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

// portable reports whether an expression means the same wherever it is written. The first line
// of the list has the expressions that iptables-nft 1.8.9 writes (iptables/nft.c, nft-shared.c).
// The others are nft's own without a state. The list omits expressions that refer to objects
// outside the rule (lookup, dynset, objref). It also omits expressions that the kernel refuses
// as it prints them (see repair in pkg/native). Of xt's extensions, those with an ipset's number
// are not portable (xt_set.h; see nameSets), nor is a program by a file descriptor (xt_bpf.h).
func portable(e nft.Expression) bool {
	switch e.Name {
	case ruleset.EntryHead: // of x_tables
		return nft.AttrPath(e.Data, ruleset.EntryConditions) != nil
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

// extensionName returns the name of an xt match or target, "" if it cannot be read.
// NFTA_MATCH_NAME and NFTA_TARGET_NAME are both 1.
func extensionName(e nft.Expression) string {
	return nft.String(nft.AttrPath(e.Data, unix.NFTA_MATCH_NAME))
}
