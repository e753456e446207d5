package daemon

import (
	"cmp"
	"encoding/json"
	"errors"
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

// Modes returns every Mode.
func Modes() []Mode { return []Mode{Heal, Observe} }

// A Status is all that canaryd knows, at one moment. The loop makes a new one
// and never changes one that it has handed out; neither may whoever reads it.
//
// Its JSON is part of the contract: status -o json and /api/v1/status.
type Status struct {
	// Healthy: the last look at every table of every enabled family showed
	// it intact or changed by its owner, and something is protected.
	Healthy bool `json:"healthy"`
	// NothingProtected: there is no rule to guard. The node is ready, as a new one is,
	// and not healthy.
	NothingProtected *Nothing `json:"nothingProtected,omitempty"`
	Mode             Mode     `json:"mode"`
	Paused           bool     `json:"paused"`
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
	// Stored are the generations on disk that restore may be asked for: newest first, then
	// those that hold next to nothing, then those that must not be restored here.
	Stored []StoredGeneration `json:"stored,omitempty"`
	// LastExamination is when it was last known of every enabled family what its
	// tables hold. On nft that is each look; on legacy, where only reading a table
	// shows what it holds, at least one in 30 s. It falls behind while a table
	// cannot be read.
	LastExamination time.Time `json:"lastExamination,omitzero"`
	// LossSince is when the loss that stands now was first seen.
	LossSince time.Time `json:"lossSince,omitzero"`
	// Decision is a loss that is not replayed unasked, and that lasts until an operator
	// decides about it or the rules are back.
	Decision *Decision `json:"decision,omitempty"`
	// CapturePendingSince is when an owner first changed what the generation
	// does not hold yet.
	CapturePendingSince time.Time `json:"capturePendingSince,omitzero"`
	// Quarantined are rules that could not be put back; the first hundred.
	Quarantined []Quarantined `json:"quarantined,omitempty"`
	// DeclaredRefused are declared rules that are refused; the first hundred.
	DeclaredRefused []Refused `json:"declaredRefused,omitempty"`
	// SourceErrors are what is wrong with the files of declared sources.
	SourceErrors []SourceError `json:"sourceErrors,omitempty"`
	// RulesWithoutOwner says that kube-proxy's rules are in force and kube-proxy does not
	// keep them; nil while it does, or they are not there. It is no part of Healthy.
	RulesWithoutOwner *OwnerlessRules `json:"rulesWithoutOwner,omitempty"`
	// WithoutText are rules that stand and cannot be put back if they are lost, because no text of
	// theirs may be written; the first hundred.
	WithoutText []Quarantined `json:"withoutText,omitempty"`
	// LeftOut are chains that stand and are not guarded, because there are more rules than canaryd
	// keeps; the first hundred. It is no part of Healthy: once they are lost, they are Quarantined.
	LeftOut []LeftOut `json:"leftOut,omitempty"`
	// Keeper is what keeps established connections through a flush, of the enabled
	// families. It is no part of Healthy.
	Keeper map[rules.Family]FamilyKeeper `json:"keeper"`
	// JournalError is why flush records are not on disk; empty if they are.
	JournalError string `json:"journalError,omitempty"`
	// ListenError is why metrics, health and page are not served over HTTP; empty if
	// they are, or are turned off. It is part of Healthy only if that was asked for.
	ListenError string `json:"listenError,omitempty"`
	// ListenRequired: a node whose HTTP address cannot be had is not healthy.
	ListenRequired bool `json:"listenRequired,omitempty"`
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
	// Captured is when it was learned, Source from what, and Made by what: start (what stood
	// when canaryd began), owners, declared, or restored. Both are empty if unknown.
	Captured time.Time   `json:"captured,omitzero"`
	Source   string      `json:"source,omitempty"`
	Made     reload.Made `json:"made,omitempty"`
	// Rules, jumps included, and Chains are missing of a file that an older canaryd wrote.
	Rules  *int `json:"rules,omitempty"`
	Chains *int `json:"chains,omitempty"`
	// NearlyEmpty: it holds less than a tenth of the rules of the fullest one, as after a
	// flush that was taken for its owners' decision.
	NearlyEmpty bool `json:"nearlyEmpty,omitempty"`
	// Foreign is why it must not be restored here, such as another boot.
	Foreign string `json:"foreign,omitempty"`
}

// A Flush is the record of one flush, however many tables it hit.
type Flush struct {
	ID   string    `json:"id"`
	Time time.Time `json:"time"` // of the first evidence
	// Kind is the gravest verdict among the tables that were hit.
	Kind     canary.Verdict    `json:"kind"`
	Families []rules.Family    `json:"families"`
	Tables   []rules.TableName `json:"tables"`
	// Culprit is the process that took from most tables; its PID is 0 if none is known.
	Culprit Culprit `json:"culprit"`
	// Culprits are all that took something, oldest first; on legacy, where the kernel
	// does not say what a process did, the last that held the lock.
	Culprits []Culprit `json:"culprits,omitempty"`
	// Writers are all that wrote between the last intact look and the read that
	// showed the losses, oldest first, the culprits among them.
	Writers []Culprit `json:"writers,omitempty"`
	Lost    Lost      `json:"lost"`
	// Pods are those whose host ports went, as far as libcni's files name them; MorePods
	// is how many are not listed.
	Pods     []LostPod `json:"pods,omitempty"`
	MorePods int       `json:"morePods,omitempty"`
	// NoticedSeconds is from the first evidence to the verdict,
	// AbsentSeconds from there to the proof that all is back; 0 while it lasts: then the
	// rules have been missing since Time.
	NoticedSeconds float64 `json:"noticedSeconds"`
	AbsentSeconds  float64 `json:"absentSeconds"`
	// AbsentAtMost: AbsentSeconds is no more than a bound. The flush came while no
	// canaryd ran, and the time is counted from LastInForce, when the rules were last
	// known to be in force.
	AbsentAtMost bool      `json:"absentAtMost,omitempty"`
	LastInForce  time.Time `json:"lastInForce,omitzero"`
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
	// Ancestors are what the kernel calls its parent, and that one's, three at most.
	Ancestors []string `json:"ancestors,omitempty"`
	// Unit is systemd's unit that it ran in; of a container the one around it, if any.
	Unit string `json:"unit,omitempty"`
	// ContainerID, ContainerName and PodUID are what its cgroup's path has of the
	// container that it ran in.
	ContainerID   string `json:"containerID,omitempty"`
	ContainerName string `json:"containerName,omitempty"`
	PodUID        string `json:"podUID,omitempty"`
}

// CulpritOf returns a writer as flush records have it.
func CulpritOf(w canary.Writer) Culprit {
	o := w.Origin
	return Culprit{Time: w.Time, PID: w.PID, Comm: w.Comm, Command: w.Command, Ancestors: o.Ancestors, Unit: o.Unit,
		ContainerID: o.Container.ID, ContainerName: o.Container.Name, PodUID: o.Container.Pod}
}

// Place names the unit or the container that the process ran in; "" if it is not known.
func (c Culprit) Place() string {
	return canary.Origin{Unit: c.Unit, Container: canary.Container{ID: c.ContainerID, Pod: c.PodUID, Name: c.ContainerName}}.String()
}

// line says by what the process was started, behind its name: " <- bash <- cron, cron.service".
func (c Culprit) line() string {
	text := ""
	for _, name := range c.Ancestors {
		text += " <- " + name
	}
	if place := c.Place(); place != "" {
		text += ", " + place
	}
	return text
}

// Text names the process and what started it: "nft (pid 3) <- bash <- cron, cron.service".
func (c Culprit) Text() string {
	text := fmt.Sprintf("pid %d", c.PID)
	if c.Comm != "" {
		text = fmt.Sprintf("%s (pid %d)", c.Comm, c.PID)
	}
	return text + c.line()
}

// Lost counts what a flush took away.
type Lost struct {
	Chains int `json:"chains"`
	Rules  int `json:"rules"`
	Hooks  int `json:"hooks"`
	// Unprotected are rules that --protect does not name and that went in the same
	// flush, not counted in Rules; 0 also where that cannot be known.
	Unprotected int `json:"unprotectedRules,omitempty"`
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
	// Unprotected are rules that --protect does not name; see Lost.
	Unprotected int `json:"unprotectedRules,omitempty"`
	// By are the process numbers of those among Culprits that took something from this
	// table; empty if that is not known.
	By []uint32 `json:"by,omitempty"`
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

// An Outcome is what became of a replay or a flush. Skipped also means that the owner
// put back what canaryd only observed.
type Outcome = reload.Outcome

// Pending is the outcome of a flush that is not answered yet; it is in no
// metric.
const Pending Outcome = "pending"

// AwaitingDecision is the outcome of a flush whose rules are not replayed unasked,
// until they are back or an operator has decided; it is in no metric.
const AwaitingDecision Outcome = "waiting: decision"

// Dismissed is the outcome of such a flush once an operator has accepted the loss.
const Dismissed Outcome = "dismissed"

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
	s.DeclaredRefused = slices.Clone(s.DeclaredRefused)
	for i := range s.DeclaredRefused {
		s.DeclaredRefused[i].Rule, s.DeclaredRefused[i].Reason = "", ""
	}
	s.SourceErrors = slices.Clone(s.SourceErrors)
	for i := range s.SourceErrors {
		s.SourceErrors[i].Reason = ""
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
		f.Culprits, f.Writers = withoutCommands(f.Culprits), withoutCommands(f.Writers)
	}
	return s
}

func withoutCommands(list []Culprit) []Culprit {
	list = slices.Clone(list)
	for i := range list {
		list[i].Command = ""
	}
	return list
}

// Ready returns nil if the rules that ought to be in force are, and canaryd
// would put them back: every guarded table of every enabled family is intact
// or changed by its owner, and canaryd is not paused. Otherwise the error
// names all tables that lost something and the pause, else the first table of
// which nothing is known, or the reason, in one line.
func (s Status) Ready() error {
	if s.Decision != nil && !s.Stopped {
		return s.Decision.problem()
	}
	if s.Stopped {
		return errors.New("stopped by a cleanup")
	}
	lost, paused := s.lostText(), s.pauseText()
	switch {
	case lost != "" && paused != "":
		return errors.New(lost + "; " + paused)
	case lost != "" || paused != "":
		return errors.New(lost + paused)
	}
	if len(s.Families) == 0 {
		return fmt.Errorf("no family has been looked at yet")
	}
	var unknown, refused error
	if s.ListenRequired && s.ListenError != "" {
		unknown = fmt.Errorf("HTTP is not served: %s", s.ListenError)
	}
	for _, family := range rules.Families() {
		verdicts, enabled := s.Families[family]
		if !enabled {
			continue
		}
		for _, table := range rules.Guarded() {
			switch v := verdicts[table]; {
			case v == canary.Refused:
				refused = cmp.Or(refused, s.refusalOf(family, table))
			case v != canary.Intact && v != canary.Changed && unknown == nil:
				unknown = fmt.Errorf("%s %s is %s", family, table, canary.Unknown)
			}
		}
	}
	return cmp.Or(unknown, refused, s.brokenSource())
}

// refusalOf says in one line which declared rule keeps a table as it is. It quotes no
// rule.
func (s Status) refusalOf(f rules.Family, t rules.TableName) error {
	for _, r := range s.DeclaredRefused {
		if r.Family == f && r.Table == t {
			return fmt.Errorf("%s %s is not as declared: %s is refused: %s", f, t, r.place(), r.Meaning)
		}
	}
	return fmt.Errorf("%s %s is not as declared: a rule is refused", f, t)
}
