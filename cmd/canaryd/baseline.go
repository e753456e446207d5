package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
)

const aboutBaseline = `canaryd learns all rules of protected chains, whichever process wrote them, and puts them back after
a flush. This command lists the rules that canaryd learned since the last confirmation, chain by
chain, jumps first. --confirm makes the present rules the baseline. With --generation it confirms
only the listed rules, and no rule that a process added meanwhile. The baseline survives restarts.
No verdict and no replay depends on it. It has rules of iptables' tables only: canaryd compares no
native table.
Exit code: 0 no rule appeared or no baseline, 1 rules appeared, 2 baseline unusable or trouble.
`

// shownChains and shownRules bound the text for people; JSON has more.
const (
	shownChains = 100
	shownRules  = 200
)

// runBaseline compares, confirms or forgets the baseline through the daemon. If rules appeared
// since it was confirmed, the code is exitNo.
func runBaseline(ctx context.Context, o *options, to streams) (int, error) {
	switch {
	case o.confirm && o.forget:
		return exitError, errors.New("--confirm and --forget exclude each other")
	case o.generation != "" && !o.confirm:
		return exitError, errors.New("--generation needs --confirm")
	}
	reply, err := o.client().Baseline(ctx, api.BaselineRequest{Confirm: o.confirm, Forget: o.forget, Generation: o.generation})
	if err != nil {
		return exitError, err
	}
	err = show(to.out, o.output, reply, func(w io.Writer) { fmt.Fprint(w, baselineText(o, reply)) })
	switch b := reply.Baseline; {
	case b != nil && b.Error != "":
		return exitError, cmp.Or(err, fmt.Errorf("the baseline is unusable: %s", b.Error))
	case b != nil && b.AppearedRules > 0 && !o.confirm:
		return exitNo, err
	default:
		return exitOK, err
	}
}

// baselineText returns the answer for people: counts first, then rules.
func baselineText(o *options, r api.BaselineReply) string {
	present := fmt.Sprintf("generation %s, %s in %s", r.Present.ID, count(r.Present.Rules, "rule"), count(r.Present.Chains, "chain"))
	switch b := r.Baseline; {
	case o.forget && r.Replaced == nil:
		return "there was no baseline\n"
	case o.forget:
		return "the " + baselineName(*r.Replaced) + " is forgotten\n"
	case b == nil:
		return fmt.Sprintf("no baseline is confirmed\nguarded now: %s\n%sto confirm it: canaryd baseline --confirm --generation %s\n", present, notCompared(r), r.Present.ID)
	case b.Error != "":
		return "to replace it: canaryd baseline --confirm; to remove it: canaryd baseline --forget\n"
	}
	var text strings.Builder
	b := r.Baseline
	if o.confirm {
		text.WriteString("confirmed: ")
	}
	fmt.Fprintf(&text, "%s: %s in %s\n", baselineName(b.BaselineName), count(b.Rules, "rule"), count(b.Chains, "chain"))
	if o.confirm && r.Replaced != nil {
		fmt.Fprintf(&text, "it takes the place of the %s\n", baselineName(*r.Replaced))
	}
	fmt.Fprintf(&text, "guarded now: %s; %s\n%s", present, sinceText(*b), notCompared(r))
	if len(r.Changes) == 0 {
		return text.String()
	}
	writeChanges(&text, r)
	fmt.Fprintf(&text, "\nto confirm these rules: canaryd baseline --confirm --generation %s\n", r.Present.ID)
	return text.String()
}

// notCompared says that the baseline has no rules of native tables; "" if none is guarded.
func notCompared(r api.BaselineReply) string {
	if r.NativeTables == 0 {
		return ""
	}
	return fmt.Sprintf("NOT compared: %s; a baseline has rules of iptables' tables only\n", count(r.NativeTables, "native table"))
}

// writeChanges writes the chains that differ from the baseline, and then the rules that
// appeared, a few of each chain.
func writeChanges(text *strings.Builder, r api.BaselineReply) {
	rows := [][]string{{"FAMILY", "TABLE", "CHAIN", "APPEARED", "GONE"}}
	for _, c := range r.Changes[:min(len(r.Changes), shownChains)] {
		gone := strconv.Itoa(c.Gone)
		if c.Reordered {
			gone += ", and another order"
		}
		rows = append(rows, []string{c.Family.String(), string(c.Table), plain(c.Chain), strconv.Itoa(c.Appeared), gone})
	}
	text.WriteByte('\n')
	writeTable(text, rows)
	if more := len(r.Changes) + r.More - (len(rows) - 1); more > 0 {
		fmt.Fprintf(text, "and %s\n", count(more, "more chain"))
	}
	shown, place := 0, ""
	for _, c := range r.Changes {
		for i, line := range c.Rules {
			if shown == shownRules || i == shownRules/10 {
				break
			}
			if at := fmt.Sprintf("\n@@ %s %s @@\n", c.Family, c.Table); at != place {
				place = at
				text.WriteString(at)
			}
			shown++
			fmt.Fprintf(text, "+%s\n", plain(line))
		}
	}
	if more := r.Baseline.AppearedRules - shown; more > 0 {
		fmt.Fprintf(text, "@@ %s: canaryd baseline -o json has them, %d of a chain at most @@\n", count(more, "more rule"), 500)
	}
}

// baselineName names a baseline by the time at which it was confirmed and its generation.
func baselineName(b api.BaselineName) string {
	if b.Error != "" {
		return "unusable baseline"
	}
	return fmt.Sprintf("baseline of %s, generation %s", b.Confirmed.UTC().Format("2006-01-02 15:04 MST"), b.Generation)
}

// sinceText counts the differences between the baseline and the guarded rules.
func sinceText(b api.Baseline) string {
	var words []string
	if b.AppearedRules > 0 {
		words = append(words, fmt.Sprintf("%s appeared since in %s", count(b.AppearedRules, "rule"), count(b.AppearedChains, "chain")))
	}
	if b.GoneRules > 0 {
		words = append(words, count(b.GoneRules, "rule")+" gone")
	}
	if b.ReorderedChains > 0 {
		words = append(words, "another order in "+count(b.ReorderedChains, "chain"))
	}
	if len(words) == 0 {
		return "no rule appeared since"
	}
	return strings.Join(words, ", ")
}

// baselineLine is a line of the status about the changes since the baseline; nothing without
// one.
func baselineLine(s api.Status) string {
	b := s.Baseline
	if b == nil {
		return ""
	}
	line := fmt.Sprintf("%s: %s", baselineName(b.BaselineName), sinceText(*b))
	if len(s.Native) > 0 {
		line += " (native tables are not compared)"
	}
	if b.Reading {
		line = "the confirmed baseline is being read"
	}
	if b.Error != "" {
		line = "the confirmed baseline is UNUSABLE: " + plain(oneLine(b.Error))
	}
	if b.Error != "" || b.AppearedRules+b.GoneRules+b.ReorderedChains > 0 {
		line += ": canaryd baseline"
	}
	return line + "\n"
}

// notInBaselineText names the lost rules of a flush that the baseline lacked; "" without a
// baseline.
func notInBaselineText(f api.Flush) string {
	n := f.NotInBaseline
	if n == nil {
		return ""
	}
	these := "these rules"
	if len(f.Native) > 0 {
		these = "these rules of iptables' tables"
	}
	name := fmt.Sprintf("the baseline that was confirmed at %s (generation %s)", n.Confirmed.UTC().Format(time.RFC3339), n.Generation)
	if n.Rules == 0 {
		return "all of " + these + " are in " + name + "\n"
	}
	var words []string
	for _, c := range n.Chains {
		words = append(words, fmt.Sprintf("%s %s %s %d", c.Family, c.Table, plain(c.Chain), c.Rules))
	}
	if n.More > 0 {
		words = append(words, count(n.More, "more chain"))
	}
	are := "are"
	if n.Rules == 1 {
		are = "is"
	}
	return fmt.Sprintf("of these, %s %s not in %s: %s\n", count(n.Rules, "rule"), are, name, strings.Join(words, ", "))
}
