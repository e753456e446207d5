package daemon

import (
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// state is all that the loop knows. One goroutine has it at a time: the loop,
// or the worker while it runs a step for the loop. Each part is written in the
// file that declares it.
type state struct {
	// families has what is known of each family and, in it, of each table.
	families map[rules.Family]*familyState
	// mode is the configured one, or observe once another owner has the claimed chains.
	mode api.Mode
	// removed: a cleanup took everything out, and nothing is done any more.
	removed bool

	// What ought to be in force.
	generation generation // learned, with what is declared
	declared   declared   // what the declared sources say, and what of it was written
	refused    refused    // declared rules that are refused
	quarantine quarantine // rules that cannot be put back yet
	sets       sets       // ipsets that rules depend on
	pods       podWatch   // containers that CNI plugins attached
	owners     owners     // what the disk has of the owners of rules
	ownerless  trouble    // kube-proxy's rules have no owner

	// How it is watched.
	marks   marking // canaries and witnesses
	looking looking // when the next look comes, and why

	// What is done about a loss.
	loss       *loss       // the open one; nil while nothing is lost
	pace       reload.Pace // of the last replays
	contention contention  // with a process that undoes replays
	pause      pause       // of replays
	observing  observing   // a loss that waits for the rules' owner
	keptBy     keeperBasis // of the last decision about the keeper

	// Native tables, which are a realm of their own.
	native nativeRealm

	// What operators try.
	drill     *drill        // the one that is under way; nil: none
	doubt     *drill        // one whose write failed, and which may have taken something all the same
	lastDrill *api.DrillEnd // of this run; nil: none

	// What the last run left.
	suspicion *suspicion // not judged yet; nil: nothing is left to judge
	decision  *decision  // a loss that an operator has to decide about; nil: none

	// What is kept and shown.
	disk      saving             // what the state folder has
	absence   absence            // when everything was in force
	journal   []api.Flush        // flush records, the newest first
	baseline  baseline           // that the generation is compared with
	opaque    opaqueRules        // rules of the generation that have no text
	leftOut   []iptables.LeftOut // chains that the last read left out
	inventory inventory          // what stands on a node where nothing is protected
	choice    choice             // of the backend
	memory    memoryUse          // when memory is given back
}

// familyState is what the loop knows of one family.
type familyState struct {
	tables   map[rules.TableName]*tableState
	looked   looked    // what stamps and probes showed
	examined examined  // what full reads showed
	known    known     // when its content was known
	rotation rotation  // when its marks are renewed
	doubles  doubles   // when jumps that stand twice are removed
	proxy    kubeProxy // kube-proxy's canary, and the full sync that is asked of it
	keeper   keeping   // its keeper
	standby  standbyOf // its standby
}

// newState returns the state of a daemon that has not looked at anything yet.
func (d *Daemon) newState() *state {
	st := &state{families: map[rules.Family]*familyState{}, pace: d.cfg.Pace, native: d.newNativeRealm()}
	st.contention.limit = reload.NewLimiter()
	first := d.cfg.Kernel.Evidence()
	st.choice = choice{reason: first.Reason, mixed: first.Mixed}
	families := d.cfg.Kernel.Families()
	for _, f := range families {
		st.families[f] = &familyState{tables: newTables(), examined: examined{moved: time.Now()}, looked: looked{budget: newBudget(len(families))}}
	}
	return st
}

// earliest returns the earliest of the times that are not zero.
func earliest(times ...time.Time) time.Time {
	var first time.Time
	for _, t := range times {
		if !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	return first
}

// latest returns the later of two times.
func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// due reports whether a time that may be zero, for never, has come.
func due(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }
