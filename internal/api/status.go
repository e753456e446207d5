// Package api holds the types that canaryd exchanges with its clients: [Status], flush records
// ([Flush]), and the requests and replies of the control socket. Their JSON is the contract of the
// control socket, of /api/v1/status and of -o json.
//
// A client reads a Status first. It lists the last flush records; a [FlushRequest] fetches one with
// its lost rules and command lines. The names of the other requests say their command, such as
// [PauseRequest] and [RestoreRequest].
//
// Errors that both sides of the socket distinguish are [ErrNoGeneration], [ErrNoFlush],
// [ErrAlreadyRunning] and [ErrTooManyWatchers]. All types are values.
package api

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Mode is canaryd's reaction to a loss.
type Mode string

// The modes.
const (
	Heal    Mode = "heal"    // replay
	Observe Mode = "observe" // report only; write nothing but marks
)

// Modes returns every Mode.
func Modes() []Mode { return []Mode{Heal, Observe} }

// A Status is everything that canaryd knows at one moment. The loop makes a new one each time;
// nothing may change a Status after that.
//
// Its JSON is part of the contract: status -o json and /api/v1/status.
type Status struct {
	// Healthy means that something is protected, and that the last look found every table of every
	// enabled family intact or changed by its owner. Health decides it.
	Healthy bool `json:"healthy"`
	// Headline is the first line of canaryd status: "healthy", "healthy, but ..." or "NOT healthy:
	// ...".
	Headline string `json:"headline,omitempty"`
	// NothingProtected is set if there is no rule to guard. Such a node is ready, like a new
	// node, and not healthy.
	NothingProtected *Nothing `json:"nothingProtected,omitempty"`
	Mode             Mode     `json:"mode"`
	// Protect is the value of --protect, and Owners are the owners whose rules are guarded.
	Protect string         `json:"protect,omitempty"`
	Owners  []GuardedOwner `json:"owners,omitempty"`
	// IdleWords are the globs, rule: and nft: words of --protect that name nothing guarded on this
	// node, such as mistyped ones. They do not affect Healthy.
	IdleWords []string `json:"idleWords,omitempty"`
	// Unguarded counts the chains, rules and tables that --protect does not name; nil if there are
	// none.
	Unguarded *Unguarded `json:"unguarded,omitempty"`
	Paused    bool       `json:"paused"`
	// PausedUntil is when a pause ends.
	PausedUntil time.Time `json:"pausedUntil,omitzero"`
	// PausedBy and PausedWhy are the client's words for its name and reason; PausedSince is the
	// time.
	PausedBy    string    `json:"pausedBy,omitempty"`
	PausedWhy   string    `json:"pausedWhy,omitempty"`
	PausedSince time.Time `json:"pausedSince,omitzero"`
	// Contended means that replays are limited because a process keeps undoing them; or that
	// another process keeps writing declared chains.
	Contended bool    `json:"contended"`
	Backend   Backend `json:"backend"`
	// Families has the enabled families only.
	Families map[rules.Family]Verdicts `json:"families"`
	// Unreadable has the kernel's reason why a family's tables cannot be read now. If a family
	// with unknown verdicts is not in it, the log has the reason.
	Unreadable map[rules.Family]string `json:"unreadable,omitempty"`
	// DisabledFamilies has the reason why a family is not watched.
	DisabledFamilies map[rules.Family]string `json:"disabledFamilies,omitempty"`
	CanaryChain      string                  `json:"canaryChain"`
	// Stopped means that a cleanup removed the marks, and that canaryd does nothing any more.
	Stopped    bool       `json:"stopped,omitempty"`
	Generation Generation `json:"generation"`
	// Stored are the generations on disk, newest first. Nearly empty generations follow, and
	// then generations that must not be restored here.
	Stored []StoredGeneration `json:"stored,omitempty"`
	// LastKnown is when canaryd last knew the tables' content of every enabled family. On nft
	// each look shows it. On legacy only a full read does, at least every 30 s. It falls behind
	// while a table cannot be read.
	LastKnown time.Time `json:"lastKnown,omitzero"`
	// LossSince is when the present loss was first seen.
	LossSince time.Time `json:"lossSince,omitzero"`
	// Failing are the failed replays of present losses that canaryd tries again, at most one
	// for iptables' tables and one for native tables.
	Failing []Failing `json:"failing,omitempty"`
	// Decision is a loss that canaryd may not replay unasked. It lasts until an operator decides or
	// the rules are back.
	Decision *Decision `json:"decision,omitempty"`
	// OwnerUntil is the time until which canaryd leaves individually deleted rules to their
	// owner; zero if none are missing, or more was lost.
	OwnerUntil time.Time `json:"ownerUntil,omitzero"`
	// StateUnread are stored files that cannot be read, so that canaryd does not know all rules
	// that were in force. They last until an operator decides, or until all those rules are
	// there.
	StateUnread []UnreadState `json:"stateUnread,omitempty"`
	// LearningPendingSince is when an owner first changed something that the generation does not
	// have yet.
	LearningPendingSince time.Time `json:"learningPendingSince,omitzero"`
	// Quarantined are the quarantined rules and parts of native tables, the first hundred, and
	// QuarantinedMore counts the others. They were lost, so a node with one is not healthy.
	Quarantined     []Quarantined `json:"quarantined,omitempty"`
	QuarantinedMore int           `json:"quarantinedMore,omitempty"`
	// WaitingChains counts the quarantined rules that wait for a rule before them, for the first
	// hundred chains. It counts all of them, also rules that Quarantined does not list.
	WaitingChains []WaitingChain `json:"waitingChains,omitempty"`
	// DeclaredRefused are the declared rules that are refused; the first hundred.
	DeclaredRefused []Refused `json:"declaredRefused,omitempty"`
	// SourceErrors are the problems with the files of declared sources.
	SourceErrors []SourceError `json:"sourceErrors,omitempty"`
	// RulesWithoutOwner is set if kube-proxy's rules are in force and kube-proxy does not maintain
	// them. It does not affect Healthy.
	RulesWithoutOwner *OwnerlessRules `json:"rulesWithoutOwner,omitempty"`
	// Opaque are opaque rules that are in force and that cannot be put back if they are lost.
	// The first hundred. They do not affect Healthy; once they are lost, they are Quarantined.
	Opaque []Quarantined `json:"opaque,omitempty"`
	// Baseline is the generation that an operator confirmed, with the number of rules that
	// appeared since; nil if there is none. It does not affect Healthy.
	Baseline *Baseline `json:"baseline,omitempty"`
	// PolicyDrops are built-in chains whose policy has become DROP. They do not affect Healthy.
	PolicyDrops []PolicyDrop `json:"policyDrops,omitempty"`
	// LeftOut are chains that exist and are not guarded, because there are more rules than
	// canaryd keeps; the first hundred. They do not affect Healthy; once they are lost, they
	// are Quarantined.
	LeftOut []LeftOut `json:"leftOut,omitempty"`
	// LedTo are chains of other owners that are guarded because protected rules lead to them; the
	// first hundred. They are part of Healthy.
	LedTo []LedTo `json:"ledTo,omitempty"`
	// LeadsOut are built-in chains with rules that a word rule: of --protect names, but that
	// are not guarded; the first hundred. They do not affect Healthy.
	LeadsOut []LeadsOut `json:"leadsOut,omitempty"`
	// Accepted are the large removals of the last hour that canaryd takes for their owner's doing,
	// the newest first; twenty at most. They do not affect Healthy.
	Accepted []Accepted `json:"accepted,omitempty"`
	// Keeper is the keeper's state for each enabled family. It does not affect Healthy.
	Keeper map[rules.Family]FamilyKeeper `json:"keeper"`
	// Standby is the standby's state for each enabled family. It does not affect Healthy.
	Standby map[rules.Family]FamilyStandby `json:"standby"`
	// StateError is why the state folder lacks rules that ought to be in force; "" if it has
	// them. StateSaved is the time of the last write, and StateBehind counts changes of the
	// generation since then. They do not affect Healthy.
	StateError  string    `json:"stateError,omitempty"`
	StateSaved  time.Time `json:"stateSaved,omitzero"`
	StateBehind int       `json:"stateBehind,omitempty"`
	// StateOlder names the older generation from which rules were put back at the start,
	// because the newest could not be kept; "" if there is none.
	StateOlder string `json:"stateOlder,omitempty"`
	// JournalError is why flush records are not on disk; "" if they are.
	JournalError string `json:"journalError,omitempty"`
	// ListenError is why metrics, health and page are not served over HTTP; "" if they are, or are
	// turned off. It affects Healthy only with ListenRequired.
	ListenError string `json:"listenError,omitempty"`
	// ListenRequired means that a node without its HTTP address is not healthy.
	ListenRequired bool `json:"listenRequired,omitempty"`
	// Native are the native nftables tables that --protect names; nil if it names none. They are
	// part of Healthy.
	Native []NativeTable `json:"native,omitempty"`
	// NativeStored are the generations of native tables on disk, those of a table together, the
	// newest first.
	NativeStored []StoredNativeGeneration `json:"nativeStored,omitempty"`
	// NativeError is why nothing is known of native tables now; empty if they are known.
	NativeError string `json:"nativeError,omitempty"`
	// NativeOverLimit counts the tables that are not guarded because there are too many.
	NativeOverLimit int `json:"nativeBeyond,omitempty"`
	// NativeLeftOut are the tables that exist and are not guarded, because all tables together are
	// too large. They do not affect Healthy; once they are lost, they are in Native.
	NativeLeftOut []NativeLeftOut `json:"nativeLeftOut,omitempty"`
	// LastDrill is the end of the last drill, also of an earlier run; nil if none is known.
	LastDrill *DrillEnd `json:"lastDrill,omitempty"`
	// Flushes are the last flush records, newest first.
	Flushes []Flush `json:"flushes"`
}

// Verdicts has a family's verdict on each guarded table.
type Verdicts map[rules.TableName]canary.Verdict

// A Backend is the choice of backend, in a Status.
type Backend struct {
	Name    iptables.Backend `json:"name"` // the guarded backend
	Version string           `json:"version"`
	Reason  string           `json:"reason"` // by the newest evidence
	Mixed   bool             `json:"mixed"`  // both backends hold rules
	// Mismatch means that the evidence favours the other backend; Reason says why.
	Mismatch bool `json:"mismatch"`
}

// A Generation is a generation in a Status, without its rules. ID is empty if there is none.
type Generation struct {
	ID       string    `json:"id"`
	Source   string    `json:"source"`
	Captured time.Time `json:"captured,omitzero"`
	Rules    int       `json:"rules"`  // in all families and tables, jumps included
	Chains   int       `json:"chains"` // protected chains in all families and tables
}

// A StoredGeneration is a generation on disk, in a Status.
type StoredGeneration struct {
	ID    string    `json:"id"`
	Saved time.Time `json:"saved"`
	// Captured is the time when it was learned, and Source its origin. Made is start (the rules
	// that existed when canaryd began), owners, declared, or restored. Source and Made are
	// empty if unknown.
	Captured time.Time   `json:"captured,omitzero"`
	Source   string      `json:"source,omitempty"`
	Made     reload.Made `json:"made,omitempty"`
	// Rules, jumps included, and Chains are missing for a file that an older canaryd wrote.
	Rules  *int `json:"rules,omitempty"`
	Chains *int `json:"chains,omitempty"`
	// NearlyEmpty means that it has less than a tenth of the largest generation's rules, as
	// after a flush that was learned as its owners' decision.
	NearlyEmpty bool `json:"nearlyEmpty,omitempty"`
	// Foreign is why it must not be restored here, such as another boot.
	Foreign string `json:"foreign,omitempty"`
}

// Dismissed is the outcome of a flush whose loss an operator has accepted.
const Dismissed Outcome = "dismissed"

// OwnersDecision is the outcome of a flush that turned out to be the doing of the rules' owner.
// The rules stay deleted.
const OwnersDecision Outcome = "owner's decision"

// Interrupted is the outcome of a flush of an earlier run that ended before a replay, or before a
// cleanup. If the next run finds the same tables lost in the same boot, the record continues
// instead; but not after a cleanup. A native table that waits for a decision, or for a replay that
// fails, may be lost in another way. Its earlier record then has this outcome, too.
const Interrupted Outcome = "interrupted"

// MarshalJSON writes an empty list or object where the contract has one, and never null.
func (s Status) MarshalJSON() ([]byte, error) {
	type plain Status
	p := plain(s)
	if p.Families == nil {
		p.Families = map[rules.Family]Verdicts{}
	}
	if p.Flushes == nil {
		p.Flushes = []Flush{}
	}
	if p.Keeper == nil {
		p.Keeper = map[rules.Family]FamilyKeeper{}
	}
	if p.Standby == nil {
		p.Standby = map[rules.Family]FamilyStandby{}
	}
	return json.Marshal(p)
}

// Public returns the status without command lines, and without details that may quote rules: to
// read those elsewhere needs root, too. Only this may leave through TCP. s stays as it is.
func (s Status) Public() Status {
	hideRule := func(q *Quarantined) { q.Rule, q.Reason = "", "" }
	s.Quarantined, s.Opaque = changed(s.Quarantined, hideRule), changed(s.Opaque, hideRule)
	s.Native = changed(s.Native, func(t *NativeTable) {
		if t.UnreplayableParts > 0 { // it quotes one of them
			t.Unreplayable = "the kernel would refuse a part of it"
		}
	})
	s.StateUnread = changed(s.StateUnread, func(u *UnreadState) { u.Reason = "" })
	s.WaitingChains = changed(s.WaitingChains, func(w *WaitingChain) { w.Reason = "" })
	s.Accepted = changed(s.Accepted, func(a *Accepted) {
		if a.Rule = ""; a.By != nil {
			by := *a.By
			by.Command, a.By = "", &by
		}
	})
	s.DeclaredRefused = changed(s.DeclaredRefused, func(r *Refused) { r.Rule, r.Reason = "", "" })
	s.SourceErrors = changed(s.SourceErrors, func(e *SourceError) { e.Reason = "" })
	s.Baseline = s.Baseline.withoutReason()
	s.Flushes = changed(s.Flushes, func(f *Flush) {
		hideCommand := func(c *Culprit) { c.Command = "" }
		f.Detail, f.NotInBaseline = "", f.NotInBaseline.withoutNames()
		hideCommand(&f.Culprit)
		f.Culprits, f.Writers = changed(f.Culprits, hideCommand), changed(f.Writers, hideCommand)
	})
	return s
}

// changed returns a copy of a list, after a change to each item: the original may be in use by
// other goroutines.
func changed[T any](list []T, change func(*T)) []T {
	list = slices.Clone(list)
	for i := range list {
		change(&list[i])
	}
	return list
}
