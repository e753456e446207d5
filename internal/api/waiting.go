package api

import (
	"fmt"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/reload"
)

// The outcomes of a flush that lasts because canaryd may not put the rules back. No metric has
// them.
const (
	WaitingPaused  Outcome = "waiting: paused"  // until the pause ends
	WaitingObserve Outcome = "waiting: observe" // until the rules' owner writes them, or a restore
	// WaitingLock lasts until the process that LockedBy names releases the xtables lock.
	WaitingLock Outcome = "waiting: the lock"
	// WaitingOwner is for rules that were deleted individually. It lasts until their owner
	// writes them again or deletes the rest, for --jump-grace at most. The record is kept only
	// if it lasts longer.
	WaitingOwner Outcome = "waiting: its owner"
)

// Open reports whether the rules of a record are still missing, as far as this run knows.
func (f Flush) Open() bool {
	return f.AbsentSeconds == 0 && (f.Outcome == AwaitingDecision || !f.Earlier && f.Unanswered())
}

// Bound reports whether AbsentFor returns only a bound: the time of the loss is unknown, and
// the rules were in force at LastInForce.
func (f Flush) Bound() bool { return f.AbsentAtMost || f.Open() && !f.LastInForce.IsZero() }

// NoticedFor returns the time from the first evidence to the verdict. If the rules were last
// known to be in force before that evidence, it is a bound, counted from then.
func (f Flush) NoticedFor() (noticed time.Duration, bound bool) {
	noticed = Seconds(f.NoticedSeconds)
	if f.LastInForce.IsZero() {
		return noticed, false
	}
	return noticed + max(f.Time.Sub(f.LastInForce), 0), true
}

// Unanswered reports whether the outcome is that of a flush that still lasts.
func (f Flush) Unanswered() bool {
	return slices.Contains([]Outcome{Pending, WaitingLock, WaitingOwner, WaitingPaused, WaitingObserve, reload.Failed}, f.Outcome)
}

// AbsentFor returns how long the rules of a record were missing, or have been missing until now. It
// returns false if that is unknown, or if no rule is missed.
func (f Flush) AbsentFor(now time.Time) (time.Duration, bool) {
	switch {
	case f.AbsentSeconds > 0:
		return Seconds(f.AbsentSeconds), true
	case f.Open() && !f.LastInForce.IsZero():
		return max(now.Sub(f.LastInForce), 0), true
	case f.Open():
		return max(now.Sub(f.Time), 0), true
	default:
		return 0, false
	}
}

// AbsentText words how long the rules of a record were missing, or have been missing so far; ""
// if none are missed.
func (f Flush) AbsentText(now time.Time) string {
	absent, known := f.AbsentFor(now)
	text := fmt.Sprintf("%.3fs", absent.Seconds())
	switch {
	case f.Requested():
		return ""
	case !known:
		return "unknown"
	case f.Open() && absent >= time.Minute:
		text = absent.Round(time.Second).String() + " so far"
	case f.Open():
		text = fmt.Sprintf("%.1fs so far", absent.Seconds())
	}
	if f.Bound() {
		text = "at most " + text
	}
	if f.Standby != nil {
		text += fmt.Sprintf(" (standby after %.3fs)", f.Standby.AfterSeconds)
	}
	return text
}

// pauseText says that replays are paused, and until when; "" if they are not. Health counts
// that as a problem.
func (s Status) pauseText() string {
	switch {
	case !s.Paused:
		return ""
	case s.PausedUntil.IsZero():
		return "replays are paused"
	default:
		return "replays are paused until " + s.PausedUntil.UTC().Format(time.RFC3339)
	}
}

// PauseOrigin names the client that paused replays, and the time: " by ada since
// 2026-03-04T05:06:07Z"; "" if that is unknown.
func (s Status) PauseOrigin() (text string) {
	if s.PausedBy != "" {
		text = " by " + s.PausedBy
	}
	if !s.PausedSince.IsZero() {
		text += " since " + s.PausedSince.UTC().Format(time.RFC3339)
	}
	return text
}

// ownerText is the time until which canaryd leaves missing rules to their owner; "" if there is
// none.
func (s Status) ownerText() string {
	if s.OwnerUntil.IsZero() {
		return ""
	}
	return "canaryd leaves that to its owner until " + s.OwnerUntil.UTC().Format(time.RFC3339)
}

// Seconds returns a number of seconds as a duration.
func Seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
