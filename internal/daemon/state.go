package daemon

import (
	"maps"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// state is all that the loop knows. One goroutine has it at a time: the loop,
// or the worker while it runs a step for the loop.
type state struct {
	learned   reload.Learned
	captured  time.Time          // when learned or declared last changed
	edition   int                // how often they did
	made      reload.Made        // what changed them last
	textless  textless           // of the generation
	baseline  baseline           // that it is compared with
	leftOut   []iptables.LeftOut // by the last read
	marks     canary.Marks
	families  map[rules.Family]*familyState
	loss      *loss                   // nil while nothing is lost
	pace      reload.Pace             // of the last replays
	declared  rules.Generation        // of the declared sources; nil if there are none
	retired   map[string]bool         // chains that were declared once and are claimed no more
	claims    func(chain string) bool // which chains are theirs; nil if there are none
	inForce   *Declaration            // what was written and proved last; nil: nothing yet
	applyAt   time.Time               // when declared is written; zero: it is in force
	mode      api.Mode                // as configured, or observe once another owner has what is claimed
	applyWait time.Duration
	// unapplied are the tables whose declaration could not be written.
	unapplied map[rules.TableID]bool
	unwritten trouble // why
	// refusals are the declared rules that are refused, and refused says so in a
	// Status.
	refusals reload.Refusals
	refused  []api.Refused
	// origin says where a declared rule stands; it may be nil.
	origin func(rules.Family, rules.TableName, string, rules.Rule) Origin
	// sourceErrors are what is wrong with the files of declared sources.
	sourceErrors []api.SourceError
	drifts       []time.Time // of the last minute
	journal      []api.Flush
	choice       choice      // of the backend
	keptBy       keeperBasis // of the last decision about the keeper
	// learningStoppedSince is since when, in observe mode, rules are missing that
	// their owner has not put back.
	learningStoppedSince time.Time
	ownerless            bool // the log has that kube-proxy's rules have no owner

	pods         podWatch
	ownersKept   reload.Owners // as the disk has them
	ownersAt     time.Time     // when it was last seen to
	ownersUnkept trouble       // why it has not

	hinted       time.Time     // when the hint came that asks for the next look; zero: none did
	evidence     time.Time     // since when what the present look finds may be so
	woken        bool          // by a hint, not by the poll: look closely
	lookAt       time.Time     // next look without a hint
	followUp     time.Duration // distance of the looks that follow a replay
	plantAt      time.Time     // not before this
	plantWait    time.Duration
	unplanted    trouble   // why the last planting failed
	markedAt     time.Time // marks that are not on disk: since when; zero: none
	saveAt       time.Time // when the generation is written; zero: nothing to write
	savedAt      time.Time
	confirmed    time.Time     // when everything was last in force, as the disk has it
	uptime       time.Duration // of the machine, then
	kept         canary.Marks  // as the disk has them
	saveCost     time.Duration
	freeMemoryAt time.Time // when memory is given back; zero: there is none to give
	memoryFreed  time.Time
	removed      bool // cleanup took everything out; nothing is done any more
	// madeTables are the tables that did not exist before canaryd wrote to them.
	madeTables reload.Tables

	pausedUntil time.Time // zero: not paused
	// lastInForce is when the last run knew the generation to be in force, by the
	// clock of this run; zero: there was none, or its time is not known.
	lastInForce time.Time
	suspicion   *suspicion // what the last run left and this one did not take up; nil: nothing
	decision    *decision  // a loss that waits for one; nil: none does
	stored      []reload.Kept
	inventory   inventory
	contention
	leaning
}

// familyState is what the loop knows of one family.
type familyState struct {
	tables map[rules.TableName]*tableState

	stamp        iptables.Stamp // of the last probe
	probed       time.Time      // zero: never
	probedUrgent iptables.Stamp // up to which what is urgent was probed
	walks        budget         // what probes may cost where stamps are not exact,
	urgentProbes budget         // and what stamps and urgentProbes may
	unasked      time.Time      // when the first hint came that has to wait for a stamp; zero: none does
	unseen       time.Time      // since when something may have been written that no probe has seen; zero: nothing was
	intact       uint64         // digest of the last probe that saw all marks standing
	sound        uint64         // digest of the last read that showed everything in force
	digest       uint64         // of what was examined last
	examined     time.Time      // zero: never
	trouble      trouble        // why the last probe failed
	unread       trouble        // why the last full read failed
	readAt       time.Time      // after a read that failed: no other one before this
	knownAt      time.Time      // when it was last known what the tables hold; zero: never
	// natIntact is when it was last known that nat held the whole generation;
	// zero: never.
	natIntact time.Time

	dirty     time.Time // since when something is unexamined; zero: nothing is
	examineAt time.Time // not before this; zero: no examination is due
	readEnd   time.Time
	readPause time.Duration // between readEnd and the next read
	moved     time.Time     // when something protected changed last
	quiet     bool          // the last examination found the jump grace over

	undoubleAt  time.Time // when jumps that stand twice are put right; zero: none does
	pendingSync pendingSync
	proxy       proxyWatch
	keeper      keeping

	rotateAt time.Time // zero: the marks are as new as the generation
	rotateBy time.Time // when they are renewed although owners are not quiet
}

// tableState is what the loop knows of one table.
type tableState struct {
	verdict canary.Verdict
	seen    rules.Section // of the last read
	known   bool          // whether seen holds anything
	pending bool          // the generation does not hold yet what was seen
	trouble trouble       // why the table could not be read
	// learningStopped: a loss was seen in observe mode and lasts until the owner has
	// put its rules back; nothing is learned meanwhile.
	learningStopped bool
	// spared: it does not exist and nothing is protected in it, so that it has no marks.
	spared bool
	placed []placed // jumps that were put back, those of the last grace
	// standing is what the last read showed of it while nothing was lost.
	standing standing
}

// loss is a flush record in the making.
type loss struct {
	record       api.Flush
	noticed      time.Time
	intact       uint32                        // the genid of the last intact look, and the last one at
	heard        uint32                        // which something was found lost
	hit          map[rules.Family]api.Verdicts // tables counted so far
	noted        bool                          // whether the log has that it was noticed
	named        bool                          // whether it was asked whose it is
	told         bool                          // whether the log has what was lost
	counted      bool                          // whether metrics have it
	jumpsDeleted bool                          // jumps were deleted by name, and their grace is over
	memory       reload.Memory                 // what reads and tries have shown
	gone         map[protect.Attachment]bool   // containers that the last replay left out
	recovery                                   // what the tries have put back so far
	attempts     int
	tryAt        time.Time
	wait         time.Duration

	diff   []api.TableDiff // of the tables that were hit
	room   room            // how much more it may hold
	unkept []api.TableDiff // diff, while the journal does not have it

	complaint  string // what the log said last of why it lasts
	complained time.Time
}

func newState(families []rules.Family, now time.Time) *state {
	st := &state{marks: canary.Marks{}, families: map[rules.Family]*familyState{}, contention: contention{limit: reload.NewLimiter()}}
	for _, f := range families {
		fs := &familyState{tables: map[rules.TableName]*tableState{}, moved: now}
		for _, t := range protect.Tables() {
			fs.tables[t] = &tableState{verdict: canary.Unknown}
		}
		st.families[f] = fs
	}
	return st
}

// own returns what the claimed chains are held to; without Claims they are held
// to nothing. A declaration is no measure before it was written: the kernel may
// refuse it, and what a flush takes meanwhile must come back all the same.
func (st *state) own() Declaration {
	switch {
	case st.mode == api.Observe:
		return Declaration{st.declared, st.claims, st.origin}
	case st.inForce != nil:
		return *st.inForce
	default:
		return Declaration{}
	}
}

// want returns the generation that ought to be in force.
func (st *state) want() rules.Generation {
	own := st.own()
	if own.Claims == nil {
		return st.learned.Generation
	}
	return own.Generation.Join(st.learned.Generation)
}

// declare takes up what the declared sources say now. A chain that they no
// longer claim stays claimed for the rest of the run: it would else be taken
// for somebody else's and stay.
func (st *state) declare(next Declaration, now time.Time) {
	retired := maps.Clone(st.retired)
	if retired == nil {
		retired = map[string]bool{}
	}
	for _, s := range st.declared {
		for _, c := range s.Chains {
			if !next.Claims(c.Name) {
				retired[c.Name] = true
			}
		}
	}
	st.retired = retired
	st.claims = func(chain string) bool { return next.Claims(chain) || retired[chain] }
	st.declared, st.origin = next.Generation, next.Origin
	for f, fs := range st.families {
		for t, ts := range fs.tables {
			own := st.declared[f.Table(t)]
			ts.spared = ts.spared && len(own.Chains)+len(own.Jumps) == 0
		}
	}
	st.learned.Generation = st.unclaimed(st.learned.Generation)
	st.made = reload.MadeDeclared
	st.capture(now)
	if st.mode == api.Heal {
		st.applyAt = now
		return
	}
	st.compare(now)
}

// compare asks for an examination of how far the claimed chains are from what
// is declared.
func (st *state) compare(now time.Time) {
	for f, fs := range st.families {
		if st.planted(f) {
			fs.examineAt = now
		}
	}
}

// claimed returns what declared sources own of the generation.
func (st *state) claimed(g rules.Generation) rules.Generation {
	for id, s := range g {
		own, _ := s.Split(st.claims)
		g = g.With(id, own)
	}
	return g
}

// unclaimed returns the generation without what declared sources own.
func (st *state) unclaimed(g rules.Generation) rules.Generation {
	for id, s := range g {
		_, rest := s.Split(st.claims)
		g = g.With(id, rest)
	}
	return g
}

// capture notes that what want returns is another than before.
func (st *state) capture(at time.Time) {
	st.captured = at
	st.edition++
}

// keep returns what of the marks belongs on disk. Where observe mode replanted
// marks above a loss, those that were lost stay: who restores, or starts to
// heal, later must still find the loss.
func (st *state) keep(marks canary.Marks) canary.Marks {
	for f, fs := range st.families {
		for t, ts := range fs.tables {
			if ts.learningStopped {
				marks = marks.With(f.Table(t), st.kept[f.Table(t)])
			}
		}
	}
	return marks
}

// hint asks for a close look because of something that happened just now.
func (st *state) hint(now time.Time) {
	st.hinted, st.woken, st.lookAt = earliest(st.hinted, now), true, now
}

// planted reports whether every table of the family has a mark, or needs none.
func (st *state) planted(f rules.Family) bool {
	for _, t := range protect.Tables() {
		if st.marks[f.Table(t)].Nonce == "" && !st.families[f].tables[t].spared {
			return false
		}
	}
	return true
}

// anyPlanted reports whether a table of the family has a mark, or needs none yet.
func (st *state) anyPlanted(f rules.Family) bool {
	for _, ts := range st.families[f].tables {
		if ts.spared {
			return true
		}
	}
	for _, mark := range tableid.Of(st.marks, f) {
		if mark.Nonce != "" {
			return true
		}
	}
	return false
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

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// due reports whether a time that may be zero, for never, has come.
func due(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }
