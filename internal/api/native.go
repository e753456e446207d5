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

// TableCell returns a native table's name ("FAMILY NAME") for commands and the page. Its owner
// may have chosen any 255 bytes. TableCell quotes a name with a blank or an unprintable
// character, and shortens it to 48 characters with "..." behind.
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
	// Chains, Rules and Elements count its expected content.
	Chains   int       `json:"chains"`
	Rules    int       `json:"rules"`
	Elements int       `json:"elements"`
	Captured time.Time `json:"captured,omitzero"` // when it was last read
	// Generation is the ID of that content, for `canaryd render --generation`; empty if unknown.
	Generation string `json:"generation,omitempty"`
	// Immune means that one process owns the table, so that no other can flush it. canaryd
	// skips it.
	Immune bool `json:"immune,omitempty"`
	// Awaiting means that the table is lost and waits for its owner or an operator: for
	// `canaryd restore` or `canaryd dismiss`.
	Awaiting bool `json:"awaiting,omitempty"`
	// LeftOut means that the table is left out, or was when it was lost
	// (Status.NativeLeftOut). Only its owner or `canaryd dismiss` ends such a loss. The counts
	// are not known.
	LeftOut bool `json:"leftOut,omitempty"`
	// Unreplayable is why the kernel would not take the table again. UnreplayableParts counts
	// the parts that it would not take; 0 means the whole table.
	Unreplayable      string `json:"unreplayable,omitempty"`
	UnreplayableParts int    `json:"unreplayableParts,omitempty"`
	// QuarantinedParts counts its parts that could not be put back. Status.Quarantined lists them.
	QuarantinedParts int `json:"quarantinedParts,omitempty"`
	// Standby is the state of its standby; nil without --standby.
	Standby *FamilyStandby `json:"standby,omitempty"`
	// Witness is the empty table of its family that a flush of the ruleset also deletes. It is
	// empty if there is none; canaryd may then take a flush for the owner's doing.
	Witness string `json:"witness,omitempty"`
}

// CountCells returns the table's counts of chains, rules and elements for people. Each is "-" for a
// table that was left out: its content was not counted. number formats a count.
func (t NativeTable) CountCells(number func(int) string) []string {
	if t.LeftOut {
		return []string{"-", "-", "-"}
	}
	return []string{number(t.Chains), number(t.Rules), number(t.Elements)}
}

// A NativeLeftOut is a native table that is not guarded, because all native tables together are
// larger than canaryd keeps (--max-rules).
type NativeLeftOut struct {
	Family string `json:"family"` // as nftables has it, such as "ip"
	Table  string `json:"table"`  // with its family, such as "ip kube-proxy"
	// Rules is its size in rules of usual length; seven addresses of a set are as large as one. The
	// last count may have ended where the table was too large.
	Rules int `json:"rules"`
}

// String names the table, and says how large it is.
func (l NativeLeftOut) String() string {
	return fmt.Sprintf("table %s: it is as large as %d rules, or larger", TableCell(l.Table), l.Rules)
}

// A StoredNativeGeneration is the stored content of one native table, in a Status.
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

// A NativeRestored is the result for a native table that an operator had restored.
type NativeRestored struct {
	Family string `json:"family"`
	Table  string `json:"table"`
	// Chains, Rules and Elements count its expected content.
	Chains   int `json:"chains"`
	Rules    int `json:"rules"`
	Elements int `json:"elements"`
	// Unread means that the table was left out, so the counts are unknown.
	Unread bool `json:"unread,omitempty"`
	// NotInBaseline counts the lost rules that the confirmed baseline lacks, in a dry run.
	NotInBaseline int `json:"notInBaseline,omitempty"`
	// Outcome is empty after a dry run. Detail is why canaryd did not put the table back, or
	// only a part.
	Outcome Outcome `json:"outcome,omitempty"`
	Detail  string  `json:"detail,omitempty"`
}

// A NativeLoss counts the content that a flush removed from one native table.
type NativeLoss struct {
	Family   string         `json:"family"`
	Table    string         `json:"table"`
	Kind     canary.Verdict `json:"kind"`
	Why      string         `json:"why,omitempty"`
	Chains   int            `json:"chains"`
	Rules    int            `json:"rules"`
	Elements int            `json:"elements"`
	// Unread means that the table was left out, so the counts are unknown.
	Unread bool `json:"unread,omitempty"`
	// Parts describe the loss of each chain, set and object in words; More counts unlisted
	// ones.
	Parts []string `json:"parts,omitempty"`
	More  int      `json:"more,omitempty"`
	// By has the pids of the Culprits that removed it.
	By []uint32 `json:"by,omitempty"`
}

// String describes the loss for people.
func (l NativeLoss) String() string {
	lost := Lost{Rules: l.Rules, Chains: l.Chains, Elements: l.Elements, Unread: l.Unread}
	return fmt.Sprintf("%s is %s: %s (%s)", l.Table, l.Kind, lost.Text(strconv.Itoa), l.Why)
}

// NativeLossKinds returns every verdict that shows a loss of a native table, as flush records
// name them.
func NativeLossKinds() []canary.Verdict {
	var kinds []canary.Verdict
	for _, v := range []native.Verdict{native.TableDeleted, native.Emptied, native.Replaced, native.Disabled, native.Unattributed} {
		kinds = append(kinds, canary.Verdict(v))
	}
	return kinds
}

// NativeNames returns the names of the native tables that were hit, as "FAMILY NAME".
func (f Flush) NativeNames() []string {
	var names []string
	for _, l := range f.Native {
		names = append(names, l.Table)
	}
	return names
}

// NativeAwaiting reports whether a native table is lost and waits for its owner or an operator.
func (s Status) NativeAwaiting() bool {
	return slices.ContainsFunc(s.Native, func(t NativeTable) bool { return t.Awaiting })
}
