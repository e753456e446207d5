package api

import (
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A DrillSort names the part that a drill takes away.
type DrillSort string

// The sorts of drills. Flush.Drill is empty for a flush.
const (
	// DrillCanary takes canaryd's own canary, or tables of canaryd's own in place of an owner's
	// native table. Packets meet neither. It counts as no flush.
	DrillCanary DrillSort = "canary"
	// DrillForReal takes the protected jumps of nat PREROUTING. It counts as a flush.
	DrillForReal DrillSort = "for-real"
)

// Drilled is the outcome of the record of a drill whose canary is proved to be back. Only
// DrillCanary has it. No metric of replays has it.
const Drilled Outcome = "drilled"

// A DrillResult is the result of a drill.
type DrillResult string

// The results of a drill.
const (
	DrillPassed  DrillResult = "passed"  // noticed, put back and proved
	DrillFailed  DrillResult = "failed"  // not noticed, or not proved in time
	DrillVoid    DrillResult = "void"    // a real flush came in between, and was answered as one
	DrillRefused DrillResult = "refused" // nothing was taken
)

// DrillResults returns every DrillResult.
func DrillResults() []DrillResult {
	return []DrillResult{DrillPassed, DrillFailed, DrillVoid, DrillRefused}
}

// DrillNative is the word for native tables in the place of an iptables' table.
const DrillNative rules.TableName = "native"

// A DrillRequest is a request for a drill.
type DrillRequest struct {
	// Table is the table whose canary is taken, or DrillNative. Empty means nat, and then native
	// tables, each if canaryd guards something there.
	Table rules.TableName `json:"table,omitempty"`
	// Kind is the damage. Empty: chain_deleted of a canary, table_deleted of native tables.
	Kind canary.Verdict `json:"kind,omitempty"`
	// ForReal takes the protected jumps of nat PREROUTING instead.
	ForReal bool `json:"forReal,omitempty"`
}

// A DrillReply is the course of a drill, with times.
type DrillReply struct {
	DrillEnd
	// Reason is why the drill did not pass.
	Reason   string          `json:"reason,omitempty"`
	Table    rules.TableName `json:"table"`              // DrillNative if it tried native tables only
	Kind     canary.Verdict  `json:"kind"`               // the first one, if it tried both
	Families []rules.Family  `json:"families,omitempty"` // of iptables that lost something
	Native   []string        `json:"native,omitempty"`   // canaryd's own native tables that were taken
	Jumps    int             `json:"jumps,omitempty"`    // how many were taken
	Steps    []DrillStep     `json:"steps,omitempty"`
	// Log has the lines that the daemon logged meanwhile.
	Log []string `json:"log,omitempty"`
	// Alert is the alert that a flush of rules raises.
	Alert DrillAlert `json:"alert"`
}

// A DrillEnd is the time and the result of a drill.
type DrillEnd struct {
	Time   time.Time   `json:"time"` // of the removal, even if it failed
	Sort   DrillSort   `json:"sort"`
	Result DrillResult `json:"result"`
	// Flush is the ID of the flush record; empty if there is none.
	Flush string `json:"flush,omitempty"`
}

// A DrillStep is one line of a drill's timeline.
type DrillStep struct {
	Seconds float64 `json:"seconds"` // since canaryd's own removal took effect in the kernel
	What    string  `json:"what"`
}

// A DrillAlert is an alert of deploy/prometheus, and whether the drill raises it.
type DrillAlert struct {
	Name     string `json:"name"`
	Severity string `json:"severity"`
	Fires    bool   `json:"fires"` // only a drill for real raises it
}

// AlertOfFlush returns the alert that a flush raises.
func AlertOfFlush(fires bool) DrillAlert {
	return DrillAlert{Name: "CanarydFlush", Severity: "info", Fires: fires}
}

// LastDrillOf returns the end of the newest drill among records, which are sorted newest first;
// nil if there is none. The outcome in the record shows whether the drill passed. After a
// restart the status and --drill-every rely on it.
func LastDrillOf(records []Flush) *DrillEnd {
	i := slices.IndexFunc(records, func(f Flush) bool { return f.Drill != "" })
	if i < 0 {
		return nil
	}
	f := records[i]
	end := DrillEnd{Time: f.Time, Sort: f.Drill, Result: DrillFailed, Flush: f.ID}
	if (f.Outcome == Drilled || f.Outcome.Done()) && !f.DrillFailed {
		end.Result = DrillPassed
	}
	return &end
}
