package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// NotInBaseline counts and names the lost rules that canaryd puts back and that the confirmed
// baseline lacked.
type NotInBaseline struct {
	BaselineName
	Rules int `json:"rules"` // jumps included
	// Chains are the first chains with such rules; More is how many are not listed.
	Chains []ChainName `json:"chains,omitempty"`
	More   int         `json:"more,omitempty"`
	// Native means that lost native tables were compared, too.
	Native bool `json:"native,omitempty"`
}

// A ChainName names a chain of a table and counts its rules in question. Without a chain it names
// a native table that the baseline lacks as a whole.
type ChainName struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Native bool            `json:"native,omitempty"`
	Chain  string          `json:"chain"`
	Rules  int             `json:"rules"`
}

// Name names the table: "ipv4 nat", or of a native table "ip kube-proxy".
func (c ChainName) Name() string { return nameOf(c.Family.Table(c.Table), c.Native) }

// withoutNames returns the copy that may leave through TCP (Status.Public): the chains are only
// counted. nil stays nil.
func (n *NotInBaseline) withoutNames() *NotInBaseline {
	if n == nil {
		return nil
	}
	return &NotInBaseline{BaselineName: n.BaselineName, Rules: n.Rules, More: n.More + len(n.Chains), Native: n.Native}
}

// Takers returns the processes that removed something. A record of an earlier version has only one.
func (f Flush) Takers() []Culprit {
	if len(f.Culprits) == 0 && f.Culprit.PID != 0 {
		return []Culprit{f.Culprit}
	}
	return f.Culprits
}

// ByText names the culprits in a few words: "nft (pid 3)", or "iptables, nft (+2)" if two more
// processes removed something. It ends with "unknown" if messages of the kernel were missed, and
// begins with "likely" on legacy.
func (f Flush) ByText() string {
	list, likely := f.Takers(), ""
	if f.CulpritsLikely {
		likely = "likely "
	}
	switch {
	case f.Drill != "":
		return "canaryd drill"
	case len(list) == 0 || list[0].PID == 0:
		return "unknown"
	case len(list) == 1 && f.CulpritsMissed:
		return list[0].nameAndPID() + ", unknown"
	case len(list) == 1:
		return likely + list[0].nameAndPID()
	}
	var names []string
	for _, c := range list {
		if name := c.name(); len(names) < CulpritsNamed && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	text := likely + strings.Join(names, ", ")
	if more := len(list) - len(names); more > 0 {
		text += fmt.Sprintf(" (+%d)", more)
	}
	if f.CulpritsMissed {
		text += ", unknown"
	}
	return text
}

// summaryTables is how many tables a Summary names.
const summaryTables = 10

// Summary describes in one line the outcome, the tables and the culprits: "proved: ipv4 nat
// emptied, ip kube-proxy table_deleted; by nft (pid 3)". It has no rule and no command line,
// because all users of a cluster may read it as an event.
func (f Flush) Summary() string {
	var hit []string
	for _, t := range f.TablesHit() {
		hit = append(hit, fmt.Sprintf("%s %s %s", t.Family, t.Table, t.Kind))
	}
	for _, l := range f.Native {
		hit = append(hit, fmt.Sprintf("%s %s", l.Table, l.Kind))
	}
	more := ""
	if left := len(hit) - summaryTables; left > 0 {
		hit, more = hit[:summaryTables], fmt.Sprintf(" and %d more", left)
	}
	return fmt.Sprintf("%s: %s%s; by %s", f.OutcomeText(), strings.Join(hit, ", "), more, f.ByText())
}

// TakersOf names the processes that removed something from one table; "" if they are unknown.
// The page and canaryd status --flush print it with the table.
func (f Flush) TakersOf(t TableLoss) string {
	var names []string
	for _, c := range f.Culprits {
		if slices.Contains(t.By, c.PID) && !slices.Contains(names, c.name()) {
			names = append(names, c.name())
		}
	}
	return strings.Join(names, ", ")
}

// name returns the kernel's name of the process. It is the pid if the process ended before canaryd
// read its name.
func (c Culprit) name() string { return cmp.Or(c.Comm, fmt.Sprintf("pid %d", c.PID)) }

// nameAndPID returns "nft (pid 3)", or the pid alone.
func (c Culprit) nameAndPID() string {
	if c.Comm == "" {
		return c.name()
	}
	return fmt.Sprintf("%s (pid %d)", c.Comm, c.PID)
}

// PIDAndName returns "pid 3 (nft)", or the pid alone. LockedBy of a record names the holder of
// the xtables lock so.
func (c Culprit) PIDAndName() string {
	if c.Comm == "" {
		return c.name()
	}
	return fmt.Sprintf("pid %d (%s)", c.PID, c.Comm)
}

// A LostPod is a pod whose host ports a flush removed. Its names are empty if Kubernetes did not
// create the container.
type LostPod struct {
	Namespace string   `json:"namespace,omitempty"`
	Name      string   `json:"name,omitempty"`
	Container string   `json:"container"`
	HostPorts []string `json:"hostPorts"`
	// Gone means that the pod was removed during the outage, so its host ports were not put back.
	Gone bool `json:"gone,omitempty"`
}

// String returns the pod's namespace and name, or its container, with its host ports. Gone adds
// that a replay left its rules out.
func (p LostPod) String() string {
	name := p.Container
	if p.Name != "" {
		name = strings.TrimPrefix(p.Namespace+"/"+p.Name, "/")
	}
	name += " (" + strings.Join(p.HostPorts, ", ") + ")"
	if p.Gone {
		name += ", which is gone"
	}
	return name
}

const (
	// Removed is the kind of a record of rules that canaryd itself removed, because an operator
	// requested an earlier generation. It is no verdict.
	Removed canary.Verdict = "removed"
	// Requested is the outcome of such a record: there is nothing to put back.
	Requested Outcome = "requested"
)

const (
	// RemovedByOwner is the kind of a record of a large removal that counts as its owner's
	// doing. No owner is known to have done it. It is no verdict.
	RemovedByOwner canary.Verdict = "removed by its owner?"
	// TakenForOwners is the outcome of such a record: nothing is put back.
	TakenForOwners Outcome = "accepted"
)

// Requested reports whether the record is of a removal that an operator requested, or that
// canaryd takes for the owner's doing: no rule is missed.
func (f Flush) Requested() bool { return f.Kind == Removed || f.Kind == RemovedByOwner }

// CulpritsNamed is how many of a flush's culprits ByText names.
const CulpritsNamed = 2

// A Flush is the record of one flush, of all tables that it hit.
type Flush struct {
	ID   string    `json:"id"`
	Time time.Time `json:"time"` // of the first evidence
	// Kind is the most serious verdict among the tables that were hit.
	Kind     canary.Verdict    `json:"kind"`
	Families []rules.Family    `json:"families"`
	Tables   []rules.TableName `json:"tables"`
	// Culprit is the first of Culprits; its PID is 0 if it is unknown.
	Culprit Culprit `json:"culprit"`
	// Culprits are all processes that removed something; the process that removed most is
	// first. On legacy the kernel does not report which rules a process deleted. There,
	// Culprits are the processes that held the lock and may have written, the last one first.
	Culprits []Culprit `json:"culprits,omitempty"`
	// CulpritsMissed means that messages of the kernel were missed: processes that are not among
	// Culprits may have removed something, too.
	CulpritsMissed bool `json:"culpritsMissed,omitempty"`
	// CulpritsLikely means that the kernel does not report which of Culprits removed something.
	// It also means that one did the last step of a removal, and others may have done earlier
	// steps.
	CulpritsLikely bool `json:"culpritsLikely,omitempty"`
	// Writers are all processes that wrote between the last look that found everything intact and
	// the read that showed the loss, oldest first. The culprits are among them.
	Writers []Culprit `json:"writers,omitempty"`
	Lost    Lost      `json:"lost"`
	// Native are the native tables that were hit. Lost includes their losses. Families and
	// Tables are empty if the flush removed nothing from iptables' tables.
	Native []NativeLoss `json:"native,omitempty"`
	// NotInBaseline are the lost rules that the confirmed baseline lacks; nil without a baseline.
	NotInBaseline *NotInBaseline `json:"notInBaseline,omitempty"`
	// Pods are the pods whose host ports were lost, as far as libcni's files name them; MorePods is
	// how many are not listed.
	Pods     []LostPod `json:"pods,omitempty"`
	MorePods int       `json:"morePods,omitempty"`
	// NoticedSeconds is the time from the first evidence to the verdict. AbsentSeconds is the time
	// from the first evidence to the proof that everything is back; 0 while the loss lasts.
	NoticedSeconds float64 `json:"noticedSeconds"`
	AbsentSeconds  float64 `json:"absentSeconds"`
	// AbsentAtMost means that AbsentSeconds is only a bound. canaryd did not run or was not
	// executed at the flush, or does not know when a jump was deleted. The time is then counted
	// from LastInForce, when the rules were last known to be in force. It is a bound, too, if
	// owners put the rules back (Skipped), because no read shows that moment.
	AbsentAtMost bool      `json:"absentAtMost,omitempty"`
	LastInForce  time.Time `json:"lastInForce,omitzero"`
	// Stalled means that canaryd's process existed at that time but was not executed: it was
	// stopped, or the node was starved.
	Stalled bool `json:"stalled,omitempty"`
	// WrittenSeconds is the time from the first evidence to the end of the last write. The rules
	// were in force then; the rest of AbsentSeconds is the proof. KernelSeconds is how much of it
	// the kernel took for canaryd's own transactions.
	WrittenSeconds float64 `json:"writtenSeconds,omitempty"`
	KernelSeconds  float64 `json:"kernelSeconds,omitempty"`
	Outcome        Outcome `json:"outcome"`
	// LockedBy names the process that holds the xtables lock while the outcome is WaitingLock; ""
	// if it is not known.
	LockedBy string `json:"lockedBy,omitempty"`
	// Standby is the standby's translation meanwhile; nil if it did not translate.
	Standby *StandbyUse `json:"standby,omitempty"`
	// Attempts is how many replays were tried.
	Attempts int `json:"attempts"`
	// Older names the older generation from which rules were put back, because the newest one
	// could not be kept on disk; "" if there is none.
	Older string `json:"older,omitempty"`
	// Policies are the policies of built-in chains that differ from before.
	Policies []string `json:"policies,omitempty"`
	// Detail explains the outcome in words. It may quote rules.
	Detail string `json:"detail,omitempty"`
	// Earlier means that an earlier run of canaryd recorded it, perhaps in another boot. No metric
	// counts it.
	Earlier bool `json:"earlier,omitempty"`
	// Repeated counts later flushes of the same tables and kinds by the same process. They have
	// no records of their own. It is nil if there are none.
	Repeated *Repeated `json:"repeated,omitempty"`
	// Drill is set if canaryd itself removed the rules, because an operator requested a drill.
	Drill DrillSort `json:"drill,omitempty"`
	// DrillFailed means that the drill had failed before its rules were back.
	DrillFailed bool `json:"drillFailed,omitempty"`
}

// Repeated counts the flushes that followed a record's flush in quick succession.
type Repeated struct {
	Times             int       `json:"times"`
	Last              time.Time `json:"last"`              // of the first evidence of the last one
	MostAbsentSeconds float64   `json:"mostAbsentSeconds"` // of the longest one
}

// Text counts the flushes: "37 more, the last at 14:05:06 UTC"; "" if there were none.
func (r *Repeated) Text() string {
	if r == nil {
		return ""
	}
	return fmt.Sprintf("%d more, the last at %s", r.Times, r.Last.UTC().Format("15:04:05 MST"))
}

// Latest returns when the last flush of the record began: a record counts repetitions of its
// flush in Repeated. Status and page show it as the last flush.
func (f Flush) Latest() time.Time {
	if f.Repeated != nil {
		return f.Repeated.Last
	}
	return f.Time
}

// A Culprit is a process that wrote to the tables.
type Culprit struct {
	Time time.Time `json:"time,omitzero"`
	PID  uint32    `json:"pid"` // in the initial pid namespace
	// Took counts the rules of iptables' tables that it deleted, as far as the kernel reports
	// them.
	Took    int    `json:"took,omitempty"`
	Comm    string `json:"comm"`
	Command string `json:"command,omitempty"` // its command line, if canaryd could read it
	// Ancestors are the kernel's names of its parent, grandparent and great-grandparent.
	Ancestors []string `json:"ancestors,omitempty"`
	// Unit is the systemd unit that it ran in; for a container, the unit around it, if any.
	Unit string `json:"unit,omitempty"`
	// ContainerID, ContainerName and PodUID name its container, as the path of its cgroup does.
	ContainerID   string `json:"containerID,omitempty"`
	ContainerName string `json:"containerName,omitempty"`
	PodUID        string `json:"podUID,omitempty"`
}

// CulpritOf returns a writer in the form of flush records.
func CulpritOf(w watch.Writer) Culprit {
	o := w.Origin
	return Culprit{Time: w.Time, PID: w.PID, Comm: w.Comm, Command: w.Command, Ancestors: o.Ancestors, Unit: o.Unit,
		ContainerID: o.Container.ID, ContainerName: o.Container.Name, PodUID: o.Container.Pod}
}

// In names the container that the process ran in, or else its unit, in a word or two; "" if
// both are unknown. kubectl canaryd flushes has a cell for it.
func (c Culprit) In() string {
	switch {
	case c.ContainerName != "":
		return "container " + c.ContainerName
	case c.ContainerID != "":
		return "a container"
	default:
		return c.Unit
	}
}

// Line names the ancestors and the unit or container: " <- bash <- cron, cron.service". Texts
// append it to the process; it is "" if all are unknown.
func (c Culprit) Line() string {
	text := ""
	for _, name := range c.Ancestors {
		text += " <- " + name
	}
	place := watch.Origin{Unit: c.Unit, Container: watch.Container{ID: c.ContainerID, Pod: c.PodUID, Name: c.ContainerName}}.String()
	if place != "" {
		text += ", " + place
	}
	return text
}

// Text names the process, its ancestors and its unit or container: "nft (pid 3) <- bash <- cron,
// cron.service".
func (c Culprit) Text() string {
	return c.nameAndPID() + c.Line()
}

// An Outcome is the result of a replay or the state of a flush. Skipped also means that the
// owner put back rules that canaryd only observed.
type Outcome = reload.Outcome

// OutcomeText words the outcome for people. A skipped record means that the owner was faster;
// canaryd skipped nothing.
func (f Flush) OutcomeText() string {
	switch {
	case f.Outcome == reload.Skipped:
		return "back, by its owner"
	case f.Outcome == WaitingLock && f.LockedBy != "":
		return string(f.Outcome) + ", held by " + f.LockedBy
	}
	return string(f.Outcome)
}

// Pending is the outcome of a flush before its first replay. No metric has it.
const Pending Outcome = "pending"

// AwaitingDecision is the outcome of a flush whose rules canaryd may not replay unasked. It lasts
// until the rules are back or an operator has decided. No metric has it.
const AwaitingDecision Outcome = "waiting: decision"

// MarshalJSON writes an empty list where the contract has a list, and never null.
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
