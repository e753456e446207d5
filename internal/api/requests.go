package api

import (
	"errors"
	"time"

	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A BaselineRequest asks for the baseline, or to change it.
type BaselineRequest struct {
	// Confirm takes a generation for the baseline: that of the ID, which must be in force or
	// stored; without an ID the one that ought to be in force.
	Confirm    bool   `json:"confirm,omitempty"`
	Generation string `json:"generation,omitempty"`
	// Forget removes the baseline.
	Forget bool `json:"forget,omitempty"`
}

// A BaselineReply is all that is known of the baseline. It quotes rules.
type BaselineReply struct {
	// Baseline is nil if none is confirmed.
	Baseline *Baseline `json:"baseline,omitempty"`
	// Present is the generation that ought to be in force, with which it was compared.
	Present Generation `json:"present"`
	// Changes are the chains that differ: built-in ones first, then those that
	// the baseline has. More is how many are not listed.
	Changes []BaselineChange `json:"changes,omitempty"`
	More    int              `json:"more,omitempty"`
	// Replaced is the baseline that was confirmed or forgotten before.
	Replaced *BaselineName `json:"replaced,omitempty"`
}

// A BaselineChange is in what one chain differs from the baseline.
type BaselineChange struct {
	Family   rules.Family    `json:"family"`
	Table    rules.TableName `json:"table"`
	Chain    string          `json:"chain"`
	Known    bool            `json:"known"` // the baseline has rules of it
	Appeared int             `json:"appeared"`
	Gone     int             `json:"gone"`
	// Reordered: rules of the baseline stand in another order.
	Reordered bool `json:"reordered,omitempty"`
	// Rules are those that appeared, in the words of iptables-save.
	Rules []string `json:"rules,omitempty"`
	More  int      `json:"more,omitempty"` // that were left out
}

// ErrNoGeneration: there is no generation of that ID, or none at all.
var ErrNoGeneration = errors.New("no such generation")

// A RestoreRequest asks for a replay.
type RestoreRequest struct {
	// Generation is the ID of what to replay; empty means what ought to be
	// in force.
	Generation string `json:"generation,omitempty"`
	// DryRun: say what would change, and write nothing.
	DryRun bool `json:"dryRun,omitempty"`
	// Agreed are the removals that may be made: for each table the Removal of what a dry
	// run showed. A restore that would remove anything else writes nothing.
	Agreed reload.Agreement `json:"agreed,omitempty"`
}

// A RestoreReply says what became of a replay.
type RestoreReply struct {
	Generation string                   `json:"generation"`
	Outcomes   map[rules.Family]Outcome `json:"outcomes"`         // empty if nothing was tried
	Detail     string                   `json:"detail,omitempty"` // for people
	// Changes are those of each table: what was done or, of a dry run and of a refused
	// restore, what would be done.
	Changes []TableChange `json:"changes,omitempty"`
	// Refused is why nothing was written, or not all: it would remove rules that were not
	// agreed to.
	Refused string `json:"refused,omitempty"`
	// Baseline is what Changes are compared with; nil if none is confirmed.
	Baseline *BaselineName `json:"baseline,omitempty"`
	// Undo is the generation that was in force before, if it is stored.
	Undo string `json:"undo,omitempty"`
}

// Proved reports whether every family's rules are proved to be in force.
func (r RestoreReply) Proved() bool {
	for _, outcome := range r.Outcomes {
		if !outcome.Done() {
			return false
		}
	}
	return len(r.Outcomes) > 0
}

// A CleanupRequest asks for canaryd's own marks to be removed and, with Rules,
// the protected chains and jumps as well.
type CleanupRequest struct {
	Rules bool `json:"rules,omitempty"`
	// Protect narrows Rules to what it names, as --protect takes it; empty means all that
	// the daemon protects.
	Protect string `json:"protect,omitempty"`
}

// A PauseRequest asks for replays to be held.
type PauseRequest struct {
	Seconds float64 `json:"seconds"`
}

// A PauseReply says what a request found and what it made of it.
type PauseReply struct {
	WasPaused bool      `json:"wasPaused"`
	Until     time.Time `json:"until,omitzero"` // when the pause runs out; zero: there is none
}

// A RenderRequest asks for a generation's text.
type RenderRequest struct {
	Generation string       // its ID; empty: the one that ought to be in force
	Family     rules.Family // 0: every enabled family
}

// A DismissReply says which loss was accepted.
type DismissReply struct {
	// Flush and Generation are empty if none waited for a decision.
	Flush      string `json:"flush,omitempty"`
	Generation string `json:"generation,omitempty"`
	Rules      int    `json:"rules,omitempty"` // that were lost
}

// A TableDiff is what a flush changed in the protected rules of one table, in the
// words of iptables-save. It quotes rules.
type TableDiff struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	// Lines begin with - for what was lost and with + for what stood in its place.
	Lines []string `json:"lines"`
	More  int      `json:"more,omitempty"` // lines that were left out
}

// ErrNoFlush: no flush of that number or ID is known.
var ErrNoFlush = errors.New("no such flush")

// A FlushRequest asks for one flush.
type FlushRequest struct {
	// Name is its ID, or its number in the status: 1 is the newest.
	Name string
}

// A FlushReply is all that is known of one flush. It quotes rules and command
// lines.
type FlushReply struct {
	Flush Flush       `json:"flush"`
	Diff  []TableDiff `json:"diff"`
	// NoDiff is why there is no diff.
	NoDiff string `json:"noDiff,omitempty"`
}

// A TableChange is what a restore does, or would do, to the protected rules of one table.
type TableChange struct {
	Family  rules.Family    `json:"family"`
	Table   rules.TableName `json:"table"`
	Adds    Counts          `json:"adds"`
	Removes Counts          `json:"removes"`
	// Reorders counts chains that get the same rules in another order.
	Reorders int `json:"reorders,omitempty"`
	// Removal identifies what is removed: it is what RestoreRequest.Agreed holds.
	Removal string `json:"removal,omitempty"`
	// Lines are the rules of a dry run in the words of iptables-save, behind - and +.
	Lines []string `json:"lines,omitempty"`
	More  int      `json:"more,omitempty"` // lines that were left out
	// NotInBaseline counts those of the added rules that the confirmed baseline does not have;
	// the first NewLines of Lines are theirs.
	NotInBaseline int `json:"notInBaseline,omitempty"`
	NewLines      int `json:"newLines,omitempty"`
}

// Counts count rules, jumps from built-in chains included, and whole chains.
type Counts struct {
	Rules  int `json:"rules"`
	Chains int `json:"chains"`
}

// Agreement returns what agrees to exactly the removals of a preview.
func (r RestoreReply) Agreement() reload.Agreement {
	a := reload.Agreement{}
	for _, c := range r.Changes {
		if c.Removal == "" {
			continue
		}
		a[c.Family.Table(c.Table)] = c.Removal
	}
	return a
}

// Removes counts what a restore takes away, in all tables.
func (r RestoreReply) Removes() Counts {
	var all Counts
	for _, c := range r.Changes {
		all.Rules += c.Removes.Rules
		all.Chains += c.Removes.Chains
	}
	return all
}
