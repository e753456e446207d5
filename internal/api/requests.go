package api

import (
	"errors"
	"time"

	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A BaselineRequest reads the baseline, or changes it.
type BaselineRequest struct {
	// Confirm makes everything that ought to be in force the baseline. With IDs, it confirms only
	// these generations, which must be in force or stored: one of iptables' tables at most, and one
	// of each native table. Other tables keep their part of the baseline.
	Confirm bool `json:"confirm,omitempty"`
	// Generation has the IDs, with commas between them.
	Generation string `json:"generation,omitempty"`
	// Forget removes the baseline.
	Forget bool `json:"forget,omitempty"`
}

// A BaselineReply holds all facts about the baseline. It quotes rules.
type BaselineReply struct {
	// Baseline is nil if there is none.
	Baseline *Baseline `json:"baseline,omitempty"`
	// Present is the generation that ought to be in force; it was compared with the baseline.
	Present Generation `json:"present"`
	// NativeTables counts the guarded native tables, and Generations has the IDs of Present and of
	// each of these. To confirm exactly the compared rules, name all of them.
	NativeTables int      `json:"nativeTables,omitempty"`
	Generations  []string `json:"generations,omitempty"`
	// Changes are the chains and other parts that differ: native tables that the baseline lacks and
	// built-in chains first, then the baseline's parts. More counts the parts that are not listed.
	Changes []BaselineChange `json:"changes,omitempty"`
	More    int              `json:"more,omitempty"`
	// Replaced is the baseline that this request replaced or removed.
	Replaced *BaselineName `json:"replaced,omitempty"`
}

// A BaselineChange says how one chain differs from the baseline.
type BaselineChange struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Native bool            `json:"native,omitempty"`
	// Kind is "" for the rules of a chain. For a declaration of a native table it is "base chain",
	// "set", "map", "flowtable" or an object's type, and Chain is the name. "table" is a whole
	// native table, without a Chain; Appeared or Gone counts its rules.
	Kind     string `json:"kind,omitempty"`
	Chain    string `json:"chain"`
	Known    bool   `json:"known"` // the baseline has it
	Appeared int    `json:"appeared"`
	Gone     int    `json:"gone"`
	// Reordered means that rules of the baseline are in another order.
	Reordered bool `json:"reordered,omitempty"`
	// Rules are the rules that appeared, in the words of iptables-save or of nft.
	Rules []string `json:"rules,omitempty"`
	More  int      `json:"more,omitempty"` // rules that are not listed
}

// Name names the table: "ipv4 nat", or of a native table "ip kube-proxy".
func (c BaselineChange) Name() string { return nameOf(c.Family.Table(c.Table), c.Native) }

// ErrNoGeneration means that no generation has that ID, or that there is none at all.
var ErrNoGeneration = errors.New("no such generation")

// A RestoreRequest requests a replay.
type RestoreRequest struct {
	// Generation is the ID of the generation to replay; empty means the present one.
	Generation string `json:"generation,omitempty"`
	// DryRun returns the changes without writing anything.
	DryRun bool `json:"dryRun,omitempty"`
	// Agreed has the removals that the operator agreed to: for each table, the Removal of a dry
	// run. A restore that would remove anything else writes nothing.
	Agreed reload.Agreement `json:"agreed,omitempty"`
}

// A RestoreReply is the result of a replay.
type RestoreReply struct {
	Generation string                   `json:"generation"`
	Outcomes   map[rules.Family]Outcome `json:"outcomes"`         // empty if nothing was tried
	Detail     string                   `json:"detail,omitempty"` // for people
	// Changes are the changes that the restore made to each table; after a dry run or a
	// refusal, the changes that it would make.
	Changes []TableChange `json:"changes,omitempty"`
	// Refused is why some or all writes did not happen: they would remove rules that the
	// operator did not agree to.
	Refused string `json:"refused,omitempty"`
	// Baseline is the baseline with which Changes are compared; nil if there is none.
	Baseline *BaselineName `json:"baseline,omitempty"`
	// Undo is the generation that was in force before, if it is stored.
	Undo string `json:"undo,omitempty"`
	// Native are the native tables that were put back, or that would be after a dry run.
	Native []NativeRestored `json:"native,omitempty"`
}

// Proved reports whether every family and native table is proved to be in force; false for an
// empty reply. canaryd restore then exits with 0.
func (r RestoreReply) Proved() bool {
	for _, outcome := range r.Outcomes {
		if !outcome.Done() {
			return false
		}
	}
	for _, t := range r.Native {
		if !t.Outcome.Done() {
			return false
		}
	}
	return len(r.Outcomes)+len(r.Native) > 0
}

// A CleanupRequest makes canaryd remove its own marks and, with Rules, the protected chains and
// jumps, too.
type CleanupRequest struct {
	Rules bool `json:"rules,omitempty"`
	// Protect limits Rules, in the words of --protect; empty means everything that the daemon
	// protects.
	Protect string `json:"protect,omitempty"`
}

// MostWhy is how many characters the reason of a pause may have.
const MostWhy = 200

// The bounds of a pause.
const (
	LeastPause = time.Second
	MostPause  = 24 * time.Hour
)

// A PauseRequest makes canaryd pause replays.
type PauseRequest struct {
	Seconds float64 `json:"seconds"`
	By      string  `json:"by,omitempty"`  // the person who pauses, for people
	Why     string  `json:"why,omitempty"` // the reason, at most MostWhy characters
}

// A PauseReply shows whether replays were paused before, and when the present pause ends.
type PauseReply struct {
	WasPaused bool      `json:"wasPaused"`
	Until     time.Time `json:"until,omitzero"` // end of the pause; zero: there is none
}

// A RenderRequest requests a generation's text.
type RenderRequest struct {
	Generation string       // its ID; empty: the present one
	Family     rules.Family // 0: every enabled family
}

// A DismissReply describes the losses that were accepted.
type DismissReply struct {
	// Flush and Generation are empty if no loss waited for a decision.
	Flush      string `json:"flush,omitempty"`
	Generation string `json:"generation,omitempty"`
	Rules      int    `json:"rules,omitempty"` // the number of lost ones
	// Native are the native tables whose losses were accepted.
	Native []string `json:"native,omitempty"`
	// Unread counts the stored files that could not be read; the present rules are accepted
	// instead.
	Unread int `json:"unread,omitempty"`
	// Policies names the built-in chains whose policy of DROP was accepted.
	Policies []string `json:"policies,omitempty"`
	// Quarantined is how many rules in quarantine were accepted as lost.
	Quarantined int `json:"quarantined,omitempty"`
	// Waiting counts the rules that waited for those. They are put back as soon as canaryd may
	// write.
	Waiting int `json:"waiting,omitempty"`
}

// A TableDiff has the changes of a flush to the protected rules of one table. Its words are
// those of iptables-save, or of nft for a native table. It quotes rules.
type TableDiff struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Native bool            `json:"native,omitempty"`
	// Lines begin with - for a lost rule, and with + for a rule that was in its place.
	Lines []string `json:"lines"`
	More  int      `json:"more,omitempty"` // lines that were left out
}

// Name names the table: "ipv4 nat", or of a native table "ip kube-proxy".
func (d TableDiff) Name() string { return nameOf(d.Family.Table(d.Table), d.Native) }

// ErrNoFlush means that no flush with that number or ID is known.
var ErrNoFlush = errors.New("no such flush")

// A FlushRequest requests one flush.
type FlushRequest struct {
	// Name is its ID, or its number in the status: 1 is the newest.
	Name string
}

// A FlushReply holds all facts about one flush. It quotes rules and command lines.
type FlushReply struct {
	Flush Flush       `json:"flush"`
	Diff  []TableDiff `json:"diff"`
	// NoDiff is why there is no diff.
	NoDiff string `json:"noDiff,omitempty"`
}

// A TableChange has the changes of a restore, or of a dry run, to the protected rules of one
// table.
type TableChange struct {
	Family  rules.Family    `json:"family"`
	Table   rules.TableName `json:"table"`
	Native  bool            `json:"native,omitempty"`
	Adds    Counts          `json:"adds"`
	Removes Counts          `json:"removes"`
	// Reorders counts the chains whose rules get another order.
	Reorders int `json:"reorders,omitempty"`
	// Removal identifies the removed content, for RestoreRequest.Agreed.
	Removal string `json:"removal,omitempty"`
	// Lines are the rules of a dry run, each after - or +, in the words of iptables-save, or of
	// nft for a native table.
	Lines []string `json:"lines,omitempty"`
	More  int      `json:"more,omitempty"` // lines that were left out
	// NotInBaseline counts the added rules that the confirmed baseline lacks. They are the first
	// NewLines of Lines, with the declarations of a native table that it lacks.
	NotInBaseline int `json:"notInBaseline,omitempty"`
	NewLines      int `json:"newLines,omitempty"`
}

// Name names the table: "ipv4 nat", or of a native table "ip kube-proxy".
func (c TableChange) Name() string { return nameOf(c.Family.Table(c.Table), c.Native) }

// nameOf names a table with its family, as iptables' tables and native ones are named for
// people.
func nameOf(id rules.TableID, native bool) string {
	if native {
		return TableCell(id.NFT())
	}
	return id.String()
}

// Counts counts rules, jumps included, complete chains, and elements of native tables.
type Counts struct {
	Rules    int `json:"rules"`
	Chains   int `json:"chains"`
	Elements int `json:"elements,omitempty"`
}

// Agreement returns the agreement to exactly the removals of a preview. The next request
// carries it, and the daemon refuses other removals.
func (r RestoreReply) Agreement() reload.Agreement {
	a := reload.Agreement{}
	for _, c := range r.Changes {
		if c.Removal != "" {
			a[c.Family.Table(c.Table)] = c.Removal
		}
	}
	return a
}

// Removes counts the removals of a restore in all tables; the refusal of a restore shows them.
func (r RestoreReply) Removes() Counts {
	var all Counts
	for _, c := range r.Changes {
		all.Rules += c.Removes.Rules
		all.Chains += c.Removes.Chains
		all.Elements += c.Removes.Elements
	}
	return all
}
