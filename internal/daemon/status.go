package daemon

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Mode says what follows a loss.
type Mode string

// The modes.
const (
	Heal    Mode = "heal"    // replay
	Observe Mode = "observe" // count and tell, write nothing but marks
)

// A Status is all that canaryd knows, at one moment. The loop makes a new one
// and never changes one that it has handed out; neither may whoever reads it.
//
// Its JSON is part of the contract: status -o json and /api/v1/status.
type Status struct {
	// Healthy: the last look at every table of every enabled family showed
	// it intact or changed by its owner.
	Healthy bool `json:"healthy"`
	Mode    Mode `json:"mode"`
	Paused  bool `json:"paused"`
	// PausedUntil is when a pause runs out.
	PausedUntil time.Time `json:"pausedUntil,omitzero"`
	// Contended: somebody keeps undoing what is replayed, and replays are
	// limited; or somebody else keeps writing what is declared.
	Contended bool    `json:"contended"`
	Backend   Backend `json:"backend"`
	// Families holds the enabled families only.
	Families map[rules.Family]Verdicts `json:"families"`
	// DisabledFamilies says why a family is not watched.
	DisabledFamilies map[rules.Family]string `json:"disabledFamilies,omitempty"`
	CanaryChain      string                  `json:"canaryChain"`
	// Stopped: a cleanup removed the marks, and nothing is done any more.
	Stopped    bool       `json:"stopped,omitempty"`
	Generation Generation `json:"generation"`
	// Stored are the generations on disk, newest first: what restore may be
	// asked for.
	Stored []StoredGeneration `json:"stored,omitempty"`
	// LastExamination is when it was last known of every enabled family what its
	// tables hold. On nft that is each look; on legacy, where only reading a table
	// shows what it holds, at least one in 30 s. It falls behind while a table
	// cannot be read.
	LastExamination time.Time `json:"lastExamination,omitzero"`
	// LossSince is when the loss that stands now was first seen.
	LossSince time.Time `json:"lossSince,omitzero"`
	// CapturePendingSince is when an owner first changed what the generation
	// does not hold yet.
	CapturePendingSince time.Time `json:"capturePendingSince,omitzero"`
	// Quarantined are rules that could not be put back; the first hundred.
	Quarantined []Quarantined `json:"quarantined,omitempty"`
	// WithoutText are rules that stand and cannot be put back if they are lost, because no text of
	// theirs may be written; the first hundred.
	WithoutText []Quarantined `json:"withoutText,omitempty"`
	// Keeper is what keeps established connections through a flush, of the enabled
	// families. It is no part of Healthy.
	Keeper map[rules.Family]FamilyKeeper `json:"keeper"`
	// JournalError is why flush records are not on disk; empty if they are.
	JournalError string `json:"journalError,omitempty"`
	// Flushes are the last flush records, newest first.
	Flushes []Flush `json:"flushes"`
}

// Verdicts is a family's verdict for each guarded table.
type Verdicts map[rules.TableName]canary.Verdict

// A Backend is the choice of backend, in a Status.
type Backend struct {
	Name    iptables.Backend `json:"name"` // the guarded one
	Version string           `json:"version"`
	Reason  string           `json:"reason"` // by the newest evidence
	Mixed   bool             `json:"mixed"`  // both hold rules
	// Mismatch: the evidence is for the other one, and Reason says why.
	Mismatch bool `json:"mismatch"`
}

// A Generation is a generation without its rules, in a Status. ID is empty
// while there is none.
type Generation struct {
	ID       string    `json:"id"`
	Source   string    `json:"source"`
	Captured time.Time `json:"captured,omitzero"`
	Rules    int       `json:"rules"`  // in all families and tables, hooks included
	Chains   int       `json:"chains"` // protected chains in all families and tables
}

// A StoredGeneration is one that is on disk, in a Status.
type StoredGeneration struct {
	ID    string    `json:"id"`
	Saved time.Time `json:"saved"`
}

// A Flush is the record of one flush, however many tables it hit.
type Flush struct {
	ID   string    `json:"id"`
	Time time.Time `json:"time"` // of the first evidence
	// Kind is the gravest verdict among the tables that were hit.
	Kind     canary.Verdict    `json:"kind"`
	Families []rules.Family    `json:"families"`
	Tables   []rules.TableName `json:"tables"`
	// Culprit is the most likely writer; its PID is 0 if nobody is known.
	Culprit Culprit `json:"culprit"`
	// Writers are all who wrote between the last intact look and the first
	// loss, oldest first, the culprit among them.
	Writers []Culprit `json:"writers,omitempty"`
	Lost    Lost      `json:"lost"`
	// NoticedSeconds is from the first evidence to the verdict,
	// AbsentSeconds from there to the proof that all is back; 0 while it lasts.
	NoticedSeconds float64 `json:"noticedSeconds"`
	AbsentSeconds  float64 `json:"absentSeconds"`
	// WrittenSeconds is from the first evidence to the end of the last write: from
	// then on the rules were in force, and the rest of AbsentSeconds is the proof.
	// KernelSeconds is what of it the kernel took for canaryd's own transactions.
	WrittenSeconds float64 `json:"writtenSeconds,omitempty"`
	KernelSeconds  float64 `json:"kernelSeconds,omitempty"`
	Outcome        Outcome `json:"outcome"`
	// Attempts is how often a replay was tried.
	Attempts int `json:"attempts"`
	// Policies are built-in chains' policies that differ from before.
	Policies []string `json:"policies,omitempty"`
	// Detail explains the outcome to people. It may quote rules.
	Detail string `json:"detail,omitempty"`
	// Earlier: an earlier run of canaryd saw it, perhaps of another boot; it is in
	// no metric.
	Earlier bool `json:"earlier,omitempty"`
}

// A Culprit is a process that wrote to the tables.
type Culprit struct {
	Time    time.Time `json:"time,omitzero"`
	PID     uint32    `json:"pid"` // in the initial pid namespace
	Comm    string    `json:"comm"`
	Command string    `json:"command,omitempty"` // its command line, if it could be read
}

// CulpritOf returns a writer as flush records have it.
func CulpritOf(w canary.Writer) Culprit {
	return Culprit{Time: w.Time, PID: w.PID, Comm: w.Comm, Command: w.Command}
}

// Lost counts what a flush took away.
type Lost struct {
	Chains int `json:"chains"`
	Rules  int `json:"rules"`
	Hooks  int `json:"hooks"`
	// Tables are the same counts for each table that was hit, with chains by name.
	Tables []TableLoss `json:"tables,omitempty"`
}

// A TableLoss counts what a flush took from one table.
type TableLoss struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Kind   canary.Verdict  `json:"kind"`
	Chains int             `json:"chains"`
	Rules  int             `json:"rules"` // hooks included
	Hooks  int             `json:"hooks"`
	// PerChain are the chains that lost most, the worst first, built-in chains
	// that lost hooks among them. More is how many are not listed.
	PerChain []ChainLoss `json:"perChain,omitempty"`
	More     int         `json:"more,omitempty"`
}

// A ChainLoss counts what one chain lost.
type ChainLoss struct {
	Chain string `json:"chain"`
	Rules int    `json:"rules"`           // hooks included
	Hooks int    `json:"hooks,omitempty"` // of a built-in chain
}

// An Outcome is what became of a replay or a flush. Skipped also means that
// nothing was replayed because of observe mode.
type Outcome = reload.Outcome

// Pending is the outcome of a flush that is not answered yet; it is in no
// metric.
const Pending Outcome = "pending"

// Interrupted is the outcome of a flush of an earlier run, which ended before
// the flush was answered. What the next run found lost is a flush of its own.
const Interrupted Outcome = "interrupted"

// MarshalJSON writes no null where the contract has a list or an object.
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
	return json.Marshal(p)
}

// MarshalJSON writes no null where the contract has a list.
func (f Flush) MarshalJSON() ([]byte, error) {
	type plain Flush
	p := plain(f)
	if p.Families == nil {
		p.Families = []rules.Family{}
	}
	if p.Tables == nil {
		p.Tables = []rules.TableName{}
	}
	return json.Marshal(p)
}

// Public returns the status without what reading rules needs root for
// elsewhere too: command lines, and details that may quote rules. Only this
// may leave through TCP. s stays as it is.
func (s Status) Public() Status {
	s.Quarantined = slices.Clone(s.Quarantined)
	for i := range s.Quarantined {
		s.Quarantined[i].Rule, s.Quarantined[i].Reason = "", ""
	}
	s.WithoutText = slices.Clone(s.WithoutText)
	for i := range s.WithoutText {
		s.WithoutText[i].Rule, s.WithoutText[i].Reason = "", ""
	}
	s.Flushes = slices.Clone(s.Flushes)
	for i := range s.Flushes {
		f := &s.Flushes[i]
		f.Detail = ""
		f.Culprit.Command = ""
		f.Writers = slices.Clone(f.Writers)
		for j := range f.Writers {
			f.Writers[j].Command = ""
		}
	}
	return s
}

// Ready returns nil if the rules that ought to be in force are, and canaryd
// would put them back: every guarded table of every enabled family is intact
// or changed by its owner, and canaryd is not paused. Otherwise the error
// names the first table that lost something, else the first of which nothing is
// known, or the reason, in one line.
func (s Status) Ready() error {
	if s.Paused {
		return fmt.Errorf("paused")
	}
	if s.Stopped {
		return fmt.Errorf("stopped by a cleanup")
	}
	if len(s.Families) == 0 {
		return fmt.Errorf("no family has been looked at yet")
	}
	var unknown error
	for _, family := range rules.Families() {
		verdicts, enabled := s.Families[family]
		if !enabled {
			continue
		}
		for _, table := range rules.Guarded() {
			switch v := verdicts[table]; {
			case v.Loss():
				return fmt.Errorf("%s %s is %s", family, table, v)
			case v != canary.Intact && v != canary.Changed && unknown == nil:
				unknown = fmt.Errorf("%s %s is %s", family, table, canary.Unknown)
			}
		}
	}
	return unknown
}
