package api

import (
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

// NotInBaseline says of a flush which of the rules that were lost, and that canaryd puts back,
// were not in the baseline that was confirmed then.
type NotInBaseline struct {
	BaselineName
	Rules int `json:"rules"` // jumps included
	// Chains are the first chains of them; More is how many are not listed.
	Chains []ChainName `json:"chains,omitempty"`
	More   int         `json:"more,omitempty"`
}

// A ChainName names a chain of a table, with how many rules of it are meant.
type ChainName struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Chain  string          `json:"chain"`
	Rules  int             `json:"rules"`
}

// withoutNames returns what of it may leave through TCP.
func (n *NotInBaseline) withoutNames() *NotInBaseline {
	if n == nil {
		return nil
	}
	return &NotInBaseline{BaselineName: n.BaselineName, Rules: n.Rules, More: n.More + len(n.Chains)}
}

// Takers returns those that took something; of a record of an earlier version, which
// has one only, that one.
func (f Flush) Takers() []Culprit {
	if len(f.Culprits) == 0 && f.Culprit.PID != 0 {
		return []Culprit{f.Culprit}
	}
	return f.Culprits
}

// ByText names the culprits in a few words: "nft (pid 3)", or "iptables, nft (+2)" where
// two more processes took something.
func (f Flush) ByText() string {
	list := f.Takers()
	switch {
	case len(list) == 0 || list[0].PID == 0:
		return "unknown"
	case len(list) == 1 && list[0].Comm == "":
		return list[0].name()
	case len(list) == 1:
		return fmt.Sprintf("%s (pid %d)", list[0].Comm, list[0].PID)
	}
	var names []string
	for _, c := range list {
		if name := c.name(); len(names) < CulpritsNamed && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	text := strings.Join(names, ", ")
	if more := len(list) - len(names); more > 0 {
		text += fmt.Sprintf(" (+%d)", more)
	}
	return text
}

// TakersOf names those that took something from one table; "" if that is not known.
func (f Flush) TakersOf(t TableLoss) string {
	var names []string
	for _, c := range f.Culprits {
		if slices.Contains(t.By, c.PID) && !slices.Contains(names, c.name()) {
			names = append(names, c.name())
		}
	}
	return strings.Join(names, ", ")
}

// name is what the kernel calls the process or, if it ended before that could be looked
// up, its number.
func (c Culprit) name() string {
	if c.Comm == "" {
		return fmt.Sprintf("pid %d", c.PID)
	}
	return c.Comm
}

// A LostPod is a pod whose host ports a flush took. Its names are empty where Kubernetes
// did not make the container.
type LostPod struct {
	Namespace string   `json:"namespace,omitempty"`
	Name      string   `json:"name,omitempty"`
	Container string   `json:"container"`
	HostPorts []string `json:"hostPorts"`
	// Gone: it was removed during the outage, so its host ports were not put back.
	Gone bool `json:"gone,omitempty"`
}

// String names the pod as people know it, with its host ports.
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
	// Removed is the kind of a record of what canaryd itself took away, because an operator
	// asked for an earlier generation. It is no verdict.
	Removed canary.Verdict = "removed"
	// Requested is the outcome of such a record: nothing is to be put back.
	Requested Outcome = "requested"
)

// Requested reports whether a record is of what an operator asked for, and no flush.
func (f Flush) Requested() bool { return f.Kind == Removed }

// UnprotectedText says how many rules that --protect does not name went with the others:
// ", and 3 rules that --protect does not name"; "" if none did, or it is not known.
func (l Lost) UnprotectedText() string {
	switch l.Unprotected {
	case 0:
		return ""
	case 1:
		return ", and 1 rule that --protect does not name"
	default:
		return fmt.Sprintf(", and %d rules that --protect does not name", l.Unprotected)
	}
}

// culpritsNamed is how many of a flush's culprits are named in a line.
const CulpritsNamed = 2

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
	// Native are the native tables that were hit; then Families and Tables are empty.
	Native []NativeLoss `json:"native,omitempty"`
	// NotInBaseline are the lost rules that the confirmed baseline does not have; nil
	// where there was none.
	NotInBaseline *NotInBaseline `json:"notInBaseline,omitempty"`
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
func CulpritOf(w watch.Writer) Culprit {
	o := w.Origin
	return Culprit{Time: w.Time, PID: w.PID, Comm: w.Comm, Command: w.Command, Ancestors: o.Ancestors, Unit: o.Unit,
		ContainerID: o.Container.ID, ContainerName: o.Container.Name, PodUID: o.Container.Pod}
}

// Place names the unit or the container that the process ran in; "" if it is not known.
func (c Culprit) Place() string {
	return watch.Origin{Unit: c.Unit, Container: watch.Container{ID: c.ContainerID, Pod: c.PodUID, Name: c.ContainerName}}.String()
}

// line says by what the process was started, behind its name: " <- bash <- cron, cron.service".
func (c Culprit) Line() string {
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
	return text + c.Line()
}

// Lost counts what a flush took away.
type Lost struct {
	Chains int `json:"chains"`
	Rules  int `json:"rules"`
	Jumps  int `json:"jumps"`
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
	Rules  int             `json:"rules"` // jumps included
	Jumps  int             `json:"jumps"`
	// Unprotected are rules that --protect does not name; see Lost.
	Unprotected int `json:"unprotectedRules,omitempty"`
	// By are the process numbers of those among Culprits that took something from this
	// table; empty if that is not known.
	By []uint32 `json:"by,omitempty"`
	// PerChain are the chains that lost most, the worst first, built-in chains
	// that lost jumps among them. More is how many are not listed.
	PerChain []ChainLoss `json:"perChain,omitempty"`
	More     int         `json:"more,omitempty"`
}

// A ChainLoss counts what one chain lost.
type ChainLoss struct {
	Chain string `json:"chain"`
	Rules int    `json:"rules"`           // jumps included
	Jumps int    `json:"jumps,omitempty"` // of a built-in chain
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

func withoutCommands(list []Culprit) []Culprit {
	list = slices.Clone(list)
	for i := range list {
		list[i].Command = ""
	}
	return list
}
