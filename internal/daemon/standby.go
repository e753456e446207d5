package daemon

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/copies"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// StandbyConfig holds the standby's settings.
type StandbyConfig struct {
	Table copies.Standby // nil: there is none
	Auto  bool           // only where a replay is estimated to take more than standbyFrom
	Off   string         // why there is none of iptables' nat; "" unless there is none
	// NativeOff is why native tables have none although --standby wants it, as long as canaryd
	// runs; "" unless Table is nil.
	NativeOff string
}

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
	// standbyShare limits translation to 2 % of a core, as long as that makes the copy no older
	// than standbyEvery.
	standbyShare = 50
)

// standbyOf is the loop's knowledge of the copy of one table.
type standbyOf struct {
	id     tableid.TableID
	kind   standbyKind
	state  api.StandbyState // "": nothing is decided yet
	reason string
	copy   copies.Copy

	next    time.Time // not before: it is followed again
	begun   bool      // the copy is being built,
	pieceAt time.Time // not before: the next piece of it is written

	making pace.Making
	gate   copies.Gate
}

// A standbyKind is the difference between copies of iptables' nat and of native tables, with the
// loop's knowledge of that kind only.
type standbyKind interface {
	// name is the table's name in the log.
	name() string
	// log returns the log for a loss of such a table.
	log(ctx context.Context, d *Daemon, st *state) klog.Logger
	// record returns the record of the loss of such tables; nil: none is lost.
	record(st *state) *api.Flush

	// followAt returns when the copy is decided about; never while the table may not be as its
	// owner wants it. A copy of a flushed table would be none.
	followAt(d *Daemon, st *state, s *standbyOf) time.Time
	// decide returns the content that ought to be in force now, and notes that the copy is decided
	// about; again: the last try failed.
	decide(st *state, again bool) copies.Want
	// idle returns why the table needs no copy; "" if it needs one.
	idle(d *Daemon, st *state, has bool) string
	// rest is the time between two changes of the copy, where one takes so long.
	rest(took time.Duration) time.Duration
	// took notes the result for a want, and reports whether the copy is written.
	took(want copies.Want, copied copies.Copy) bool
	// gone notes that there is no copy any more.
	gone()
	// behind reports whether an armed copy lacks changes, and of how many chains it does.
	behind(st *state) (chains int, behind bool)

	// wantsOpen reports whether the table is lost and is being put back.
	wantsOpen(st *state) bool
	// openOrder returns how the gate is opened, and since when the copy is behind. Not ok: the
	// copy has been behind for copies.Most, and may have rules that an owner has removed.
	openOrder(st *state, now time.Time) (order copies.Order, since time.Time, ok bool)
	// toOpen returns the want that an opening needs.
	toOpen(st *state) copies.Want
	// opened notes in the record that the gate was opened, so long after the first evidence, and
	// sweeps connections that began without translation.
	opened(d *Daemon, st *state, got copies.Answer, after time.Duration)
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

// copies returns all copies: nat's first, because they open without another translation.
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
