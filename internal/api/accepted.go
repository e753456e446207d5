package api

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// AcceptedShown is how many removals a Status lists.
const AcceptedShown = 20

// An Accepted is a large removal that canaryd takes for its owner's doing and does not put
// back. It removed most of a chain or table, or a rule that a built-in chain needs. It does not
// affect Healthy. With NotGuarded, canaryd does not guard the table, and the removal may have
// been a flush.
type Accepted struct {
	Time   time.Time       `json:"time"` // when it was learned
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Native bool            `json:"native,omitempty"`
	Chain  string          `json:"chain,omitempty"` // empty, as Set: most of the table
	Set    string          `json:"set,omitempty"`   // or map, of a native table
	Rule   string          `json:"rule,omitempty"`  // of a built-in chain
	Rules  int             `json:"rules"`           // removed ones; elements of a set
	Left   int             `json:"left"`            // of the chain, set or table
	// NotGuarded means that nothing is protected in the table, which is raw or security.
	NotGuarded bool `json:"notGuarded,omitempty"`
	// By is the process that removed them; nil if it is unknown. Likely means that it held the
	// xtables lock last, which is all that the kernel reports, or that it did the last of
	// several steps.
	By     *Culprit `json:"by,omitempty"`
	Likely bool     `json:"likely,omitempty"`
}

// SamePlace reports whether another removal is of the same chain, table or rule.
func (a Accepted) SamePlace(o Accepted) bool {
	return a.Family == o.Family && a.Table == o.Table && a.Chain == o.Chain && a.Rule == o.Rule && a.Set == o.Set
}

// ByText names the process in a few words, for the log and status; "unknown" if it is not
// known.
func (a Accepted) ByText() string {
	if a.By == nil {
		return "unknown"
	}
	text := fmt.Sprintf("pid %d (%s)", a.By.PID, cmp.Or(a.By.Command, a.By.Comm, "unknown")) + a.By.Line()
	if a.Likely {
		return "likely " + text
	}
	return text
}

// String names the place and counts the removed rules, without the process: "ipv4 nat
// KUBE-SERVICES lost 40 rules, 2 left".
func (a Accepted) String() string {
	place, part := fmt.Sprintf("%s %s", a.Family, a.Table), "rule"
	if a.Native {
		place = "table " + TableCell(a.Family.Table(a.Table).NFT())
	}
	if a.Set != "" {
		place, part = place+" "+a.Set, "element"
	}
	if a.Chain != "" {
		place += " " + a.Chain
	}
	if a.Rule != "" {
		return place + " lost " + a.Rule
	}
	return fmt.Sprintf("%s lost %s, %d left", place, CountText(a.Rules, math.MaxInt, part), a.Left)
}
