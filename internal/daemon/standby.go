package daemon

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Standby has a copy of each table that translates, iptables' nat or a native table, in a table
// of its own behind a gate. The copy translates what the table does not, but only while the gate is
// open.
//
// Each call may commit to nf_tables, as one of canaryd's own. The loop calls it in a step, or in a
// heal before it reads: a commit between a replay's read and its write would make that stale.
type Standby interface {
	// Follow brings copies to what ought to be in force, and says of each one its state. It writes
	// one of nat only where that is asked for, and else translates it.
	Follow(ctx context.Context, wants ...StandbyWant) map[tableid.TableID]StandbyCopy
	// Gate opens the gate, in one transaction with what the copy lacks, or without one if that is
	// nothing. Of nat it opens those hooks whose path lost something. Or it shuts it for all hooks,
	// for which it needs the ID only. With an error of shutting there is no table any more; the
	// error wraps standby.ErrNotBuilt if there was none.
	Gate(want StandbyWant, order GateOrder) (StandbyGate, error)
	// Release deletes the copy, if there is one.
	Release(id tableid.TableID) error
}

// A StandbyWant is the content of a table that ought to be in force.
type StandbyWant struct {
	ID     tableid.TableID
	Nat    StandbyNat // of iptables' nat
	Native NativeWant // of a native table; without a Table it is iptables' nat
}

// StandbyConfig is what the standby needs.
type StandbyConfig struct {
	Table Standby // nil: there is none
	Auto  bool    // only where a replay is estimated to take more than standbyFrom
	Off   string  // why there is none of iptables' nat; "" unless there is none
	// NativeOff is why there is none of native tables although --standby asks for it, for as long
	// as canaryd runs; "" unless Table is nil.
	NativeOff string
}

// A StandbyNat is the part of iptables' nat that ought to be in force, and the digest of the read
// that showed that it is.
type StandbyNat struct {
	Section rules.Section
	Digest  uint64
	// Known: this was translated already. Write: it is to be written now, and not only translated.
	Known, Write bool
}

// A NativeWant is the content of a native table that ought to be in force, and its digest.
type NativeWant struct {
	Table  *native.Table
	Digest native.Digest
}

// A StandbyCopy says what became of a copy.
type StandbyCopy struct {
	Chains   int // that it has
	Uncopied int // that accept what they get, because a rule of theirs cannot be copied
	// Unfinished: the copy is being built, and each call does a part of that, so that the loop may
	// look at the rules in between.
	Unfinished bool
	// Err is why there may be no copy; with ErrStandbyMoved or ErrStandbyUnread it is as it was.
	Err error
}

// A GateOrder says what is to become of a gate.
type GateOrder int

// The orders.
const (
	ShutGate GateOrder = iota
	// OpenGate opens the gate also if the kernel does not take what is outstanding.
	OpenGate
	// OpenCurrent opens the gate only together with what is outstanding; if the kernel does not
	// take that, the error is ErrStandbyOutdated.
	OpenCurrent
)

// A StandbyGate says what became of a gate.
type StandbyGate struct {
	Open bool
	// Outdated says why the gate was opened without what is outstanding; nil: it was not.
	Outdated error
	Commits  int // that this took
	// Shut is when the gate was shut by its own limit, before it was asked for; zero: it was not.
	Shut time.Time
	// Barred says why hooks stay shut whose path lost something.
	Barred map[string]string
}

// ErrStandbyMoved: nat may hold by now what was not examined yet.
var ErrStandbyMoved = errors.New("another process has written since nat was examined")

// ErrStandbyOutdated: the copy cannot get what it lacks, and is not to be opened without that.
var ErrStandbyOutdated = errors.New("the copy lacks what was learned")

// ErrStandbyUnread: nat could not be read.
var ErrStandbyUnread = errors.New("nat could not be read for the standby")

// Reasons why a table has no copy, as the status and the log have them. The others are errors of
// making one.
const (
	whyObserve   = "observe mode writes nothing but marks"
	whyCleanup   = "canaryd's marks were removed on request"
	whyShort     = "a replay is short enough without"
	whyNoRule    = "no protected rule translates"
	whyNoChain   = "none of its chains translates"
	whyUnguarded = "no table of that name is guarded"
)

const (
	// standbyEvery is the time between two changes of the copy. Each keeps other writers out for
	// as long as the kernel checks all chains: 6 to 22 ms at 1,000 services, 35 ms at 5,000.
	standbyEvery = time.Second
	// standbyShare bounds what translating takes to 2 % of a core, as long as that makes the copy
	// no older than standbyEvery.
	standbyShare = 50
	// standbyMost is how long the gate is open for one loss: an owner may have removed by then what
	// the copy still has.
	standbyMost = 30 * time.Second
)

// standbyOf is the loop's knowledge of the copy of one table.
type standbyOf struct {
	id     tableid.TableID
	kind   standbyKind
	state  api.StandbyState // "": nothing is decided yet
	reason string
	copy   StandbyCopy

	next    time.Time // not before: it is followed again
	begun   bool      // the copy is being built,
	pieceAt time.Time // not before: the next piece of it is written

	making pace.Making
	gate   gate
}

// A standbyKind is the difference between copies of iptables' nat and of native tables, with the
// loop's knowledge of that kind only.
type standbyKind interface {
	// name is the table's name in the log.
	name() string
	// log is where the log has a loss of such a table.
	log(ctx context.Context, d *Daemon, st *state) klog.Logger
	// record is that of the loss of such tables; nil: none is lost.
	record(st *state) *api.Flush

	// followAt returns when the copy is decided about; never while the table may not be as its
	// owner wants it. A copy of what a flush left would be none.
	followAt(d *Daemon, st *state, s *standbyOf) time.Time
	// decide returns the content that ought to be in force now, and notes that the copy is decided
	// about; again: the last try failed.
	decide(st *state, again bool) StandbyWant
	// idle returns why the table needs no copy; "" if it needs one.
	idle(d *Daemon, st *state, has bool) string
	// rest is the time between two changes of the copy, where one takes so long.
	rest(took time.Duration) time.Duration
	// took notes the result for a want, and reports whether the copy is written.
	took(want StandbyWant, copied StandbyCopy) bool
	// gone notes that there is no copy any more.
	gone()
	// behind reports whether an armed copy lacks changes, and of how many chains it does.
	behind(st *state) (chains int, behind bool)

	// wantsOpen reports whether the table is lost and is being put back.
	wantsOpen(st *state) bool
	// openOrder returns how the gate is opened, and since when the copy is behind; not ok: what
	// could be opened is behind for standbyMost. An owner may have removed what it still has.
	openOrder(st *state, now time.Time) (order GateOrder, since time.Time, ok bool)
	// toOpen returns the want that an opening needs.
	toOpen(st *state) StandbyWant
	// opened notes in the record that the gate was opened, so long after the first evidence, and
	// sweeps connections that began without translation.
	opened(d *Daemon, st *state, got StandbyGate, after time.Duration)
}

// has reports whether there is a copy that may be opened.
func (s *standbyOf) has() bool {
	return s != nil && (s.state == api.StandbyArmed || s.state == api.StandbyOpen)
}

// native reports whether the table is a native one.
func (s *standbyOf) native() bool {
	_, is := s.kind.(*nativeCopy)
	return is
}

// copies returns all copies: those of nat first, for what opens them is translated already.
func (st *state) copies() []*standbyOf {
	return slices.SortedFunc(maps.Values(st.standby), func(a, b *standbyOf) int {
		switch {
		case a.native() == b.native():
			return a.id.Compare(b.id)
		case a.native():
			return 1
		}
		return -1
	})
}

// mayOpenAny reports whether there is a copy that a flush may open, of nat or of a native table.
func (st *state) mayOpenAny(native bool) bool {
	return st.heals() && anyOf(st.standby, func(s *standbyOf) bool { return s.has() && s.native() == native })
}
