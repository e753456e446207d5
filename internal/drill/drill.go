// Package drill follows a drill: canaryd removes its own canary, jumps, or native tables of its
// own, to show that it notices and restores them.
//
// [New] makes a [Drill] of a request, and [Drill.What] names the objects to remove. After the
// removal [Drills.Begin] or [Drills.BeginNative] starts the drill. [Drill.Explains] reports
// whether the drill caused a loss; [Drill.Answered] and [Drill.Lasts] return its result. A drill
// that tries iptables' tables and native tables tries one after the other: [Drill.GoOn].
// [Drills.Plan] plans the drills of --drill-every.
//
// New fails for a drill for real of any table but nat. The values belong to the loop's
// goroutine; a client waits for Drill.Done and then reads the reply.
package drill

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Chain is the chain from which a drill for real takes the protected jumps.
const Chain = "PREROUTING"

// patience is how long a drill may take, besides two polls and the wait for quiet. A replay at
// 5,000 services takes 2 s, and 13 s by iptables-restore.
const patience = 30 * time.Second

// Guarded says where a node has something to guard, so that a drill there proves something.
type Guarded struct{ Iptables, Native bool }

// NativeKinds returns the damages that a drill can do to native tables of its own.
func NativeKinds() []canary.Verdict {
	var kinds []canary.Verdict
	for _, v := range native.DrillKinds() {
		kinds = append(kinds, canary.Verdict(v))
	}
	return kinds
}

// errForReal means that the request names another table or kind, which it would not get.
var errForReal = errors.New("a drill for real takes the protected jumps of nat PREROUTING and nothing else: leave out --table and --kind")

// Drills holds the present drill, the last ones, and the time of the next.
type Drills struct {
	Under *Drill        // nil: none
	doubt *Drill        // one whose write failed, although it may have removed something
	Last  *api.DrillEnd // of this run; nil: none
	At    time.Time     // the next one by --drill-every; zero: there is none
}

// A Drill is one drill, before or after its removal.
type Drill struct {
	Reply api.DrillReply
	taken canary.Marks // of the tables that lost something
	Start time.Time    // when the kernel took the removal
	By    time.Time    // the time at which it has failed
	Done  chan struct{}
	// kinds are the damages to iptables' tables and to native tables. A drill without one does not
	// try these tables.
	kinds  struct{ iptables, native canary.Verdict }
	native bool      // it is at native tables
	goOn   time.Time // when it goes on to native tables; zero: it does not wait for that
	tookAt time.Time // when the kernel took the last removal
}

// Plan plans the next drill in At, unless every is 0. recorded is the last drill with a record;
// nil if there is none. The first drill of a node is at a random time.
func (s *Drills) Plan(every time.Duration, recorded *api.DrillEnd, now time.Time) {
	switch last := cmp.Or(s.Last, recorded); {
	case every == 0:
	case last == nil:
		s.At = now.Add(rand.N(every))
	default:
		s.At = pace.Latest(now.Add(Again(every)), last.Time.Add(every))
	}
}

// Again returns how long a scheduled drill waits after a start, or after a refusal.
func Again(every time.Duration) time.Duration { return min(every/10, time.Hour) }

// Had reports whether the last drill of this run was less than a period ago.
func (s *Drills) Had(every time.Duration, now time.Time) bool {
	return s.Last != nil && now.Before(s.Last.Time.Add(every))
}

// New returns the drill for a request, with the defaults filled in. Without a table it tries all
// that the node guards. Its result is refused until it has removed something. The error says why
// a drill for real cannot have that table or kind.
func New(r api.DrillRequest, has Guarded) (next *Drill, err error) {
	next = &Drill{Done: make(chan struct{}), Reply: api.DrillReply{
		DrillEnd: api.DrillEnd{Time: time.Now(), Sort: api.DrillCanary, Result: api.DrillRefused},
		Table:    r.Table, Alert: api.AlertOfFlush(r.ForReal),
	}}
	reply := &next.Reply
	if r.ForReal && (r.Table != "" && r.Table != rules.Nat || r.Kind != "" && r.Kind != canary.JumpsMissing) {
		err = errForReal
	}
	if r.ForReal {
		reply.Sort, reply.Table, reply.Kind = api.DrillForReal, rules.Nat, canary.JumpsMissing
		next.kinds.iptables = reply.Kind
		return next, err
	}
	next.choose(r, has)
	if reply.Kind = next.kinds.iptables; next.native {
		reply.Table, reply.Kind = api.DrillNative, next.kinds.native
	} else if reply.Table == "" {
		reply.Table = rules.Nat
	}
	return next, nil
}

// choose sets the tables that the drill tries, and the damage to them. A kind that only one sort
// of table knows is a wish for that one.
func (x *Drill) choose(r api.DrillRequest, has Guarded) {
	iptables, native := r.Table != api.DrillNative, r.Table == api.DrillNative
	if r.Table == "" {
		iptables, native = has.Iptables || !has.Native, has.Native
	}
	if iptables && native && r.Kind != "" && slices.Contains(canary.DrillKinds(), r.Kind) != slices.Contains(NativeKinds(), r.Kind) {
		native = slices.Contains(NativeKinds(), r.Kind)
		iptables = !native
	}
	if iptables {
		x.kinds.iptables = cmp.Or(r.Kind, canary.ChainDeleted)
	}
	if native {
		x.kinds.native = cmp.Or(r.Kind, canary.TableDeleted)
	}
	x.native = !iptables
}

// Native reports whether the drill is at native tables, and no longer at iptables' tables.
func (x *Drill) Native() bool { return x.native }

// Kind returns the damage to the tables that the drill is at.
func (x *Drill) Kind() canary.Verdict {
	if x.native {
		return x.kinds.native
	}
	return x.kinds.iptables
}

// GoesOnAt returns when the drill goes on to native tables; zero: it does not wait for that.
func (x *Drill) GoesOnAt() time.Time { return x.goOn }

// At reports whether the drill waits for the end of a loss of such tables.
func (x *Drill) At(native bool) bool { return x != nil && x.native == native && x.goOn.IsZero() }

// MayGoOn reports whether native tables are left to be tried, and plans that.
func (x *Drill) MayGoOn(now time.Time) bool {
	if x.native || x.kinds.native == "" {
		return false
	}
	x.goOn = now
	return true
}

// GoOn turns to native tables.
func (x *Drill) GoOn() { x.native, x.goOn, x.taken = true, time.Time{}, nil }

// Doubts notes a drill whose write failed. Native tables of its own are removed in any case.
func (s *Drills) Doubts(x *Drill, now time.Time) {
	if s.Last = &x.Reply.DrillEnd; !x.native {
		x.By, s.doubt = now.Add(patience), x
	}
}

// DoubtAt returns a drill with a failed write that may have caused the present loss; nil if
// there is none. A new loss is opened with it, so that its record can name the drill.
func (s *Drills) DoubtAt(now time.Time) *Drill {
	if s.doubt == nil || now.After(s.doubt.By) {
		return nil
	}
	return s.doubt
}

// What returns the parts to remove, for the replayer's write. A drill for real names a chain:
// it removes the jumps there in place of the canary.
func (x *Drill) What() reload.Drill {
	what := reload.Drill{Table: x.Reply.Table, Kind: x.kinds.iptables}
	if x.Reply.Sort == api.DrillForReal {
		what.Chain = Chain
	}
	return what
}

// Took notes the tables from which something was removed, or may have been. TookAll and
// Explains compare a loss with them.
func (x *Drill) Took(done reload.Drilled) {
	x.taken = maps.Clone(done.Marks)
	for id, mark := range done.Tried {
		x.taken = x.taken.With(id, *mark.Tried)
	}
}

// Begin starts a drill that has removed something: until By it expects the proof. quiet is how
// much longer than patience it may take.
func (s *Drills) Begin(x *Drill, done reload.Drilled, quiet time.Duration) {
	for _, f := range rules.Families() {
		if _, ok := done.Marks[f.Table(x.Reply.Table)]; ok {
			x.Reply.Families = append(x.Reply.Families, f)
		}
	}
	x.Reply.Jumps = done.Jumps
	s.begin(x, done.Written, quiet)
}

// BeginNative is Begin for a drill that has taken native tables of its own.
func (s *Drills) BeginNative(x *Drill, taken time.Time, quiet time.Duration) {
	s.begin(x, taken, quiet)
}

func (s *Drills) begin(x *Drill, taken time.Time, quiet time.Duration) {
	if x.Start.IsZero() {
		x.Start, x.Reply.Time = taken, taken
	}
	x.tookAt, x.By = taken, taken.Add(patience+quiet)
	x.step(taken, "canaryd has taken away "+x.Takes())
	s.Under, s.doubt = x, nil
}

// Takes names the removed parts, for the log and the first step.
func (x *Drill) Takes() string {
	switch {
	case x.Reply.Sort == api.DrillForReal:
		return fmt.Sprintf("the protected jumps of %s %s", x.Reply.Table, Chain)
	case x.native && len(x.Reply.Native) > 1:
		return "its own tables " + strings.Join(x.Reply.Native, " and ")
	case x.native:
		return "its own table " + strings.Join(x.Reply.Native, "")
	}
	return fmt.Sprintf("its canary of table %s", x.Reply.Table)
}

// Lasted returns how long the last removal has lasted.
func (x *Drill) Lasted() time.Duration { return time.Since(x.tookAt).Round(time.Millisecond) }

// step adds a line to the timeline. The kernel reports a removal before the call returns.
func (x *Drill) step(at time.Time, what string) {
	at = pace.Latest(at, x.tookAt)
	x.Reply.Steps = append(x.Reply.Steps, api.DrillStep{Seconds: max(at.Sub(x.Start), 0).Seconds(), What: what})
}

// A Course is the course of the loss that a drill met.
type Course struct {
	Record   api.Flush
	Recorded bool // a guarded read showed the loss
	Noticed  time.Time
	Lost     string // the lost tables and their verdicts, for people
	// Foreign: another process took native tables of the drill, too.
	Foreign bool
}

// Answered notes the end of the loss. It returns the drill's result for End and, unless the
// drill has passed, the reason. Without a record the canary was back before canaryd read the
// tables.
func (x *Drill) Answered(c Course) (result api.DrillResult, reason string) {
	x.timeline(c)
	switch r := c.Record; {
	case c.Foreign && r.Drill == x.Reply.Sort:
		return api.DrillVoid, "another process wrote to the drill's own tables, too"
	case !c.Recorded:
		x.Reply.Flush = ""
		return api.DrillFailed, "another process put the canary back before canaryd read the tables"
	case r.Drill != x.Reply.Sort:
		return api.DrillVoid, "another process flushed rules meanwhile, and canaryd answered that: see the flush record"
	case r.Outcome == api.Drilled, r.Outcome == reload.Proved, r.Outcome == reload.Raced:
		return api.DrillPassed, ""
	default:
		return api.DrillFailed, fmt.Sprintf("the replay ended as %s: %s", r.Outcome, r.Detail)
	}
}

// Lasts notes that the loss lasts too long, and why. It returns the drill's result for End:
// void if another process flushed meanwhile, else failed.
func (x *Drill) Lasts(c Course, why string) (result api.DrillResult, reason string) {
	x.timeline(c)
	if c.Recorded && c.Record.Drill != x.Reply.Sort {
		return api.DrillVoid, "another process flushed rules meanwhile, which are not back either: see the flush record"
	}
	return api.DrillFailed, fmt.Sprintf("it is not back after %s: %s", x.Lasted(), why)
}

// timeline adds the steps in the record of a loss to the reply: canaryd drill prints them.
func (x *Drill) timeline(c Course) {
	r := c.Record
	x.Reply.Flush = r.ID
	x.step(r.Time, "a hint: something was written")
	x.step(c.Noticed, "noticed: "+c.Lost)
	if r.WrittenSeconds > 0 {
		x.step(r.Time.Add(api.Seconds(r.WrittenSeconds)), "no process wrote any more: put back")
	}
	if r.AbsentSeconds > 0 {
		proof := "proved by a read of all tables"
		if x.native {
			proof = "proved by a read"
		}
		x.step(r.Time.Add(api.Seconds(r.AbsentSeconds)), proof)
	}
}

// End puts the result into the reply and the log. reason is "" for a drill that passed.
func (x *Drill) End(log klog.Logger, result api.DrillResult, reason string) {
	x.Reply.Result, x.Reply.Reason = result, reason
	if result == api.DrillPassed {
		severity.Notices(log).Info("The drill has passed", "flush", x.Reply.Flush, "after", time.Since(x.Start).Round(10*time.Microsecond))
	} else {
		severity.Warnings(log).Info("The drill has NOT passed", "result", result, "flush", x.Reply.Flush, "reason", reason)
	}
}

// TookAll reports whether the present drill removed its canary from all tables that are known
// to be lost. The log then names the drill in place of a flush.
func (s *Drills) TookAll(lost flushes.Verdicts) bool {
	if s.Under == nil || s.Under.Reply.Sort != api.DrillCanary {
		return false
	}
	for id := range lost {
		if _, ok := s.Under.taken[id]; !ok {
			return false
		}
	}
	return true
}

// Explains reports whether the drill caused the whole loss h of a table. The record then names
// the drill (nameDrill). x may be nil: without a drill only the canary's own trace counts.
func (x *Drill) Explains(id rules.TableID, h flushes.Hit) bool {
	if h.Finding.OnlyDrilled() {
		return true
	}
	if x == nil || x.Reply.Sort != api.DrillForReal {
		return false
	}
	_, taken := x.taken[id]
	f := h.Finding
	return taken && f.Verdict == canary.JumpsMissing && slices.Equal(f.Witnesses, []string{Chain}) && len(f.Emptied)+len(f.Missing) == 0
}
