package web

import (
	"fmt"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/rules"
)

// refusedLines names the declared rules that are refused, with file and line.
func refusedLines(s api.Status) []string {
	const shown = 5
	var lines []string
	for i, r := range s.DeclaredRefused {
		if i == shown {
			lines = append(lines, fmt.Sprintf("And %d more: canaryd status lists them.", len(s.DeclaredRefused)-shown))
			break
		}
		lines = append(lines, fmt.Sprintf("%s %s: %s is refused: %s.", r.Family, r.Table, r.Place(), r.Meaning))
	}
	if broken := s.BrokenSource(); broken != nil {
		lines = append(lines, api.Upper(broken.Error())+".")
	}
	return append(lines, "These tables keep their previous rules; all others are as declared. canaryd status quotes the rule and the reason.")
}

// partialLines names the tables that lack rules because these could not be put back (all.Lost),
// and counts the rules in force. headlineOf shows it under the title "partial".
func partialLines(s api.Status, all api.Tally, now time.Time) []string {
	line := "In " + strings.Join(namesOf(all.Lost), ", ") + ". All else that ought to be in force is."
	if len(all.Unknown) > 0 {
		line = "In " + strings.Join(namesOf(all.Lost), ", ") + "; unknown: " + strings.Join(namesOf(all.Unknown), ", ") + "."
	}
	if s.Paused {
		line += " Replays are paused."
	}
	return append([]string{line}, inForceLines(s, now)[1:]...)
}

// sourceWarning returns a warning about broken files of declared rules, if there are any.
func sourceWarning(s api.Status) []pageWarning {
	var lines []string
	for _, e := range s.SourceErrors {
		lines = append(lines, api.Upper(e.Line()))
	}
	if len(lines) == 0 {
		return nil
	}
	const shown = 5
	if n := len(lines) - shown; n > 0 {
		lines = append(lines[:shown], fmt.Sprintf("And %d more", n))
	}
	return []pageWarning{{Name: "sources", Alert: "CanarydSourceErrors", Class: "bad", Title: "Files that declare rules have errors.",
		Text: strings.Join(lines, ". ") + ". The reasons:", Command: "canaryd status"}}
}

// drillWarning returns a warning if the last drill failed.
func drillWarning(s api.Status, now time.Time) []pageWarning {
	d := s.LastDrill
	if d == nil || d.Result != api.DrillFailed {
		return nil
	}
	return []pageWarning{{Name: "drill", Alert: "CanarydDrillFailed", Class: "warn", Title: "The last drill failed " + agoText(d.Time, now) + ".",
		Text: "canaryd did not notice the loss, or did not put it back in time; a flush may fare the same. The log says why. After the repair:", Command: "canaryd drill"}}
}

// nativeWarnings returns warnings about native tables: lost and awaiting a decision, not
// restorable, or above the limit.
func nativeWarnings(s api.Status) []pageWarning {
	var list []pageWarning
	awaiting := pageWarning{Name: "native-awaiting", Alert: "CanarydAwaitingDecision", Class: "bad", Title: "Native tables are lost and not put back unasked.",
		Text: "Their owner may have meant it.", Choices: []api.Choice{
			{If: "the tables are still needed", Command: "canaryd restore"}, {If: "their owner meant it", Command: "canaryd dismiss"}}}
	gone := pageWarning{Name: "native-gone", Alert: "CanarydAwaitingDecision", Class: "bad", Title: "Native tables are lost, and canaryd cannot put them back.",
		Text: "They were larger than canaryd keeps (--max-rules). Their owner has to write them again. To accept the loss:", Command: "canaryd dismiss"}
	refused := pageWarning{Name: "native-refused", Alert: "CanarydNativeTableRefused", Class: "bad", Title: "Native tables could not be put back whole.",
		Text: "The kernel would not take them, or parts of them, again if they were lost. Which, and why:", Command: "canaryd status"}
	for _, t := range s.Native {
		switch {
		case t.LeftOut && t.Verdict.Loss():
			gone.Chains = append(gone.Chains, api.TableCell(t.Table))
		case t.Awaiting:
			awaiting.Chains = append(awaiting.Chains, api.TableCell(t.Table))
		}
		if t.Unreplayable != "" {
			refused.Chains = append(refused.Chains, api.TableCell(t.Table))
		}
	}
	for _, w := range []pageWarning{awaiting, gone, refused} {
		if len(w.Chains) > 0 {
			list = append(list, w)
		}
	}
	if n := s.NativeOverLimit; n > 0 {
		list = append(list, pageWarning{Name: "native-beyond", Alert: "CanarydNativeTablesNotGuarded", Class: "bad", Title: fmt.Sprintf("%d more native tables are not guarded.", n),
			Text: "There are more than canaryd guards; name fewer with --protect. Which there are:", Command: "canaryd detect"})
	}
	if n := len(s.NativeLeftOut); n > 0 {
		w := pageWarning{Name: "native-leftout", Alert: "CanarydNativeTablesNotGuarded", Class: "bad", Title: "Native tables are not guarded.",
			Text: "Native tables are larger than canaryd keeps (--max-rules). Lost rules of these are not put back.", Command: "canaryd status"}
		for _, l := range s.NativeLeftOut[:min(n, 5)] {
			w.Chains = append(w.Chains, api.TableCell(l.Table))
		}
		list = append(list, w)
	}
	return list
}

// onlyAwaiting reports whether the only lost tables are native tables that wait for a decision.
// The page then names the two commands.
func onlyAwaiting(s api.Status, lost []api.TableVerdict) bool {
	waiting := 0
	for _, t := range s.Native {
		if t.Awaiting && t.Verdict.Loss() {
			waiting++
		}
	}
	return waiting > 0 && waiting == len(lost)
}

// pauseWarning names the person who paused replays, and the reason; none if both are unknown.
func pauseWarning(s api.Status) []pageWarning {
	origin := s.PauseOrigin()
	if origin == "" && s.PausedWhy == "" {
		return nil
	}
	w := pageWarning{Name: "paused", Alert: "CanarydPausedTooLong", Class: "warn", Title: "Replays are paused" + origin + ".", Text: "No reason was given. To end the pause:", Command: "canaryd resume"}
	if s.PausedWhy != "" {
		w.Text = "The reason: " + s.PausedWhy + ". To end the pause:"
	}
	return []pageWarning{w}
}

// policyWarning explains how to open the first chain whose policy has become DROP; none if
// there is none. The reader runs the command: canaryd changes no policy.
func policyWarning(s api.Status, now time.Time) []pageWarning {
	if len(s.PolicyDrops) == 0 {
		return nil
	}
	p := s.PolicyDrops[0]
	w := pageWarning{Name: "policy", Class: "bad", Title: "A built-in chain drops packets that no rule accepts.",
		Text: fmt.Sprintf("The policy of %s became DROP %s; %s. If no firewall wants that:", p, agoText(p.Since, now), p.Left())}
	if !p.Native {
		program := map[rules.Family]string{rules.IPv4: "iptables", rules.IPv6: "ip6tables"}[p.Family]
		w.Command = fmt.Sprintf("%s -t %s -P %s %s", program, p.Table, p.Chain, p.Was)
		return []pageWarning{w}
	}
	w.Title = "A base chain drops packets that no rule accepts."
	if !strings.ContainsAny(p.String(), "'\"\\;{}`$") { // a shell might obey an odd name
		w.Command = fmt.Sprintf("nft 'chain %s { policy %s; }'", p, strings.ToLower(p.Was))
	}
	return []pageWarning{w}
}
