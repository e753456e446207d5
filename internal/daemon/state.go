package daemon

import (
	"iter"
	"time"

	"github.com/canaryd/canaryd/internal/accepted"
	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/drill"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/pods"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// state is all that the loop knows. Its goroutine alone has it. Each part is written in the file
// that declares it.
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
	incomplete []incomplete
	sets       sets       // ipsets that rules depend on
	pods       pods.Watch // containers that CNI plugins attached
	accepted   accepted.List
	closings   accepted.Closings // policies that have become DROP
	owners     ownersOnDisk      // what the disk has of the owners of rules
	ownerless  pace.Trouble      // kube-proxy's rules have no owner

	// How it is watched.
	marks   marking // canaries and witnesses
	looking looking // when the next look comes, and why

	// What is done about a loss.
	loss       *loss          // the open one; nil while nothing is lost
	pace       reload.Pace    // of the last replays
	contention contention     // with a process that undoes replays
	pause      pause          // of replays
	keptBy     keeperBasis    // of the last decision about the keeper
	purges     culprit.Purges // what was removed lately, and who deletes marks by name
	// observedSince is since when rules are missing that canaryd only watches, and that their owner
	// has not put back; zero: none are.
	observedSince time.Time
	// standby are the copies that translate meanwhile.
	standby map[tableid.TableID]*standbyOf

	// Native tables, which are a realm of their own.
	native nativeRealm

	// What operators try.
	drills drill.Drills

	// What the last run left.
	suspicion *suspicion // not judged yet; nil: nothing is left to judge
	older     older      // the state that it left is older than what was in force
	unread    unreads    // stored files that an operator has to decide about
	decision  *decision  // a loss that an operator has to decide about; nil: none
	// unanswered are the flush records that it left open, the newest first.
	unanswered []api.Flush

	// What is kept and shown.
	disk      saving             // what the state folder has
	absence   absence            // when everything was in force
	journal   flushes.History    // flush records
	baseline  baseline.Known     // that the generation is compared with
	opaque    opaqueRules        // rules of the generation that have no text
	leftOut   []iptables.LeftOut // chains that the last read left out
	ledTo     ledTo              // chains of other owners that are guarded
	guards    guards             // owners whose rules are guarded
	leadsOut  leadsOut           // rules that --protect names in vain
	inventory inventory          // rules and native tables that --protect does not name
	choice    choice             // of the backend
	memory    pace.Memory        // when memory is given back
}

// familyState is what the loop knows of one family.
type familyState struct {
	tables   map[rules.TableName]*tableState
	looked   looked    // what stamps and probes showed
	written  time.Time // when what was lost was last put back and proved; zero: never
	examined examined  // what full reads showed
	known    known     // when its content was known
	rotation rotation  // when its marks are renewed
	proxy    kubeProxy // kube-proxy's canary, and the full sync that is asked of it
	keeper   keeping   // its keeper
	// unguarded are its tables that are guarded on demand and hold nothing to guard; see there.
	unguarded map[rules.TableName]unguarded
	// undoubleAt is when jumps that stand twice are removed; zero: none does.
	undoubleAt time.Time
}

// newState returns the state of a daemon that has not looked at anything yet.
func (d *Daemon) newState() *state {
	st := &state{families: map[rules.Family]*familyState{}, pace: d.cfg.Pace, native: d.newNativeRealm(), standby: d.newStandby()}
	st.contention.limit, st.looking.storm = reload.NewLimiter(), pace.Bucket{Share: pace.StormShare}
	st.quarantine.stood = map[rules.Family]map[iptables.Place]bool{}
	st.pods.Grace = d.cfg.JumpGrace
	first := d.cfg.Kernel.Evidence()
	st.choice = choice{reason: first.Reason, mixed: first.Mixed}
	families := d.cfg.Kernel.Families()
	for _, f := range families {
		st.families[f] = &familyState{tables: newTables(), examined: examined{moved: time.Now()}, looked: looked{budget: pace.NewBudget(len(families))}}
	}
	return st
}

// inOrder yields what is known of each family, in their order.
func (st *state) inOrder() iter.Seq2[rules.Family, *familyState] {
	return func(yield func(rules.Family, *familyState) bool) {
		for _, f := range rules.Families() {
			if fs := st.families[f]; fs != nil && !yield(f, fs) {
				return
			}
		}
	}
}

// tables yields what is known of each table, in their order.
func (st *state) tables() iter.Seq2[rules.TableID, *tableState] {
	return func(yield func(rules.TableID, *tableState) bool) {
		for _, id := range flushes.TableIDs() {
			if fs := st.families[id.Family]; fs != nil && !yield(id, fs.tables[id.Name]) {
				return
			}
		}
	}
}

// anyOf reports whether something is so of any value of a map.
func anyOf[M ~map[K]V, K comparable, V any](m M, is func(V) bool) bool {
	for _, v := range m {
		if is(v) {
			return true
		}
	}
	return false
}

// anyFamily reports whether something is so of any family.
func (st *state) anyFamily(is func(*familyState) bool) bool { return anyOf(st.families, is) }
