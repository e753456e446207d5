// Package drill follows a drill: canaryd removes its own canary, or jumps, to show that it notices
// and restores them.
//
// [New] makes a [Drill] of a request, and [Drill.What] names the objects to remove. After the
// removal [Drills.Begin] starts the drill. [Drill.Explains] reports whether the drill caused a
// loss; [Drill.Answered] and [Drill.Lasts] return its result. [Drills.Plan] plans the drills of
// --drill-every.
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
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Chain is the chain from which a drill for real takes the protected jumps.
const Chain = "PREROUTING"

// patience is how long a drill may take, besides two polls and the wait for quiet. A replay at
// 5,000 services takes 2 s, and 13 s by iptables-restore.
const patience = 30 * time.Second

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

// New returns the drill for a request, with the defaults filled in. Its result is refused until
// it has removed something. The error says why a drill for real cannot have that table or kind.
func New(r api.DrillRequest) (next *Drill, err error) {
	next = &Drill{Done: make(chan struct{}), Reply: api.DrillReply{
		DrillEnd: api.DrillEnd{Time: time.Now(), Sort: api.DrillCanary, Result: api.DrillRefused},
		Table:    r.Table, Kind: r.Kind, Alert: api.AlertOfFlush(r.ForReal),
	}}
	reply := &next.Reply
	if reply.Table == "" {
		reply.Table = rules.Nat
	}
	if reply.Kind == "" {
		reply.Kind = canary.ChainDeleted
	}
	if r.ForReal && (reply.Table != rules.Nat || r.Kind != "" && r.Kind != canary.JumpsMissing) {
		err = errForReal
	}
	if r.ForReal {
		reply.Sort, reply.Table, reply.Kind = api.DrillForReal, rules.Nat, canary.JumpsMissing
	}
	return next, err
}

// Doubts notes a drill whose write failed.
func (s *Drills) Doubts(x *Drill, now time.Time) {
	x.By = now.Add(patience)
	s.doubt, s.Last = x, &x.Reply.DrillEnd
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
	what := reload.Drill{Table: x.Reply.Table, Kind: x.Reply.Kind}
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
	x.Start, x.Reply.Time, x.Reply.Jumps = done.Written, done.Written, done.Jumps
	x.By = done.Written.Add(patience + quiet)
	x.step(done.Written, "canaryd has taken away "+x.Takes())
	s.Under, s.doubt = x, nil
}

// Takes names the removed parts, for the log and the first step.
func (x *Drill) Takes() string {
	if x.Reply.Sort == api.DrillForReal {
		return fmt.Sprintf("the protected jumps of %s %s", x.Reply.Table, Chain)
	}
	return fmt.Sprintf("its canary of table %s", x.Reply.Table)
}

// step adds a line to the timeline.
func (x *Drill) step(at time.Time, what string) {
	x.Reply.Steps = append(x.Reply.Steps, api.DrillStep{Seconds: max(at.Sub(x.Start), 0).Seconds(), What: what})
}

// A Course is the course of the loss that a drill met.
type Course struct {
	Record   api.Flush
	Recorded bool // a guarded read showed the loss
	Noticed  time.Time
	Hit      flushes.Verdicts
}

// Answered notes the end of the loss. It returns the drill's result for End and, unless the
// drill has passed, the reason. Without a record the canary was back before canaryd read the
// tables.
func (x *Drill) Answered(c Course) (result api.DrillResult, reason string) {
	x.timeline(c)
	switch r := c.Record; {
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
	return api.DrillFailed, fmt.Sprintf("it is not back after %s: %s", time.Since(x.Start).Round(time.Millisecond), why)
}

// timeline adds the steps in the record of a loss to the reply: canaryd drill prints them.
func (x *Drill) timeline(c Course) {
	r := c.Record
	x.Reply.Flush = r.ID
	x.step(r.Time, "a hint: something was written")
	x.step(c.Noticed, "noticed: "+c.Hit.Text())
	if r.WrittenSeconds > 0 {
		x.step(r.Time.Add(api.Seconds(r.WrittenSeconds)), "no process wrote any more: put back")
	}
	if r.AbsentSeconds > 0 {
		x.step(r.Time.Add(api.Seconds(r.AbsentSeconds)), "proved by a read of all tables")
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
