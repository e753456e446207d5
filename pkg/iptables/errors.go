package iptables

import (
	"errors"
	"fmt"

	"github.com/canaryd/canaryd/pkg/rules"
)

// The errors by which callers decide. Every other error means "unknown".
var (
	// ErrLocked: another process holds the xtables lock.
	ErrLocked = errors.New("the xtables lock is held by another program")
	// ErrNoFamily: the kernel or the tools lack this IP family.
	ErrNoFamily = errors.New("this IP family is not available")
)

// A Reason classifies a refused restore; it is the label of
// canaryd_restore_failures_total.
type Reason string

// The reasons for which a restore is refused.
const (
	ReasonLock         Reason = "lock"
	ReasonMissingChain Reason = "missing_chain"
	ReasonMissingSet   Reason = "missing_set"
	ReasonParse        Reason = "parse"
	ReasonIncompatible Reason = "incompatible"
	ReasonNotInstalled Reason = "not_installed" // a rule without bytes needs iptables
	ReasonOther        Reason = "other"
)

// Reasons returns every Reason.
func Reasons() []Reason {
	return []Reason{ReasonLock, ReasonMissingChain, ReasonMissingSet, ReasonParse, ReasonIncompatible, ReasonNotInstalled, ReasonOther}
}

// A RestoreError is a restore that iptables refused or that did not finish.
type RestoreError struct {
	Reason  Reason
	Program string // such as "ip6tables-nft-restore"; "nf_tables" is the kernel itself
	Exit    int    // its exit code; -1 if it was killed, 0 if it is no program
	Stderr  string // its first lines, bounded
	// Rule is the rule for which the kernel refused a whole transaction, which may contain
	// several families. It is nil if the rule is not known.
	Rule *RefusedRule
	// Textless reports that a rule without a text was to be written, and its bytes could not be.
	Textless bool
}

// A RefusedRule is a rule that the kernel refused, and its intended place.
type RefusedRule struct {
	rules.TableID
	Chain string
	Rule  rules.Rule
}

// Error names the program, or the kernel, its Reason and its complaints on one line.
func (e *RestoreError) Error() string {
	if e.Exit == 0 {
		return fmt.Sprintf("%s refused the rules (%s): %s", e.Program, e.Reason, e.Stderr)
	}
	return fmt.Sprintf("%s refused the rules (%s, exit %d): %s", e.Program, e.Reason, e.Exit, e.Stderr)
}
