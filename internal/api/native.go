package api

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
)

// TableCell returns the name of a native table, with its family, for a table that people read. A
// name may have up to 255 bytes of any kind: with a blank in it, or where nothing or something else
// than its letters would be seen, it is quoted, and a long one is cut.
func TableCell(name string) string {
	const long = 48
	family, own, _ := strings.Cut(name, " ")
	cut := ""
	if runes := []rune(own); len(runes) > long {
		own, cut = string(runes[:long]), "..."
	}
	if quoted := strconv.Quote(own); strings.Contains(own, " ") || quoted != `"`+own+`"` {
		own = quoted
	}
	return family + " " + own + cut
}

// A NativeTable is a native nftables table, in a Status.
type NativeTable struct {
	Family  string         `json:"family"` // as nftables has it, such as "ip"
	Table   string         `json:"table"`  // with its family, such as "ip kube-proxy"
	Verdict canary.Verdict `json:"verdict"`
	Why     string         `json:"why,omitempty"`
	// Chains, Rules and Elements are what it ought to hold.
	Chains   int       `json:"chains"`
	Rules    int       `json:"rules"`
	Elements int       `json:"elements"`
	Captured time.Time `json:"captured,omitzero"` // when it was last read
	// Generation is the ID of that content, for `canaryd render --generation`; empty if unknown.
	Generation string `json:"generation,omitempty"`
	// Immune: one process owns the table, so that no other can flush it. canaryd skips it.
	Immune bool `json:"immune,omitempty"`
	// Awaiting: the table is lost and not put back unasked. It waits for its owner, or for `canaryd
	// restore` or `canaryd dismiss`.
	Awaiting bool `json:"awaiting,omitempty"`
	// Unreplayable is why the kernel would not take the table again, and UnreplayableParts how many
	// parts of it; 0 for all of it.
	Unreplayable      string `json:"unreplayable,omitempty"`
	UnreplayableParts int    `json:"unreplayableParts,omitempty"`
	// Quarantined are the parts that could not be put back, the first hundred of QuarantinedParts.
	// They were lost, so that a node with any is not healthy.
	Quarantined      []NativeQuarantined `json:"quarantined,omitempty"`
	QuarantinedParts int                 `json:"quarantinedParts,omitempty"`
	// Standby is the state of its standby; nil without --standby.
	Standby *FamilyStandby `json:"standby,omitempty"`
	// Witness is the empty table of its family that a flush of the ruleset takes along; empty: none
	// stands, and canaryd may take a flush for the owner's doing.
	Witness string `json:"witness,omitempty"`
}

// A NativeQuarantined is a part of a native table in quarantine, in a Status. Text and Reason leave
// through the control socket only.
type NativeQuarantined struct {
	Kind   string `json:"kind"` // such as "rule" or "set element"
	Name   string `json:"name"` // its own, or that of the chain of a rule or the set of an element
	Text   string `json:"text,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Waits says that the part itself can be had: it waits for a rule before it that cannot.
	Waits bool `json:"waits,omitempty"`
}

// A StoredNativeGeneration is what one native table held, on disk, in a Status.
type StoredNativeGeneration struct {
	ID       string      `json:"id"`
	Family   string      `json:"family"`
	Table    string      `json:"table"`    // with its family
	Captured time.Time   `json:"captured"` // when it was learned
	Made     reload.Made `json:"made,omitempty"`
	Chains   int         `json:"chains"`
	Rules    int         `json:"rules"`
	Elements int         `json:"elements"`
	// Foreign is why it must not be restored here, such as another boot.
	Foreign string `json:"foreign,omitempty"`
}

// A NativeRestored says what became of a native table that an operator asked back.
type NativeRestored struct {
	Family string `json:"family"`
	Table  string `json:"table"`
	// Chains, Rules and Elements are what it ought to hold.
	Chains   int `json:"chains"`
	Rules    int `json:"rules"`
	Elements int `json:"elements"`
	// Outcome is empty after a dry run. Detail is why canaryd did not put the table back, or not
	// all of it.
	Outcome Outcome `json:"outcome,omitempty"`
	Detail  string  `json:"detail,omitempty"`
}

// A NativeLoss counts what a flush took from one native table.
type NativeLoss struct {
	Family   string         `json:"family"`
	Table    string         `json:"table"`
	Kind     canary.Verdict `json:"kind"`
	Why      string         `json:"why,omitempty"`
	Chains   int            `json:"chains"`
	Rules    int            `json:"rules"`
	Elements int            `json:"elements"`
	// Parts say what each chain, set and object lost, in words; More is how many are not listed.
	Parts []string `json:"parts,omitempty"`
	More  int      `json:"more,omitempty"`
	// By are the process numbers of those among Culprits that took it.
	By []uint32 `json:"by,omitempty"`
}

// String says it for people.
func (l NativeLoss) String() string {
	lost := Lost{Rules: l.Rules, Chains: l.Chains, Elements: l.Elements}
	return fmt.Sprintf("%s is %s: %s (%s)", l.Table, l.Kind, lost.Text(strconv.Itoa), l.Why)
}

// NativeLossKinds returns every verdict that shows a loss of a native table.
func NativeLossKinds() []canary.Verdict {
	var kinds []canary.Verdict
	for _, v := range []native.Verdict{native.TableDeleted, native.Emptied, native.Replaced, native.Disabled, native.Unattributed} {
		kinds = append(kinds, canary.Verdict(v))
	}
	return kinds
}

// NativeNames returns the names of the native tables that were hit.
func (f Flush) NativeNames() []string {
	var names []string
	for _, l := range f.Native {
		names = append(names, l.Table)
	}
	return names
}

// NativeAwaiting reports whether a native table is lost and not put back unasked.
func (s Status) NativeAwaiting() bool {
	return slices.ContainsFunc(s.Native, func(t NativeTable) bool { return t.Awaiting })
}
