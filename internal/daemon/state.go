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
	"github.com/canaryd/canaryd/internal/quarantine"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// state is all knowledge of the loop. Only the loop's goroutine uses it. The file that declares
// a part also writes it.
type state struct {
	// families holds the state of each family and of its tables.
	families map[rules.Family]*familyState
	// mode is the configured mode, or observe once another owner has the claimed chains.
	mode api.Mode
	// removed: a cleanup removed everything, and the loop does nothing any more.
	removed bool

	// The rules that ought to be in force.
	generation generation       // learned rules, and the count of changes
	declared   declared         // rules of declared sources, and their written part
	refused    refused          // declared rules that are refused
	quarantine quarantine.State // parts of all tables that cannot be put back yet
	sets       sets             // ipsets that rules depend on
	pods       pods.Watch       // containers that CNI plugins attached
	accepted   accepted.List
	closings   accepted.Closings // policies that have become DROP
	owners     ownersOnDisk      // knowledge of rules' owners, as the disk has it
	ownerless  pace.Trouble      // kube-proxy's rules have no owner

	// extracted holds the protected parts of the last reads, by the present protection.
	extracted map[rules.TableID]rules.Extraction

	// The watch over them.
	marks   marking // canaries and witnesses
	looking looking // when the next look is due, and why

	// The answer to a loss.
	loss       *loss          // the open one; nil while nothing is lost
	pace       reload.Pace    // of the last replays
	contention contention     // with a process that undoes replays
	pause      pause          // of replays
	keptBy     keeperBasis    // of the last decision about the keeper
	purges     culprit.Purges // recent removals, and processes that delete marks by name
	// observedSince is when the first rules were lost that canaryd only observes and their
	// owner has not put back; zero: there are none.
	observedSince time.Time
	// standby holds the copies that translate until a replay is proved.
	standby map[tableid.TableID]*standbyOf
	copying *copying // the write of copies that is under way; nil: none is
	// saving takes up the save that is under way, once it is done; nil: none is.
	saving step

	// Native tables, which are a realm of their own.
	native nativeRealm

	// Drills, on request and by schedule.
	drills drill.Drills

	// The remains of the last run.
	suspicion *suspicion // not judged yet; nil: nothing is left to judge
	older     older      // its stored rules, if they are older than the last rules in force
	unread    unreads    // stored files that an operator has to decide about
	decision  *decision  // a loss that an operator has to decide about; nil: none
	// unanswered are the flush records that the last run left open, the newest first.
	unanswered []api.Flush

	// Stored and published state.
	disk      saving             // the content of the state folder
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

// familyState is the loop's knowledge of one family.
type familyState struct {
	tables   map[rules.TableName]*tableState
	looked   looked    // results of stamps and probes
	written  time.Time // when lost rules were last put back and proved; zero: never
	examined examined  // results of full reads
	known    known     // when its content was known
	rotation rotation  // when its marks are renewed
	proxy    kubeProxy // kube-proxy's canary, and the full sync that canaryd wants of it
	keeper   keeping   // its keeper
	// unguarded holds the tables that are guarded on demand and hold nothing to guard; see
	// there.
	unguarded map[rules.TableName]unguarded
	// undoubleAt is when duplicate jumps are removed; zero: there are none.
	undoubleAt time.Time
}

// newState returns the state of a daemon that has not looked at anything yet.
func (d *Daemon) newState() *state {
	st := &state{families: map[rules.Family]*familyState{}, extracted: map[rules.TableID]rules.Extraction{}, pace: d.cfg.Pace, native: d.newNativeRealm(), standby: d.newStandby()}
	st.contention, st.looking.storm = newContention("iptables"), pace.Bucket{Share: pace.StormShare}
	st.pods.Grace = d.cfg.JumpGrace
	first := d.cfg.Kernel.Evidence()
	st.choice = choice{reason: first.Reason, mixed: first.Mixed}
	families := d.cfg.Kernel.Families()
	for _, f := range families {
		st.families[f] = &familyState{tables: newTables(), examined: examined{moved: time.Now()}, looked: looked{budget: pace.NewBudget(len(families))}}
	}
	return st
}

// inOrder yields the state of each family, in the families' order.
func (st *state) inOrder() iter.Seq2[rules.Family, *familyState] {
	return func(yield func(rules.Family, *familyState) bool) {
		for _, f := range rules.Families() {
			if fs := st.families[f]; fs != nil && !yield(f, fs) {
				return
			}
		}
	}
}

// tables yields the state of each table, in the tables' order.
func (st *state) tables() iter.Seq2[rules.TableID, *tableState] {
	return func(yield func(rules.TableID, *tableState) bool) {
		for _, id := range flushes.TableIDs() {
			if fs := st.families[id.Family]; fs != nil && !yield(id, fs.tables[id.Name]) {
				return
			}
		}
	}
}

// anyOf reports whether is returns true for any value of a map.
func anyOf[M ~map[K]V, K comparable, V any](m M, is func(V) bool) bool {
	for _, v := range m {
		if is(v) {
			return true
		}
	}
	return false
}

// anyFamily reports whether is returns true for any family.
func (st *state) anyFamily(is func(*familyState) bool) bool { return anyOf(st.families, is) }
