package web

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The limits of the page. The control socket has the rest.
const (
	recordsShown = 50
	chainsShown  = 60 // of one flush, the largest losses
	// blindAfter is the age of the last examination from which the page shows the state as
	// unknown. The alert CanarydBlind has the same limit.
	blindAfter = time.Minute
)

// A pageView holds the data of the page, and makes its elements (document).
type pageView struct {
	api.Status
	Build string // pageBuild; the page of an older canaryd reloads itself
	Node  string // may be empty
	// Version is this canaryd's version, and Began the time of its start.
	Version string
	Began   time.Time
	Now     time.Time
	// Guarded are the native tables that canaryd guards, and Immune the tables that need no guard.
	Guarded, Immune []api.NativeTable
	Keeper, Standby string // by family

	Verdict  pageVerdict
	Warnings []pageWarning
	Tables   []rules.TableName
	Rows     []pageRow
	Records  []pageRecord
	Older    int // records that are not shown
	Strip    pageStrip
}

// A pageVerdict is the headline of the page.
type pageVerdict struct {
	Class string // healthy, partial, lost, unknown, paused, stopped
	Title string
	Since time.Time // appended to the title, unless it is zero
	Lines []string
}

// A pageWarning is a fact or a task for the operator, in addition to the headline.
type pageWarning struct {
	Name, Class, Title, Text, Command string
	// Alert is the alert that fires for it, with a section in the runbook; empty if there is
	// none.
	Alert   string
	Chains  []string
	Choices []api.Choice // commands; the operator runs one
}

// A pageRow has one family's verdicts, in the order of Tables.
type pageRow struct {
	Family   rules.Family
	Label    string
	Disabled string // the reason if it is not watched
	Cells    []pageCell
}

// A pageCell is the verdict on one table.
type pageCell struct {
	Words                []string // of the verdict, between its underscores
	Class, Sign, Meaning string
}

// icon returns the address of the picture in the browser's tab, which is the picture itself.
func (v pageVerdict) icon() string {
	colour := map[string]string{"healthy": "1a8a45", "lost": "c0202b", "paused": "2f6fd6"}[v.Class]
	return "data:image/svg+xml,%3Csvg%20xmlns=%27http://www.w3.org/2000/svg%27%20viewBox=%270%200%2016%2016%27%3E" +
		"%3Ccircle%20cx=%278%27%20cy=%278%27%20r=%277%27%20fill=%27%23" + cmp.Or(colour, "c98a12") + "%27/%3E%3C/svg%3E"
}

// of returns the view of s at now. dead is the reason why the loop hangs; nil if it does not. The
// receiver has the fields that do not change.
func (v pageView) of(s api.Status, dead error, now time.Time) pageView {
	v.Status, v.Now = s, now
	v.Tables = slices.DeleteFunc(protect.Tables(), func(t rules.TableName) bool {
		return protect.OnDemand(t) && !slices.ContainsFunc(rules.Families(), func(f rules.Family) bool { return s.Families[f][t] != "" })
	})
	for _, f := range rules.Families() {
		row := pageRow{Family: f, Label: familyLabel(f), Disabled: s.DisabledFamilies[f]}
		verdicts, enabled := s.Families[f]
		if !enabled && row.Disabled == "" {
			continue
		}
		if enabled {
			row.Disabled = ""
		}
		for _, t := range v.Tables {
			if verdicts[t] == "" && protect.OnDemand(t) {
				row.Cells = append(row.Cells, pageCell{Words: []string{"empty"}, Class: "good", Sign: "–", Meaning: "nothing is protected in it"})
				continue
			}
			row.Cells = append(row.Cells, cellOf(cmp.Or(verdicts[t], canary.Unknown)))
		}
		v.Rows = append(v.Rows, row)
	}
	for _, t := range s.Native {
		if t.Immune {
			v.Immune = append(v.Immune, t)
		} else {
			v.Guarded = append(v.Guarded, t)
		}
	}
	v.Keeper, v.Standby = s.KeeperText(), s.StandbyText(func(t time.Time) string { return agoText(t, now) })
	v.Verdict = headlineOf(s, dead, now)
	v.Warnings = warningsOf(s, now)
	for _, f := range s.Flushes[:min(len(s.Flushes), recordsShown)] {
		v.Records = append(v.Records, recordOf(f, len(v.Tables), now))
	}
	v.Older = len(s.Flushes) - len(v.Records)
	v.Strip = stripOf(v.Records, now)
	return v
}

func familyLabel(f rules.Family) string { return strings.Replace(f.String(), "ip", "IP", 1) }

// headlineOf returns the headline for the node's health. The worst state wins, and an unknown
// one is not healthy. dead is the reason why the loop hangs; nil if it does not.
func headlineOf(s api.Status, dead error, now time.Time) pageVerdict {
	health, all := s.Health(), s.Tally()
	lost, unknown := losses(all.Lost), namesOf(all.Unknown)
	switch {
	case s.Stopped:
		return pageVerdict{Class: "stopped", Title: "Stopped", Lines: []string{"A cleanup removed the canaries. Nothing is watched until canaryd is restarted."}}
	case dead != nil:
		return since("unknown", "Unknown", s.LastKnown, "canaryd answers but does not work: "+dead.Error()+".")
	case len(lost) > 0 || !s.LossSince.IsZero():
		title := "Rules missing"
		if len(lost) == 0 && len(unknown) > 0 {
			title = "Rules may be missing"
		}
		return since("lost", title, s.LossSince, lossLines(s, lost, unknown, now)...)
	case health.State == api.StatePartial:
		return pageVerdict{Class: "partial", Title: api.Upper(s.PartialCount()), Lines: partialLines(s, all, now)}
	case len(s.StateUnread) > 0:
		return since("unknown", "Stored rules unreadable", s.StateUnread[0].Since,
			"canaryd does not know whether all rules of its last run are in force. It guards the present rules.")
	case len(s.Families) == 0:
		return pageVerdict{Class: "unknown", Title: "Not known yet", Lines: []string{"No family has been looked at yet."}}
	case len(unknown) > 0:
		return since("unknown", "Unknown", s.LastKnown, unknownLines(s, unknown)...)
	case !s.LastKnown.IsZero() && now.Sub(s.LastKnown) > blindAfter:
		return since("unknown", "Unknown", s.LastKnown, "The canaries are in place, but canaryd has not known the content of the tables for "+spanText(now.Sub(s.LastKnown))+".")
	case len(s.DeclaredRefused) > 0:
		return since("partial", "Declared rules refused", s.DeclaredRefused[0].Since, refusedLines(s)...)
	case s.BrokenSource() != nil:
		return pageVerdict{Class: "partial", Title: "Declared rules unknown", Lines: []string{api.Upper(s.BrokenSource().Error()) + ".",
			"All else that ought to be in force is. The file is read again as soon as it changes."}}
	case s.Paused:
		v := pageVerdict{Class: "paused", Title: "Paused", Lines: []string{"The rules are in force. canaryd records losses until then, but puts nothing back."}}
		if !s.PausedUntil.IsZero() {
			v.Title, v.Since = "Paused until", s.PausedUntil
		}
		return v
	}
	if n := s.NothingProtected; n != nil {
		return pageVerdict{Class: "unknown", Title: "Nothing protected", Lines: []string{api.Upper(n.String()) + ".",
			"A new node has no such rule for a moment. On an older node, check --protect and the mode of kube-proxy."}}
	}
	if !health.Healthy() {
		return pageVerdict{Class: "unknown", Title: "Not healthy", Lines: []string{api.Upper(health.Problem) + "."}}
	}
	if health.Warning != "" {
		return pageVerdict{Class: "partial", Title: api.Upper(health.String()), Lines: inForceLines(s, now)}
	}
	return pageVerdict{Class: "healthy", Title: "Healthy", Lines: inForceLines(s, now)}
}

// unknownLines names the tables with unknown state, and the kernel's reasons, if it has any.
// headlineOf shows them if nothing is lost.
func unknownLines(s api.Status, unknown []string) []string {
	next := "Nothing is replayed on a guess; the log says why."
	var causes []string
	for f, cause := range api.InOrder(s.Unreadable) {
		causes = append(causes, fmt.Sprintf("%s: %s", f, cause))
	}
	if len(causes) > 0 {
		next = "The kernel says, of " + strings.Join(causes, "; ") + ". Nothing is replayed on a guess."
	}
	return []string{"Could not be read, or has no canary yet: " + strings.Join(unknown, ", ") + ".", next}
}

// losses returns the tables with a loss that canaryd or an owner can repair.
func losses(list []api.TableVerdict) []api.TableVerdict {
	return slices.DeleteFunc(slices.Clone(list), func(t api.TableVerdict) bool { return !t.Verdict.Loss() })
}

// namesOf names tables.
func namesOf(list []api.TableVerdict) []string {
	var names []string
	for _, t := range list {
		names = append(names, t.Name())
	}
	return names
}

// since returns a headline with a time after its title, unless the time is zero. class is the
// CSS class that colours it.
func since(class, title string, t time.Time, lines ...string) pageVerdict {
	if !t.IsZero() {
		title += " since"
	}
	return pageVerdict{Class: class, Title: title, Since: t, Lines: lines}
}

// lossLines says which tables lack rules and for how long, and why the rules are not back or
// when they will be. headlineOf shows them. unknown are the tables that could not be read.
func lossLines(s api.Status, lost []api.TableVerdict, unknown []string, now time.Time) []string {
	next := "canaryd is putting them back."
	switch {
	case s.Decision != nil:
		next = "They were lost while canaryd did not run, and are not put back unasked."
	case onlyAwaiting(s, lost) && slices.ContainsFunc(s.Native, func(t api.NativeTable) bool { return t.LeftOut }):
		next = "They are not put back unasked: canaryd status has the choices for each."
	case onlyAwaiting(s, lost):
		next = "They are not put back unasked: canaryd restore puts them back, canaryd dismiss accepts the loss."
	case s.Mode == api.Observe:
		next = "Observe mode: their owner has to put them back."
	case !s.OwnerUntil.IsZero():
		next = "They were deleted by name: canaryd leaves them to their owner until " + clockText(s.OwnerUntil, now) + ", and then puts them back."
	case s.Paused && s.PausedUntil.IsZero():
		next = "Paused: nothing is put back before canaryd resume."
	case s.Paused:
		next = "Paused: nothing is put back until " + clockText(s.PausedUntil, now) + ", or canaryd resume."
	case len(s.Failing) > 0:
		next = failingLine(s.Failing, now)
	}
	what := "Missing"
	if !s.LossSince.IsZero() {
		what += " for " + durationText(now.Sub(s.LossSince))
	}
	if len(lost) > 0 {
		what += " in " + tablesOf(lost)
	}
	if len(unknown) > 0 {
		what += "; unknown: " + strings.Join(unknown, ", ")
	}
	return append([]string{what + ".", next}, standbyLines(s)...)
}

// failingLine explains why the rules are not back although a replay was tried, and gives the
// time of the next try. lossLines shows it.
func failingLine(failing []api.Failing, now time.Time) string {
	var parts []string
	for _, f := range failing {
		part := "They are not back, because " + f.Reason + "; " + f.Advice + ". Failed " + api.CountText(f.Attempts, f.Attempts+1, "time")
		if f.Retry.After(now) {
			part += ", next try in " + durationText(f.Retry.Sub(now))
		}
		parts = append(parts, part+".")
	}
	return strings.Join(parts, " ")
}

// standbyLines names the families and native tables that the standby translates now.
func standbyLines(s api.Status) []string {
	var open []string
	for f, standby := range api.InOrder(s.Standby) {
		if standby.State == api.StandbyOpen {
			open = append(open, familyLabel(f))
		}
	}
	for _, t := range s.Native {
		if t.Standby != nil && t.Standby.State == api.StandbyOpen {
			open = append(open, "table "+api.TableCell(t.Table))
		}
	}
	if len(open) == 0 {
		return nil
	}
	return []string{"Meanwhile the standby translates new connections of " + strings.Join(open, " and ") + "."}
}

// tablesOf names the lost tables with their verdicts. Tables with the same verdict share it,
// because most flushes hit many tables in the same way.
func tablesOf(lost []api.TableVerdict) string {
	var parts []string
	for i := 0; i < len(lost); {
		end := i
		var names []string
		for ; end < len(lost) && lost[end].Verdict == lost[i].Verdict; end++ {
			names = append(names, lost[end].Name())
		}
		parts = append(parts, fmt.Sprintf("%s (%s)", strings.Join(names, ", "), lost[i].Verdict))
		i = end
	}
	return strings.Join(parts, ", ")
}

// inForceLines returns the lines under a healthy headline: the counts of rules in force, other
// facts about them, and the last flush and drill. partialLines replaces the first line.
func inForceLines(s api.Status, now time.Time) []string {
	lines := []string{"All rules that ought to be in force are."}
	switch n := s.Generation.Rules + s.NativeCounts().Rules; {
	case len(s.LeftOut)+len(s.NativeLeftOut) > 0 && n == 0:
		lines[0] = "All else that ought to be in force is."
	case n > 0:
		lines[0] = s.GuardedText(countText) + " are in force."
	}
	if len(s.Owners) > 0 {
		lines = append(lines, s.ProtectText(countText)+".")
	}
	if text := s.Unguarded.Text(); text != "" {
		lines = append(lines, "Not guarded: "+text+".")
	}
	if n := len(s.LedTo); n > 0 {
		var names []string
		for _, l := range s.LedTo[:min(n, 5)] {
			names = append(names, l.String())
		}
		lines = append(lines, api.Upper(api.CountText(n, api.LedToShown, "chain"))+" of other owners are guarded too: "+strings.Join(names, "; ")+".")
	}
	if s.Mode == api.Observe {
		lines = append(lines, "Observe mode: canaryd records losses, but puts nothing back.")
	}
	if f, ok := s.LastFlush(); ok {
		line := "Last flush " + agoText(f.Latest(), now)
		if f.Outcome.Done() && f.AbsentSeconds > 0 {
			line += ", back after " + absentText(f, now)
		}
		lines = append(lines, line+".")
	}
	if d := s.LastDrill; d != nil && d.Result == api.DrillPassed {
		lines = append(lines, "The last drill passed "+agoText(d.Time, now)+".")
	}
	return lines
}

// cellOf returns the cell of a verdict, in the words of the metrics and the log. A verdict
// without a case of its own is a loss, shown in red.
func cellOf(v canary.Verdict) pageCell {
	c := pageCell{Words: strings.Split(string(v), "_"), Class: "bad", Sign: "✕", Meaning: kindMeanings[v]}
	switch v {
	case canary.Intact:
		c.Class, c.Sign, c.Meaning = "good", "✓", "the generation is in force"
	case canary.Changed:
		c.Class, c.Sign, c.Meaning = "good", "✓", "its owner changed it, and the generation follows"
	case canary.Partial:
		c.Meaning = "rules of it were lost and could not be put back; all else of it is in force"
	case canary.Refused:
		c.Meaning = "a rule that is declared for it is refused; its previous rules stay"
	case canary.Unknown:
		c.Class, c.Sign, c.Meaning = "warn", "?", "it could not be read, or no canary is planted yet"
	}
	return c
}

var kindMeanings = map[canary.Verdict]string{
	canary.JumpsMissing:                 "a built-in chain was flushed, or jumps were deleted by name",
	canary.Emptied:                      "rules were flushed, chains left, as iptables -F does",
	canary.ChainDeleted:                 "chains were deleted, as iptables -X or a full restore does",
	canary.TableDeleted:                 "the table was deleted, as nft flush ruleset does",
	canary.Replaced:                     "saved rules were restored over it",
	canary.Drifted:                      "another process changed declared rules",
	canary.Verdict(native.Disabled):     "the flag dormant was set: the kernel attaches none of the table's chains",
	canary.Verdict(native.Unattributed): "the table was deleted alone, by its owner or another process",
	api.Removed:                         "canaryd took rules away that the generation does not have which an operator asked for",
	api.RemovedByOwner:                  "most of a table was removed by name, and its owner is not known to have done it",
}

var outcomeMeanings = map[api.Outcome]string{
	api.Drilled:          "canaryd took its own canary, which packets do not meet, and it is back and proved",
	reload.Proved:        "everything is in force again, and a read showed it",
	reload.Raced:         "everything is in force again, but another process wrote meanwhile",
	reload.Partial:       "some tables or rules are still missing",
	reload.Failed:        "nothing could be put back; it is tried again",
	reload.Skipped:       "canaryd wrote nothing: the owner put the rules back",
	api.OwnersDecision:   "the owner has removed it, and canaryd has accepted that",
	api.WaitingPaused:    "replays are paused; canaryd puts the rules back when the pause ends",
	api.WaitingObserve:   "canaryd only observes; the rules' owner has to put them back",
	api.TakenForOwners:   "canaryd takes it for the owner's doing, and puts nothing back",
	api.WaitingLock:      "another process holds the xtables lock; canaryd puts the rules back once it lets go",
	api.WaitingOwner:     "deleted by name: its owner has a moment to write it again or to delete the rest",
	api.Pending:          "it is not answered yet",
	api.Requested:        "an operator asked for it: there is nothing to put back",
	api.Interrupted:      "canaryd ended before its replay, or the table was lost in another way; the later loss has a record of its own",
	api.AwaitingDecision: "the rules are not put back unasked: an operator has to decide, or their owner to write them",
	api.Dismissed:        "an operator has accepted the loss",
}
