package api

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A HealthState is the state of a node in one word.
type HealthState string

// The states. Only the first is healthy, and only the first two are ready.
const (
	StateHealthy HealthState = "healthy"
	StateNothing HealthState = "nothing" // there is no rule to guard
	StateStopped HealthState = "stopped" // by a cleanup
	StateLost    HealthState = "lost"    // rules are missing that a replay or a decision brings back
	StatePartial HealthState = "partial" // lost rules could not be put back
	StatePaused  HealthState = "paused"  // the rules are in force; replays are paused
	StateUnknown HealthState = "unknown"
	StateRefused HealthState = "refused" // a declared rule is not in force
)

// A Health is the state of a node. Only Status.Health computes it, and all faces show its
// words.
type Health struct {
	State HealthState
	// Problem is why the node is not healthy; empty if it is. It quotes no rule.
	Problem string
	// Warning is a fact that an operator has to know about a ready node; may be empty.
	Warning string
}

// Healthy reports whether rules are protected, their tables were read, and all are in force.
func (h Health) Healthy() bool { return h.State == StateHealthy }

// Ready reports whether every expected rule is in force, and canaryd would put it back. A node
// with no rule to guard is ready and not healthy.
func (h Health) Ready() bool { return h.State == StateHealthy || h.State == StateNothing }

// String is the first line of canaryd status: "healthy", "healthy, but ..." or "NOT healthy: ...".
func (h Health) String() string {
	switch {
	case !h.Healthy():
		return "NOT healthy: " + h.Problem
	case h.Warning != "":
		return "healthy, but " + h.Warning
	default:
		return "healthy"
	}
}

// Health computes the state of the node. The worst state wins, and an unknown one is not
// healthy.
func (s Status) Health() Health {
	not := func(state HealthState, problem string) Health { return Health{State: state, Problem: problem} }
	all := s.Tally()
	lost, partial, pause := joined("; ", all.lostText(), s.ownerText()), joined(": ", s.partialCount(all), all.partialText()), s.pauseText()
	unread := s.UnreadText()
	switch {
	case s.Stopped:
		return not(StateStopped, "stopped by a cleanup")
	case s.Decision != nil:
		return not(StateLost, joined("; ", s.Decision.Problem().Error(), all.nativeText(), partial, unread))
	case lost != "":
		return not(StateLost, joined("; ", lost, s.failingText(), partial, pause, unread))
	case partial != "":
		return not(StatePartial, joined("; ", partial, pause, unread))
	case unread != "":
		return not(StateUnknown, joined("; ", unread, pause))
	case pause != "":
		return not(StatePaused, pause)
	case len(s.Families) == 0:
		return not(StateUnknown, "no family has been looked at yet")
	case s.ListenRequired && s.ListenError != "":
		return not(StateUnknown, "HTTP is not served: "+s.ListenError)
	}
	if unknown := s.unknownText(all); unknown != "" {
		return not(StateUnknown, unknown)
	}
	if len(all.Refused) > 0 || s.BrokenSource() != nil {
		return not(StateRefused, s.undeclaredText(all))
	}
	if s.NothingProtected != nil {
		text := s.NothingProtected.String()
		return Health{State: StateNothing, Problem: text, Warning: text}
	}
	return Health{State: StateHealthy, Warning: s.warningText()}
}

// Ready returns nil if the node is ready, and else the problem. /readyz answers by it, and a
// drill is refused without it.
func (s Status) Ready() error {
	if h := s.Health(); !h.Ready() {
		return errors.New(h.Problem)
	}
	return nil
}

// ReadyText is the answer of a ready node.
func (s Status) ReadyText() string { return joined(", but ", "ok", s.Health().Warning) }

// Line describes the node in one line, for systemctl status. Every user may read that, so it
// has no rule and no command line.
func (s Status) Line() string {
	h := s.Health()
	line := Upper(h.String())
	switch {
	case s.Paused, h.State == StateNothing:
		line = Upper(h.Problem)
	case h.State == StateStopped:
		line = "Stopped by a cleanup; a restart begins again"
	case !h.Healthy() && s.Generation.Captured.IsZero():
		line = "Waiting for every table to be readable and planted: " + h.Problem
	case h.Healthy():
		line += ": " + s.GuardedText(strconv.Itoa)
	}
	if last, ok := s.LastFlush(); ok {
		line += fmt.Sprintf("; last flush at %s: %s, %s", last.Latest().UTC().Format(time.RFC3339), last.Kind, last.OutcomeText())
	}
	return line
}

// A TableVerdict is the verdict on one table.
type TableVerdict struct {
	Table   string // "ipv4 nat", or of a native table "ip kube-proxy"
	Native  bool
	Verdict canary.Verdict
}

// Name names the table for people: "ipv4 nat", or "table ip kube-proxy".
func (t TableVerdict) Name() string {
	if t.Native && t.Table != allNative {
		return "table " + t.Table
	}
	return t.Table
}

// allNative is the name of all native tables while their names are unknown.
const allNative = "native tables"

// NativeRows returns the native tables. If none is known because of an error, it is one unknown
// row for all, so that the node does not count as healthy.
func (s Status) NativeRows() []NativeTable {
	if s.NativeError != "" && len(s.Native) == 0 {
		return []NativeTable{{Table: allNative, Verdict: canary.Unknown, Why: s.NativeError}}
	}
	return s.Native
}

// A Tally has the tables of a Status that are not in force, native ones last.
type Tally struct {
	Lost    []TableVerdict // with partial ones
	Refused []TableVerdict
	Unknown []TableVerdict
	Tables  int // of all verdicts
}

// Tally sorts the tables by their verdicts. A table with a quarantined rule is partial, also while
// it cannot be read.
func (s Status) Tally() Tally {
	var all Tally
	add := func(t TableVerdict, partial bool) {
		all.Tables++
		switch {
		case t.Verdict.Loss():
			all.Lost = append(all.Lost, t)
			return
		case partial || t.Verdict == canary.Partial:
			all.Lost = append(all.Lost, TableVerdict{t.Table, t.Native, canary.Partial})
		}
		switch t.Verdict {
		case canary.Refused:
			all.Refused = append(all.Refused, t)
		case canary.Intact, canary.Changed, canary.Partial:
		default:
			all.Unknown = append(all.Unknown, t)
		}
	}
	for id, v := range Tables(s.Families) {
		partial := slices.ContainsFunc(s.Quarantined, func(q Quarantined) bool { return q.Family.Table(q.Table) == id })
		if !partial && (v == canary.Intact || v == canary.Changed) {
			all.Tables++ // an intact table is not listed
			continue
		}
		add(TableVerdict{Table: id.String(), Verdict: cmp.Or(v, canary.Unknown)}, partial)
	}
	for _, t := range s.NativeRows() {
		add(TableVerdict{Table: t.Table, Native: true, Verdict: t.Verdict}, false)
	}
	return all
}

// lostText names all tables with a loss that canaryd or an owner can repair: "ipv4 nat is
// emptied, ipv6 nat is emptied".
func (t Tally) lostText() string {
	return t.textOf(func(v TableVerdict) bool { return v.Verdict.Loss() })
}

// nativeText is lostText for native tables only.
func (t Tally) nativeText() string {
	return t.textOf(func(v TableVerdict) bool { return v.Native && v.Verdict.Loss() })
}

// partialText names the tables with rules that could not be put back.
func (t Tally) partialText() string {
	return t.textOf(func(v TableVerdict) bool { return v.Verdict == canary.Partial })
}

// textOf names the lost tables that is accepts, each with its verdict; "" if there are none.
func (t Tally) textOf(is func(TableVerdict) bool) string {
	var parts []string
	for _, v := range t.Lost {
		if is(v) {
			parts = append(parts, fmt.Sprintf("%s is %s", v.Name(), v.Verdict))
		}
	}
	return strings.Join(parts, ", ")
}

// PartialCount counts the rules that were lost and could not be put back: "3 rules were lost and
// could not be put back". It is "" if there are none.
func (s Status) PartialCount() string { return s.partialCount(s.Tally()) }

// partialCount counts the quarantined rules and parts that could not be put back; "" if there
// are none and no table is partial. Health and the page begin their headline with it.
func (s Status) partialCount(all Tally) string {
	partial := func(v TableVerdict) bool { return v.Verdict == canary.Partial }
	lines, parts, shown := 0, 0, math.MaxInt
	for _, t := range s.Native {
		parts += t.QuarantinedParts
	}
	for _, q := range s.Quarantined {
		if !q.Native {
			lines++
		}
	}
	if s.QuarantinedMore > 0 {
		shown = lines
	}
	what := joined(" and ", shownText(lines, shown, "rule"), nativeParts(parts))
	switch n := lines + parts; {
	case n == 0 && !slices.ContainsFunc(all.Lost, partial):
		return ""
	case n == 0:
		return "rules were lost and could not be put back"
	case n == 1:
		return what + " was lost and could not be put back"
	default:
		return what + " were lost and could not be put back"
	}
}

// shownText is CountText, "" for 0. what is the noun in the singular; with shown items or more
// the text says "or more".
func shownText(n, shown int, what string) string {
	if n == 0 {
		return ""
	}
	return CountText(n, shown, what)
}

// nativeParts counts parts of native tables; "" for 0.
func nativeParts(n int) string {
	switch n {
	case 0:
		return ""
	case 1:
		return "one part of a native table"
	}
	return fmt.Sprintf("%d parts of native tables", n)
}

// unknownText says why the node's state is unknown; "" if it is not. It is the error of native
// tables if no other table is unknown, else the first unknown table. all is s.Tally().
func (s Status) unknownText(all Tally) string {
	switch {
	case s.NativeError != "" && !slices.ContainsFunc(all.Unknown, func(t TableVerdict) bool { return !t.Native }):
		return "native tables are unknown: " + strings.ReplaceAll(s.NativeError, "\n", " ")
	case len(all.Unknown) > 0:
		return fmt.Sprintf("%s is %s", all.Unknown[0].Name(), canary.Unknown)
	default:
		return ""
	}
}

// undeclaredText explains why a declared rule is not in force: it is refused, or its file is
// broken.
func (s Status) undeclaredText(all Tally) string {
	refused, broken := "", ""
	for id, v := range Tables(s.Families) {
		if v == canary.Refused && refused == "" {
			refused = s.refusalOf(id)
		}
	}
	if err := s.BrokenSource(); err != nil {
		broken = err.Error() // the refused rule may be of the file's last good text
	}
	return joined("; ", refused, broken)
}

// refusalOf names in one line the declared rule that blocks a table. Every user may read a
// headline, so it quotes no rule.
func (s Status) refusalOf(id rules.TableID) string {
	for _, r := range s.DeclaredRefused {
		if r.Family.Table(r.Table) == id {
			return fmt.Sprintf("%s is not as declared: %s is refused: %s", id, r.Place(), r.Meaning)
		}
	}
	return fmt.Sprintf("%s is not as declared: a rule is refused", id)
}

// warningText names, in a few words, parts that are in force but less safe than they ought to
// be; "" if there are none.
func (s Status) warningText() string {
	parts := []string{s.policyText(), s.NotGuarded(), couldNot(len(s.Opaque), shownText(len(s.Opaque), QuarantinedShown, "rule"))}
	refused, ofTables := 0, 0
	for _, t := range s.Native {
		if ofTables += t.UnreplayableParts; t.Unreplayable != "" && t.UnreplayableParts == 0 {
			refused++
		}
	}
	parts = append(parts, couldNot(refused, shownText(refused, math.MaxInt, "native table")), couldNot(ofTables, nativeParts(ofTables)))
	if s.StateOlder != "" {
		parts = append(parts, "rules were put back from "+s.StateOlder)
	}
	if s.StateError != "" {
		parts = append(parts, "the latest rules are not on disk")
	}
	if s.RulesWithoutOwner != nil {
		parts = append(parts, "kube-proxy's rules have no owner")
	}
	return joined(", and ", parts...)
}

// couldNot warns that n things in force could not be put back after a loss; "" if there are
// none. counted names them with their number.
func couldNot(n int, counted string) string {
	switch n {
	case 0:
		return ""
	case 1:
		return counted + " could not be put back if it were lost"
	default:
		return counted + " could not be put back if they were lost"
	}
}

// NotGuarded names rules and tables above canaryd's limits, which exist and are not guarded; ""
// if there are none. It is part of the health's warning.
func (s Status) NotGuarded() string {
	var what []string
	if n := len(s.LeftOut); n > 0 {
		what = append(what, "the rules of "+CountText(n, LeftOutShown, "chain"))
	}
	if n := s.NativeNotGuarded(); n > 0 {
		what = append(what, CountText(n, math.MaxInt, "native table"))
	}
	switch {
	case len(what) == 0:
		return ""
	case len(s.LeftOut) == 0 && s.NativeNotGuarded() == 1:
		return what[0] + " is not guarded"
	}
	return strings.Join(what, " and ") + " are not guarded"
}

// NativeNotGuarded counts the native tables above canaryd's limits of tables and of rules.
func (s Status) NativeNotGuarded() int { return s.NativeOverLimit + len(s.NativeLeftOut) }

// joined joins the parts that are not empty.
func joined(by string, parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(p string) bool { return p == "" }), by)
}
