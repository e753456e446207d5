package standby

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file reads one rule of the real table and decides its form in the copy. Any process may have
// written anything: no rule may make these functions panic.

// An effect is the way in which a rule may end or change a packet's walk.
type effect uint8

const (
	nothing    effect = iota // the rule counts, logs or comments
	ends                     // accept, drop or return
	leads                    // a jump or a goto to another chain
	translates               // DNAT, SNAT, masquerading or redirection
	changes                  // the mark, or a list of addresses
)

// A reading is the meaning of a rule for the copy.
type reading struct {
	rule   rule
	effect effect
	to     string // the chain to which it leads
	marks  uint32 // the bits of the mark that it may set
	// changed: it changes the mark or a list, perhaps with another effect.
	changed bool
	key     key
}

// errExpression reports that the copy does not know an expression.
var errExpression = errors.New("is not copied")

// plainMatches are the matches of x_tables that mean the same in another table. They refer to
// nothing that another process may want to delete: a match of ipset would pin its set. They have no
// state, because the copy would have a second one. Only recent has a list. The list is shared by
// its name, and keeps its entries when its rules are deleted.
var plainMatches = []string{"addrtype", "conntrack", "mark", "multiport", "recent", "sctp", "statistic", "tcp", "udp"}

type reader struct {
	family tableid.Family
	list   []byte // the copy's expressions so far, in memory that the next rule reuses
	shadow bool   // see readShadow
	reading
	compat nft.Compat
	keys   keyReader
	// xor has the bits that the last bitwise expression may set. hadXor: that is the previous
	// expression.
	xor      uint32
	hadXor   bool
	finished bool // by a verdict, a jump or a target that translates
}

func readRule(family tableid.Family, raw nft.Rule) (reading, error) {
	return (&reader{family: family}).read(raw)
}

// readShadow reads a rule of another owner. The copy accepts packets that the rule would
// translate, so that no later rule translates them otherwise. The rule may change nothing.
// After an error, a rule before ours blocks its hook.
func readShadow(family tableid.Family, raw nft.Rule) (reading, error) {
	got, err := (&reader{family: family, shadow: true}).read(raw)
	if err == nil && got.changed {
		err = fmt.Errorf("a change by another owner's rule %w", errExpression)
	}
	return got, err
}

// read reads all expressions of a rule. An error means that the copy cannot have the rule. A
// chain with such a rule is left out as a whole. A reader may read one rule after the other.
func (r *reader) read(raw nft.Rule) (reading, error) {
	*r = reader{family: r.family, shadow: r.shadow, list: r.list[:0]}
	if err := raw.Each(r.take); err != nil {
		return reading{}, err
	}
	r.rule = rule{expressions: slices.Clone(r.list), compat: r.compat}
	r.rule.compat.Wanted = r.keepsXT()
	r.key = r.keys.result()
	return r.reading, nil
}

// keepsXT reports whether the copied expressions include a match or target of x_tables. The
// kernel then requires the rule's compat attributes (nft.Compat.Wanted).
func (r *reader) keepsXT() bool {
	found := false
	_ = nft.Rule{Expressions: r.list}.Each(func(e nft.Expression) error {
		found = found || e.Name == "match" || e.Name == "target"
		return nil
	})
	return found
}

// take reads the next expression, and appends its copy to list. Counters and logs are not
// copied. An error wraps errExpression: the copy does not know the expression, or may not have
// it.
func (r *reader) take(e nft.Expression) error {
	r.compat.Take(e, r.family)
	r.keys.take(e, r.family)
	hadXor := r.hadXor
	r.hadXor = false
	switch e.Name {
	case "counter", "log":
		return nil
	}
	if r.finished {
		return fmt.Errorf("expression %q behind a verdict %w", e.Name, errExpression)
	}
	switch e.Name {
	case "cmp", "range":
	case "bitwise":
		r.xor, r.hadXor = bitsOf(e.Data)
	case "meta":
		return r.meta(e, hadXor)
	case "payload":
		if attr(e.Data, unix.NFTA_PAYLOAD_SREG) != nil {
			return fmt.Errorf("an expression that changes the packet %w", errExpression)
		}
	case "ct":
		if attr(e.Data, unix.NFTA_CT_SREG) != nil {
			return fmt.Errorf("an expression that changes conntrack %w", errExpression)
		}
	case "immediate":
		return r.immediate(e)
	case "nat", "masq", "redir":
		if r.effect, r.finished = translates, true; r.shadow {
			r.list = verdict(r.list, nfAccept)
			return nil
		}
	case "match":
		return r.match(e)
	case "target":
		return r.target(e)
	default:
		return fmt.Errorf("expression %q %w", e.Name, errExpression)
	}
	r.keep(e)
	return nil
}

func (r *reader) keep(e nft.Expression) { r.list = expression(r.list, e.Name, e.Data) }

// bitsOf returns the bits that a bitwise expression may set: register & mask ^ xor. If the next
// expression sets the mark, they are bits of it. false: it is no operation on four bytes.
func bitsOf(data []byte) (uint32, bool) {
	xor := nft.AttrPath(data, unix.NFTA_BITWISE_XOR, unix.NFTA_DATA_VALUE)
	if len(xor) != 4 {
		return 0, false
	}
	return binary.NativeEndian.Uint32(xor), true
}

// meta reads an expression that loads meta data of a packet, or sets its mark. hadXor: the
// expression before it was a bitwise, whose bits are in r.xor. Any other change of meta data is
// an error.
func (r *reader) meta(e nft.Expression, hadXor bool) error {
	if attr(e.Data, unix.NFTA_META_SREG) == nil {
		r.keep(e)
		return nil
	}
	// iptables computes a new mark from the old one: load, bitwise, set.
	if nft.AttrNumber(e.Data, unix.NFTA_META_KEY) != unix.NFT_META_MARK || !hadXor {
		return fmt.Errorf("an expression that changes the packet's meta data %w", errExpression)
	}
	r.effect, r.changed, r.marks = changes, true, r.marks|r.xor
	r.keep(e)
	return nil
}

// immediate reads a verdict, or a value that a later expression uses. A jump, goto, drop,
// accept or return ends the rule; another verdict, such as a queue, is an error.
func (r *reader) immediate(e nft.Expression) error {
	v := nft.AttrPath(e.Data, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT)
	if v == nil { // a value, for an expression behind it
		r.keep(e)
		return nil
	}
	to := nft.String(attr(v, unix.NFTA_VERDICT_CHAIN))
	switch code := int32(nft.AttrNumber(v, unix.NFTA_VERDICT_CODE)); {
	case to != "" && (code == unix.NFT_JUMP || code == unix.NFT_GOTO):
		r.effect, r.to = leads, to
	case to == "" && (code == nfDrop || code == nfAccept || code == unix.NFT_RETURN):
		r.effect = ends
	default:
		return fmt.Errorf("verdict %d %w", code, errExpression)
	}
	r.finished = true
	r.keep(e)
	return nil
}

// match reads a match of x_tables. It drops comments, and refuses matches that have a state or
// mean another thing in another table (see plainMatches). statistic is copied if it chooses by
// chance.
func (r *reader) match(e nft.Expression) error {
	name := nft.String(attr(e.Data, unix.NFTA_MATCH_NAME))
	switch {
	case name == "comment":
		return nil
	case !slices.Contains(plainMatches, name):
		return fmt.Errorf("match %q %w", name, errExpression)
	case name == "statistic" && !atRandom(attr(e.Data, unix.NFTA_MATCH_INFO)):
		return fmt.Errorf("match statistic that counts packets %w", errExpression)
	case name == "recent":
		// recent writes its list even if the rule does not match in the end, so the rule keeps its
		// place.
		r.keys.none, r.changed = true, true
		if r.effect == nothing {
			r.effect = changes
		}
	}
	r.keep(e)
	return nil
}

// atRandom reports whether a match statistic chooses by chance (struct xt_statistic_info).
func atRandom(info []byte) bool {
	return len(info) >= 2 && binary.NativeEndian.Uint16(info) == 0 // XT_STATISTIC_MODE_RANDOM
}

// target reads a target of x_tables. Logs are dropped, and translations get their native form.
// In a rule of another owner (shadow) a translation becomes accept, and MARK is refused by
// readShadow.
func (r *reader) target(e nft.Expression) error {
	switch name := nft.String(attr(e.Data, unix.NFTA_TARGET_NAME)); name {
	case "LOG", "NFLOG":
		return nil
	}
	list, marks, err := translateTarget(r.list, r.family, e)
	if err != nil {
		return err
	}
	if r.shadow && marks == 0 {
		list = verdict(r.list, nfAccept)
	}
	r.list, r.marks = list, r.marks|marks
	if r.effect = translates; nft.String(attr(e.Data, unix.NFTA_TARGET_NAME)) == "MARK" { // a shadow refuses this
		r.effect, r.changed = changes, true
		return nil
	}
	r.finished = true
	return nil
}

// attr returns an attribute's value, nil if there is none.
func attr(list []byte, kind uint16) []byte { return nft.AttrPath(list, kind) }
