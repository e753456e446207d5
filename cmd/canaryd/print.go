package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/terminal"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// shownFlushes is how many flush records the table of status shows.
const shownFlushes = 10

func printJSON(w io.Writer, value any) error { return terminal.JSON(w, value) }

// show prints value as JSON if output (-o) is "json", and else the text of write, for people.
// All commands print their answers by it.
func show(w io.Writer, output string, value any, write func(io.Writer)) error {
	if output == "json" {
		return printJSON(w, value)
	}
	_, err := io.WriteString(w, textFor(w, write))
	return err
}

// printVerdicts prints the result of check in the format of -o (output): the verdicts. It adds
// the headline if rules are in quarantine, stored files are unreadable, or there is a warning.
func printVerdicts(w io.Writer, output string, s api.Status) error {
	s.Native = s.NativeRows()
	all := struct {
		Headline string                        `json:"headline,omitempty"`
		Families map[rules.Family]api.Verdicts `json:"families"`
		Native   []api.NativeTable             `json:"native,omitempty"`
	}{Families: s.Families, Native: s.Native}
	if h := s.Health(); s.PartialCount() != "" || len(s.StateUnread) > 0 || h.Warning != "" {
		all.Headline = h.String()
	}
	return show(w, output, all, func(w io.Writer) {
		writeVerdicts(w, s)
		if all.Headline != "" {
			fmt.Fprintln(w, healthText(w, s))
		}
	})
}

// writeVerdicts writes the verdicts, first the kind of tables with most of the guarded rules.
func writeVerdicts(w io.Writer, s api.Status) {
	rows := [][]string{{"FAMILY", "TABLE", "VERDICT"}}
	for id, v := range api.Tables(s.Families) {
		rows = append(rows, []string{id.Family.String(), id.Name, string(v)})
	}
	native := nativeRows(s.Native)
	switch {
	case s.OnlyNative():
		writeTable(w, native)
		fmt.Fprintf(w, "\n%s\n", s.IptablesText())
	case s.NativeFirst():
		writeTable(w, native)
		fmt.Fprintln(w)
		writeTable(w, rows)
	case len(s.Native) > 0:
		writeTable(w, rows)
		fmt.Fprintln(w)
		writeTable(w, native)
	default:
		writeTable(w, rows)
	}
}

// guardsText names for status the mode, the backend, and the number of guarded rules with their
// generation.
func guardsText(s api.Status) string {
	mode, guarded := fmt.Sprintf("mode %s, ", s.Mode), s.GuardedText(strconv.Itoa)
	backend := fmt.Sprintf("backend %s %s (%s)\n", s.Backend.Name, cmp.Or(s.Backend.Version, "without iptables"), plain(s.Backend.Reason))
	if s.OnlyNative() {
		return mode + "guarding " + guarded + "\n" + backend
	}
	g := s.Generation
	return mode + backend + fmt.Sprintf("generation %s from %s: %s, captured %s\n", g.ID, g.Source, guarded, ago(g.Captured))
}

// ownersText names the owners whose rules are guarded, and counts unguarded chains and tables.
func ownersText(s api.Status) string {
	text := ""
	if found := s.ProtectText(strconv.Itoa); found != "" {
		text = plain(oneLine(found)) + "\n"
	}
	if unguarded := s.Unguarded.Text(); unguarded != "" {
		text += "not guarded: " + plain(oneLine(unguarded)) + "\n"
	}
	return text
}

func printStatus(w io.Writer, output string, s api.Status) error {
	return show(w, output, s, func(w io.Writer) { writeStatus(w, s) })
}

// writeStatus writes health, warnings, verdicts, flushes and stored generations.
func writeStatus(w io.Writer, s api.Status) {
	fmt.Fprintf(w, "%s\n%s%s", healthText(w, s), guardsText(s), ownersText(s))
	for _, text := range []string{
		baselineLine(s), line("keeper", s.KeeperText()), lastDrillText(w, s.LastDrill), line("standby", s.StandbyText(ago)) + "\n",
		decisionText(s.Decision), replaysText(s), sourceErrorsText(s.SourceErrors), refusedText(s.DeclaredRefused),
		ownerlessText(s.RulesWithoutOwner), notGuardedText(s), ledToText(s.LedTo), acceptedText(s.Accepted), troubleText(s), nativeText(s),
	} {
		fmt.Fprint(w, text)
	}
	writeVerdicts(w, s)
	writeFlushes(w, s)
	writeStored(w, s)
	writeNativeStored(w, s)
}

// healthText returns the first line of status and check, in the colour of the health if w is a
// terminal.
func healthText(w io.Writer, s api.Status) string {
	h, c := s.Health(), green
	switch {
	case !h.Ready():
		c = red
	case h.Warning != "":
		c = yellow
	}
	return paint(w, c, plain(oneLine(h.String())))
}

// replaysText says that replays are paused, by whom and why, or that a process keeps undoing
// them; "" in normal operation.
func replaysText(s api.Status) string {
	text := ""
	if s.Paused {
		text += fmt.Sprintf("replays are paused%s until %s; canaryd resume ends that\n", plain(oneLine(s.PauseOrigin())), s.PausedUntil.UTC().Format(time.RFC3339))
		if s.PausedWhy != "" {
			text += "the reason: " + plain(oneLine(s.PausedWhy)) + "\n"
		}
	}
	if s.Contended {
		text += "a process keeps undoing the replays; the log names it\n"
	}
	return text
}

// notGuardedText names for status the rules that canaryd cannot put back, or does not guard; ""
// if there are none.
func notGuardedText(s api.Status) string {
	var text strings.Builder
	for _, q := range s.Quarantined {
		if !q.Waits {
			fmt.Fprintf(&text, "quarantined: %s: %s (%s)\n", q.TableName(), plain(oneLine(q.Part())), plain(oneLine(q.Reason)))
		}
	}
	if s.QuarantinedMore > 0 {
		fmt.Fprintf(&text, "quarantined: %s more\n", count(s.QuarantinedMore, "part"))
	}
	for _, w := range s.WaitingChains {
		reason := w.Reason
		if w.Rules > 1 {
			reason = strings.Replace(reason, "waits", "wait", 1)
		}
		table := api.Quarantined{Family: w.Family, Table: w.Table, Native: w.Native}.TableName()
		fmt.Fprintf(&text, "waiting: %s %s: %s %s\n", table, plain(w.Chain), count(w.Rules, "rule"), plain(oneLine(reason)))
	}
	for _, q := range s.Opaque {
		fmt.Fprintf(&text, "not put back if it is lost: %s %s %s: %s (%s)\n", q.Family, q.Table, plain(q.Chain), plain(q.Rule), plain(oneLine(q.Reason)))
	}
	for _, l := range s.LeftOut {
		fmt.Fprintf(&text, "NOT guarded: %s; there are more rules than canaryd keeps (--max-rules)\n", plain(l.String()))
	}
	for _, l := range s.LeadsOut {
		fmt.Fprintf(&text, "NOT guarded: %s; --protect names them, and has to name the chain instead\n", plain(l.String()))
	}
	return text.String()
}

// ledToText names the chains of other owners that are guarded.
func ledToText(list []api.LedTo) string {
	var text strings.Builder
	for _, l := range list {
		fmt.Fprintf(&text, "also guarded: %s\n", plain(l.String()))
	}
	return text.String()
}

// acceptedText names large removals that canaryd took for the owner's decision, or that hit
// unguarded tables. They are not put back.
func acceptedText(list []api.Accepted) string {
	var text strings.Builder
	for _, a := range list {
		what, when := "accepted as its owner's doing", "learned"
		if a.NotGuarded {
			what, when = "not guarded, and not put back", "seen"
		}
		fmt.Fprintf(&text, "%s: %s, %s %s, by %s\n", what, plain(oneLine(a.String())), when, ago(a.Time), plain(oneLine(a.ByText())))
	}
	return text.String()
}

// troubleText describes troubles of the backend, the journal, the HTTP address and families.
func troubleText(s api.Status) string {
	var text strings.Builder
	if s.Backend.Mixed {
		fmt.Fprintf(&text, "both backends hold rules; those of %s are guarded\n", s.Backend.Name)
	}
	if s.Backend.Mismatch {
		text.WriteString("the other backend is in use by now, and its rules are NOT guarded: restart canaryd, or say which is right with --backend\n")
	}
	for _, u := range s.StateUnread {
		fmt.Fprintf(&text, "cannot be read: %s, since %s: %s\n", plain(u.File), ago(u.Since), plain(oneLine(u.Reason)))
	}
	text.WriteString(stateText(s))
	if s.JournalError != "" {
		fmt.Fprintf(&text, "flush records are NOT on disk: %s\n", plain(oneLine(s.JournalError)))
	}
	if s.ListenError != "" {
		fmt.Fprintf(&text, "metrics and page are NOT served, and another program may answer there: %s\n", plain(oneLine(s.ListenError)))
	}
	for _, f := range rules.Families() {
		if why, ok := s.DisabledFamilies[f]; ok {
			fmt.Fprintf(&text, "%s is not watched: %s\n", f, plain(oneLine(why)))
		}
		if why, ok := s.Unreadable[f]; ok {
			fmt.Fprintf(&text, "%s CANNOT be read: %s\n", f, plain(oneLine(why)))
		}
	}
	return text.String()
}

// stateText warns that the latest rules are not on disk; "" if they are.
func stateText(s api.Status) string {
	if s.StateError == "" {
		return ""
	}
	saved := "never saved"
	if !s.StateSaved.IsZero() {
		saved = fmt.Sprintf("last saved %s, %s since", ago(s.StateSaved), count(s.StateBehind, "change"))
	}
	return fmt.Sprintf("the latest rules are NOT on disk (%s); a restart would not know them: %s\n", saved, plain(oneLine(s.StateError)))
}

// refusedText names the refused declared rules, each with the operator's file and line.
func refusedText(list []api.Refused) string {
	var text strings.Builder
	for _, r := range list {
		what := plain(cmp.Or(r.Rule, "the table as a whole"))
		fmt.Fprintf(&text, "declared, but refused: %s %s %s: %s: %s (%s)\n",
			r.Family, r.Table, plain(r.Chain), plain(cmp.Or(r.Where, "-")), what, plain(oneLine(cmp.Or(r.Reason, r.Meaning))))
	}
	return text.String()
}

// sourceErrorsText names each broken source or document, and the rules that are in force in its
// place; "" if all can be used.
func sourceErrorsText(list []api.SourceError) string {
	var text strings.Builder
	for _, e := range list {
		what := map[api.Instead]string{
			api.LastGood:   "its last good rules stay in force",
			api.StoredGood: "the rules that an earlier run read from it stay in force",
			api.NoneGood:   "NOTHING of it is in force",
			api.AllButThis: "the rest of the file counts",
		}[e.InForce]
		fmt.Fprintf(&text, "error in %s: %s; %s, since %s\n", e.Source, plain(oneLine(cmp.Or(e.Reason, e.Where))), what, ago(e.Since))
	}
	return text.String()
}

// ownerlessText names the remedies for rules that no process maintains.
func ownerlessText(o *api.OwnerlessRules) string {
	if o == nil {
		return ""
	}
	lines := fmt.Sprintf("kube-proxy's rules have no owner: they are in force (%s), but KUBE-PROXY-CANARY was last seen %s\n", strings.Join(api.Words(o.Families), ", "), ago(o.Since))
	for _, c := range o.Choices {
		lines += fmt.Sprintf("  if %s: %s\n", c.If, c.Command)
	}
	return lines
}

// decisionText names the two commands between which the operator has to decide after a loss
// that canaryd does not put back by itself. d is nil if none is needed.
func decisionText(d *api.Decision) string {
	if d == nil {
		return ""
	}
	return fmt.Sprintf("a decision is needed, because %s\n  to put the rules back  %s\n  to accept the loss     %s\n",
		plain(oneLine(d.Reason)), d.Restore, d.Dismiss)
}

// line is a line of a status that begins with a name; "" without a text. text may have several
// lines or odd characters.
func line(name, text string) string {
	if text == "" {
		return ""
	}
	return name + " " + plain(oneLine(text)) + "\n"
}

// writeFlushes writes the newest flush records for `canaryd status`, shownFlushes at most, and
// counts the older ones. Without a record it says that no flush was seen. While the tables are
// still being read, it says since when rules are missing.
func writeFlushes(w io.Writer, s api.Status) {
	flushes := s.Flushes
	switch {
	case len(flushes) > 0:
	case s.LossSince.IsZero():
		fmt.Fprintln(w, "\nno flush was seen")
		return
	default: // the tables are still being read
		fmt.Fprintln(w, "\nno flush is recorded yet; rules were found missing", ago(s.LossSince))
		return
	}
	rows := [][]string{{"FLUSH", "WHEN", "KIND", "TABLES", "LOST", "BY", "ABSENT", "OUTCOME"}}
	for i, f := range flushes[:min(len(flushes), shownFlushes)] {
		rows = append(rows, []string{
			strconv.Itoa(i + 1), ago(f.Time), string(f.Kind), scope(f),
			f.Lost.Text(strconv.Itoa),
			plain(f.ByText()), absentText(f), plain(endText(f)),
		})
	}
	fmt.Fprintln(w)
	writeTable(w, rows)
	if older := len(flushes) - shownFlushes; older > 0 {
		fmt.Fprintf(w, "and %s: canaryd status -o json lists them, --flush N shows one\n", count(older, "older record"))
	}
}

// endText describes the end of a flush, and counts its repetitions.
func endText(f api.Flush) string {
	if f.Repeated == nil {
		return f.OutcomeText()
	}
	return f.OutcomeText() + "; " + f.Repeated.Text()
}

// absentText words how long the rules of a record were missing, or have been missing so far.
func absentText(f api.Flush) string { return f.AbsentText(time.Now()) }

// writeStored lists the generations that restore can take, except the one in force.
func writeStored(w io.Writer, s api.Status) {
	var rows [][]string
	for _, g := range s.Stored {
		made := madeText(g.Made, g.Foreign)
		if g.NearlyEmpty && g.Foreign == "" {
			made += "; nearly empty, as after a flush"
		}
		if g.ID != s.Generation.ID {
			rows = append(rows, []string{g.ID, ago(g.Saved), numberText(g.Rules), numberText(g.Chains), made})
		}
	}
	if len(rows) > 0 {
		fmt.Fprintln(w)
		writeTable(w, append([][]string{{"STORED BEFORE", "SAVED", "RULES", "CHAINS", "MADE BY"}}, rows...))
	}
}

// numberText returns a count of a stored generation; "?" for nil.
func numberText(n *int) string {
	if n == nil {
		return "?" // an older canaryd stored it
	}
	return strconv.Itoa(*n)
}

// madeText describes the origin of a stored generation. foreign is why it must not be restored
// here; "" if it may.
func madeText(made reload.Made, foreign string) string {
	text := cmp.Or(map[reload.Made]string{
		reload.MadeAtStart:  "the rules at the start",
		reload.MadeByOwners: "changes of the rules' owners",
		reload.MadeDeclared: "declared rules",
		reload.MadeRestored: "canaryd restore",
	}[made], "unknown")
	if foreign != "" {
		text += "; not to be restored here: " + plain(oneLine(foreign))
	}
	return text
}

// scope names the families, tables and native tables of a flush, for the column TABLES.
func scope(f api.Flush) string {
	families, tables, native := f.Where()
	words := slices.Concat(families, tables)
	if len(native) > 0 {
		words = append(words, plain(strings.Join(native, ", ")))
	}
	return strings.Join(words, " ")
}

// ago words the time since t, in seconds or minutes.
func ago(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	d := time.Since(t)
	unit := time.Second
	if d > time.Hour {
		unit = time.Minute
	}
	return d.Round(unit).String() + " ago"
}

// writeTable writes rows in columns; the first row is the heading.
func writeTable(w io.Writer, rows [][]string) { terminal.Table(w, rows, colourOf) }
