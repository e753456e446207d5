package api

import (
	"errors"
	"time"

	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A BaselineRequest asks for the baseline, or changes it.
type BaselineRequest struct {
	// Confirm makes a generation the baseline: the one with the ID, which must be in force or
	// stored; without an ID the one that ought to be in force.
	Confirm    bool   `json:"confirm,omitempty"`
	Generation string `json:"generation,omitempty"`
	// Forget removes the baseline.
	Forget bool `json:"forget,omitempty"`
}

// A BaselineReply is everything that is known of the baseline. It quotes rules.
type BaselineReply struct {
	// Baseline is nil if there is none.
	Baseline *Baseline `json:"baseline,omitempty"`
	// Present is the generation that ought to be in force, with which the baseline was compared.
	Present Generation `json:"present"`
	// Changes are the chains that differ: built-in chains first, then those that the baseline has.
	// More is how many are not listed.
	Changes []BaselineChange `json:"changes,omitempty"`
	More    int              `json:"more,omitempty"`
	// Replaced is the baseline that was replaced or removed.
	Replaced *BaselineName `json:"replaced,omitempty"`
}

// A BaselineChange says how one chain differs from the baseline.
type BaselineChange struct {
	Family   rules.Family    `json:"family"`
	Table    rules.TableName `json:"table"`
	Chain    string          `json:"chain"`
	Known    bool            `json:"known"` // the baseline has the chain
	Appeared int             `json:"appeared"`
	Gone     int             `json:"gone"`
	// Reordered means that rules of the baseline stand in another order.
	Reordered bool `json:"reordered,omitempty"`
	// Rules are the rules that appeared, in the words of iptables-save.
	Rules []string `json:"rules,omitempty"`
	More  int      `json:"more,omitempty"` // rules that are not listed
}

// ErrNoGeneration: there is no generation with that ID, or none at all.
var ErrNoGeneration = errors.New("no such generation")

// A RestoreRequest asks for a replay.
type RestoreRequest struct {
	// Generation is the ID of the generation to replay; empty means the one that ought to be in
	// force.
	Generation string `json:"generation,omitempty"`
	// DryRun means to return what would change, and to write nothing.
	DryRun bool `json:"dryRun,omitempty"`
	// Agreed are the removals that the operator agreed to: for each table the Removal that a dry
	// run returned. A restore that would remove anything else writes nothing.
	Agreed reload.Agreement `json:"agreed,omitempty"`
}

// A RestoreReply says what became of a replay.
type RestoreReply struct {
	Generation string                   `json:"generation"`
	Outcomes   map[rules.Family]Outcome `json:"outcomes"`         // empty if nothing was tried
	Detail     string                   `json:"detail,omitempty"` // for people
	// Changes are what the restore did to each table. After a dry run or a refusal they are what it
	// would do.
	Changes []TableChange `json:"changes,omitempty"`
	// Refused is why nothing, or not everything, was written: it would remove rules that the
	// operator did not agree to.
	Refused string `json:"refused,omitempty"`
	// Baseline is what Changes are compared with; nil if there is none.
	Baseline *BaselineName `json:"baseline,omitempty"`
	// Undo is the generation that was in force before, if it is stored.
	Undo string `json:"undo,omitempty"`
	// Native are the native tables that were put back, or after a dry run would be.
	Native []NativeRestored `json:"native,omitempty"`
}

// Proved reports whether every family and native table is proved to be in force.
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

// A CleanupRequest asks canaryd to remove its own marks and, with Rules, the protected chains and
// jumps as well.
type CleanupRequest struct {
	Rules bool `json:"rules,omitempty"`
	// Protect limits Rules to what it names, in the words of --protect; empty means everything that
	// the daemon protects.
	Protect string `json:"protect,omitempty"`
}

// MostWhy is how many characters the reason of a pause may have.
const MostWhy = 200

// The bounds of a pause.
const (
	LeastPause = time.Second
	MostPause  = 24 * time.Hour
)

// A PauseRequest asks canaryd to pause replays.
type PauseRequest struct {
	Seconds float64 `json:"seconds"`
	By      string  `json:"by,omitempty"`  // who asks, for people
	Why     string  `json:"why,omitempty"` // and why, at most MostWhy characters
}

// A PauseReply says whether replays were paused before, and until when they are now.
type PauseReply struct {
	WasPaused bool      `json:"wasPaused"`
	Until     time.Time `json:"until,omitzero"` // when the pause ends; zero: there is none
}

// A RenderRequest asks for a generation's text.
type RenderRequest struct {
	Generation string       // its ID; empty: the one that ought to be in force
	Family     rules.Family // 0: every enabled family
}

// A DismissReply says which loss was accepted.
type DismissReply struct {
	// Flush and Generation are empty if no loss waited for a decision.
	Flush      string `json:"flush,omitempty"`
	Generation string `json:"generation,omitempty"`
	Rules      int    `json:"rules,omitempty"` // how many were lost
	// Native are the native tables whose losses were accepted.
	Native []string `json:"native,omitempty"`
	// Unread is how many stored files could not be read: what stands is accepted.
	Unread int `json:"unread,omitempty"`
	// Policies names the built-in chains whose policy of DROP was accepted.
	Policies []string `json:"policies,omitempty"`
	// Quarantined is how many rules in quarantine were accepted as lost.
	Quarantined int `json:"quarantined,omitempty"`
	// Waiting is how many rules waited for those. They are put back as soon as canaryd may write.
	Waiting int `json:"waiting,omitempty"`
}

// A TableDiff is what a flush changed in the protected rules of one table, in the words of
// iptables-save, or of nft for a native table. It quotes rules.
type TableDiff struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Native bool            `json:"native,omitempty"`
	// Lines begin with - for a lost rule, and with + for a rule that stood in its place.
	Lines []string `json:"lines"`
	More  int      `json:"more,omitempty"` // lines that were left out
}

// Name names the table: "ipv4 nat", or of a native table "ip kube-proxy".
func (d TableDiff) Name() string { return nameOf(d.Family.Table(d.Table), d.Native) }

// ErrNoFlush: no flush with that number or ID is known.
var ErrNoFlush = errors.New("no such flush")

// A FlushRequest asks for one flush.
type FlushRequest struct {
	// Name is its ID, or its number in the status: 1 is the newest.
	Name string
}

// A FlushReply is everything that is known of one flush. It quotes rules and command lines.
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
	Native  bool            `json:"native,omitempty"`
	Adds    Counts          `json:"adds"`
	Removes Counts          `json:"removes"`
	// Reorders counts chains that get the same rules in another order.
	Reorders int `json:"reorders,omitempty"`
	// Removal identifies what is removed, for RestoreRequest.Agreed.
	Removal string `json:"removal,omitempty"`
	// Lines are the rules of a dry run in the words of iptables-save, or of nft for a native table,
	// each behind - or +.
	Lines []string `json:"lines,omitempty"`
	More  int      `json:"more,omitempty"` // lines that were left out
	// NotInBaseline counts the added rules that the confirmed baseline lacks. They are the first
	// NewLines of Lines.
	NotInBaseline int `json:"notInBaseline,omitempty"`
	NewLines      int `json:"newLines,omitempty"`
}

// Name names the table: "ipv4 nat", or of a native table "ip kube-proxy".
func (c TableChange) Name() string { return nameOf(c.Family.Table(c.Table), c.Native) }

// nameOf names a table with its family, as iptables' tables and native ones are named.
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

// Agreement returns what agrees to exactly the removals of a preview.
func (r RestoreReply) Agreement() reload.Agreement {
	a := reload.Agreement{}
	for _, c := range r.Changes {
		if c.Removal != "" {
			a[c.Family.Table(c.Table)] = c.Removal
		}
	}
	return a
}

// Removes counts what a restore removes in all tables.
func (r RestoreReply) Removes() Counts {
	var all Counts
	for _, c := range r.Changes {
		all.Rules += c.Removes.Rules
		all.Chains += c.Removes.Chains
		all.Elements += c.Removes.Elements
	}
	return all
}
