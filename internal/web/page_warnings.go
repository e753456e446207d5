package web

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
)

// warningsOf returns the warnings of the page, the most serious first, each with its alert and
// the command to run.
func warningsOf(s api.Status, now time.Time) []pageWarning {
	var list []pageWarning
	if d := s.Decision; d != nil {
		list = append(list,
			pageWarning{Name: "decision", Alert: "CanarydAwaitingDecision", Class: "bad", Title: "A decision is needed.", Text: "The rules are not put back unasked, because " + d.Reason + ". To put them back:", Command: d.Restore},
			pageWarning{Name: "dismiss", Class: "warn", Title: "Or accept the loss.", Text: "The rules in the tables become the generation:", Command: d.Dismiss})
	}
	if text := s.UnreadText(); text != "" {
		list = append(list, pageWarning{Name: "unread", Class: "bad", Title: "The stored rules cannot be read.", Text: api.Upper(text) + "."})
	}
	list = append(list, pauseWarning(s)...)
	if s.Contended {
		w := pageWarning{Name: "contended", Alert: "CanarydContended", Class: "bad", Title: "A process keeps undoing the replays.",
			Text: "Replays are limited until one has lasted for 10 s. Stop that process, or pause the replays:", Command: "canaryd pause --for=1h"}
		if s.Mode == api.Observe {
			w.Text, w.Command = "Another process keeps writing the chains that are declared here; canaryd only observes.", ""
		}
		list = append(list, w)
	}
	if s.Backend.Mismatch {
		list = append(list, pageWarning{Name: "mismatch", Alert: "CanarydBackendMismatch", Class: "bad", Title: "The other backend is in use by now.",
			Text: "Its rules are not guarded: restart canaryd, or say which is right with --backend. The evidence:", Command: "canaryd detect"})
	}
	list = append(list, nativeWarnings(s)...)
	list = append(list, sourceWarning(s)...)
	if o := s.RulesWithoutOwner; o != nil {
		list = append(list, pageWarning{Name: "ownerless", Alert: "CanarydRulesWithoutOwner", Class: "bad", Title: "kube-proxy's rules have no owner.",
			Text: "They are in force, but KUBE-PROXY-CANARY has been missing for " + durationText(now.Sub(o.Since)) + ", so no process corrects them.", Choices: o.Choices})
	}
	list = slices.Concat(list, policyWarning(s, now), quarantineWarning(s), leftOutWarning(s), drillWarning(s, now))
	if s.Backend.Mixed {
		list = append(list, pageWarning{Name: "mixed", Alert: "CanarydMixedBackends", Class: "warn", Title: "Both backends hold rules.",
			Text: fmt.Sprintf("Those of %s are guarded. Why that one:", s.Backend.Name), Command: "canaryd detect"})
	}
	if s.StateError != "" {
		list = append(list, pageWarning{Name: "state", Alert: "CanarydStateErrors", Class: "warn", Title: "The latest rules are not on disk.",
			Text: "After a restart canaryd would know an older generation, or none. " + s.StateError})
	}
	if s.JournalError != "" {
		list = append(list, pageWarning{Name: "journal", Alert: "CanarydJournalErrors", Class: "warn", Title: "Flush records are not on disk.",
			Text: "They are lost if canaryd restarts now. " + s.JournalError})
	}
	if since := s.LearningPendingSince; !since.IsZero() && now.Sub(since) > blindAfter {
		list = append(list, pageWarning{Name: "pending", Alert: "CanarydGenerationStale", Class: "warn", Title: "The generation is behind.",
			Text: "Changes of " + agoText(since, now) + " are not in it yet; a replay would not bring them."})
	}
	return list
}

// quarantineWarning returns a warning about rules and parts of native tables that cannot be put
// back, with their chains; none if there are none.
func quarantineWarning(s api.Status) []pageWarning {
	text := s.PartialCount()
	if len(s.Quarantined) == 0 || text == "" {
		return nil
	}
	w := pageWarning{Name: "quarantine", Alert: "CanarydReplayPartial", Class: "bad", Title: api.Upper(text) + ".",
		Text: "The kernel refuses them, or lacks their dependencies. They are tried again, unless their table is left out; the rest of their tables is in force.", Command: "canaryd status"}
	if len(s.Quarantined)+s.QuarantinedMore == 1 {
		w.Text = "The kernel refuses it, or lacks a dependency. It is tried again, unless its table is left out; the rest of its table is in force."
	}
	if len(s.WaitingChains) > 0 {
		w.Text = "A rule that could not be put back decides which packets reach the rules behind it: they wait for it. The rest is in force."
	}
	for _, q := range s.Quarantined {
		name := strings.ReplaceAll(q.TableName(), " ", "/") + "/" + q.Chain
		if !slices.Contains(w.Chains, name) && len(w.Chains) < 5 {
			w.Chains = append(w.Chains, name)
		}
	}
	return []pageWarning{w}
}

// leftOutWarning returns a warning about chains above --max-rules, which are not guarded; none
// if there are none.
func leftOutWarning(s api.Status) []pageWarning {
	n := len(s.LeftOut)
	if n == 0 {
		return nil
	}
	w := pageWarning{Name: "leftout", Alert: "CanarydChainsLeftOut", Class: "bad", Title: api.Upper(s.NotGuarded()) + ".",
		Text: "There are more rules than canaryd keeps of a family (--max-rules). Lost rules of these chains are not put back.", Command: "canaryd status"}
	for _, l := range s.LeftOut[:min(n, 5)] {
		w.Chains = append(w.Chains, fmt.Sprintf("%s/%s/%s", l.Family, l.Table, l.Chain))
	}
	return []pageWarning{w}
}
