package standby

import (
	"errors"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// ErrUnavailable reports that no copy of this table would translate as the real table does. The
// error that wraps it says why.
var ErrUnavailable = errors.New("this table cannot be copied")

// A Copy is the content of one table of the standby, made by Translate or TranslateNative. It is a
// value.
type Copy struct {
	ID tableid.TableID // of the table that was copied
	// chains are the regular chains by name.
	chains map[string]*chain
	// rules are the encoded rules of chains. The kernel's own copy has none: its digests suffice,
	// and the rules take much memory.
	rules map[string][]rule
	hooks map[Hook]*hook
	marks uint32 // the bits that copied rules may set
	// services are the services to which base chains that translate destinations lead, in order.
	services []key
	// native is the whole copy of a native table. Then chains is empty.
	native *native.Table
}

// A chain is the copy of a chain. It never changes after it was made.
type chain struct {
	version uint64   // of the source; 0: not known
	digests []uint64 // of the rules, in order
	jumps   []string // the chains to which its rules lead
	// services are the keys of its rules that have an address and jump or translate.
	services []key
	// leftOut says why the chain became "accept"; "" if it was copied.
	leftOut string
	marks   uint32 // the bits that its rules may set
	// shadow: the chain is another owner's. The copy accepts packets that it would translate.
	shadow bool
}

// A hook is the copy of a base chain, without its gate.
type hook struct {
	name     string // of the real base chain, and of the copy's
	priority int32  // of the real one
	body     *chain
	rules    []rule // of the body
	// blocked says why the hook may be opened only while the real base chain is gone or empty. It
	// is "" if the hook may be opened at any time.
	blocked string
	// real has the fingerprints of the real base chain's rules, without rules that do nothing. ours
	// says which of them are protected.
	real []uint64
	ours []bool
}

// A rule is one rule of a copy, ready to be written.
type rule struct {
	expressions []byte // the content of NFTA_RULE_EXPRESSIONS
	compat      nft.Compat
}

// A LeftOut is a chain that is not copied: the copy accepts its packets unchanged.
type LeftOut struct {
	Chain  string
	Reason string
}

// LeftOut returns the chains that are not copied, by name. Standby.Status counts them.
func (c *Copy) LeftOut() []LeftOut {
	var all []LeftOut
	for name, chain := range c.chains {
		if chain.leftOut != "" {
			all = append(all, LeftOut{name, chain.leftOut})
		}
	}
	sorting.Stable(all, func(a, b LeftOut) int { return strings.Compare(a.Chain, b.Chain) })
	return all
}

// Counts returns how many chains and rules the copy has, without base chains in a copy of nat.
// The rules decide whether the copy gets gates, and how much memory it needs.
func (c *Copy) Counts() (chains, rules int) {
	if c.native != nil {
		chains, rules, _ = c.native.Counts()
		return chains, rules
	}
	for _, chain := range c.chains {
		rules += len(chain.digests)
	}
	return len(c.chains), rules
}

// Hooks returns the hooks at which the copy can translate, in the packets' order.
func (c *Copy) Hooks() []Hook {
	return slices.DeleteFunc(Hooks(), func(h Hook) bool { return c.hooks[h] == nil })
}

// Blocked says why a hook may be opened only while the real base chain is gone or empty. The
// reason is a rule of another owner that the copy lacks. It returns "" if the hook may be
// opened at any time. Openable keeps a blocked hook shut after a loss below the base chain.
func (c *Copy) Blocked(h Hook) string {
	if c.hooks[h] == nil {
		return "the copy has no such hook"
	}
	return c.hooks[h].blocked
}
