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
chain, jumps first. A native table that was never confirmed is one line. --confirm makes the present
rules the baseline. With --generation it confirms only the listed rules, and no rule that a process
added meanwhile. The baseline survives restarts. No verdict and no replay depends on it. It has no
elements of native tables' sets: their owners change these all the time.
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
	case b != nil && b.Appeared() && !o.confirm:
		return exitNo, err
	default:
		return exitOK, err
	}
}

// baselineText returns the answer for people: counts first, then rules.
func baselineText(o *options, r api.BaselineReply) string {
	present := fmt.Sprintf("generation %s, %s", r.Present.ID, contentText(r.Present.Rules, r.Present.Chains, r.NativeTables))
	confirm := "canaryd baseline --confirm --generation " + cmp.Or(strings.Join(r.Generations, ","), r.Present.ID)
	switch b := r.Baseline; {
	case o.forget && r.Replaced == nil:
		return "there was no baseline\n"
	case o.forget:
		return "the " + baselineName(*r.Replaced) + " is forgotten\n"
	case b == nil:
		return fmt.Sprintf("no baseline is confirmed\nguarded now: %s\nto confirm it: %s\n", present, confirm)
	case b.Error != "":
		return "to replace it: canaryd baseline --confirm; to remove it: canaryd baseline --forget\n"
	}
	var text strings.Builder
	b := r.Baseline
	if o.confirm {
		text.WriteString("confirmed: ")
	}
	fmt.Fprintf(&text, "%s: %s\n", baselineName(b.BaselineName), contentText(b.Rules, b.Chains, b.NativeTables))
	if o.confirm && r.Replaced != nil {
		fmt.Fprintf(&text, "it takes the place of the %s\n", baselineName(*r.Replaced))
	}
	fmt.Fprintf(&text, "guarded now: %s; %s\n", present, sinceText(*b))
	if len(r.Changes) == 0 {
		return text.String()
	}
	writeChanges(&text, r)
	fmt.Fprintf(&text, "\nto confirm these rules: %s\n", confirm)
	return text.String()
}

// contentText counts the rules and chains of a generation, and native tables if there are any.
func contentText(rules, chains, natives int) string {
	text := count(rules, "rule") + " in " + count(chains, "chain")
	if natives > 0 {
		text += ", and " + count(natives, "native table")
	}
	return text
}

// writeChanges writes the parts that differ from the baseline, and then the rules that
// appeared, a few of each part.
func writeChanges(text *strings.Builder, r api.BaselineReply) {
	rows := [][]string{{"FAMILY", "TABLE", "CHAIN", "APPEARED", "GONE"}}
	for _, c := range r.Changes[:min(len(r.Changes), shownChains)] {
		gone := strconv.Itoa(c.Gone)
		if c.Reordered {
			gone += ", and another order"
		}
		family, table, _ := strings.Cut(c.Name(), " ")
		rows = append(rows, []string{family, table, partText(c), strconv.Itoa(c.Appeared), gone})
	}
	text.WriteByte('\n')
	writeTable(text, rows)
	if more := len(r.Changes) + r.More - (len(rows) - 1); more > 0 {
		fmt.Fprintf(text, "and %s\n", count(more, "more chain"))
	}
	appeared := r.Baseline.AppearedRules + r.Baseline.AppearedParts
	shown, place := 0, ""
	for _, c := range r.Changes {
		for i, line := range c.Rules {
			if shown == shownRules || i == shownRules/10 {
				break
			}
			if at := fmt.Sprintf("\n@@ %s @@\n", c.Name()); at != place {
				place = at
				text.WriteString(at)
			}
			shown++
			fmt.Fprintf(text, "+%s\n", plain(line))
		}
	}
	if more := appeared - shown; more > 0 {
		fmt.Fprintf(text, "@@ %s: canaryd baseline -o json has them, %d of a chain at most @@\n", count(more, "more rule"), 500)
	}
}

// partText names a chain, or another part of a native table with its kind.
func partText(c api.BaselineChange) string {
	switch c.Kind {
	case "":
		return plain(c.Chain)
	case "table":
		return "the whole table"
	}
	return c.Kind + " " + plain(c.Chain)
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
	say := func(n int, what, how string) {
		if n > 0 {
			words = append(words, count(n, what)+" "+how)
		}
	}
	say(b.AppearedParts, "other part", "of native tables appeared")
	say(b.AppearedTables, "native table", "never confirmed")
	say(b.GoneRules, "rule", "gone")
	say(b.GoneParts, "other part", "gone")
	say(b.GoneTables, "native table", "gone")
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
	if b.Reading {
		line = "the confirmed baseline is being read"
	}
	if b.Error != "" {
		line = "the confirmed baseline is UNUSABLE: " + plain(oneLine(b.Error))
	}
	if b.Error != "" || b.Differs() {
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
	if len(f.Native) > 0 && !n.Native {
		these = "these rules of iptables' tables"
	}
	name := fmt.Sprintf("the baseline that was confirmed at %s (generation %s)", n.Confirmed.UTC().Format(time.RFC3339), n.Generation)
	if n.Rules == 0 {
		return "all of " + these + " are in " + name + "\n"
	}
	var words []string
	for _, c := range n.Chains {
		words = append(words, strings.TrimRight(c.Name()+" "+plain(c.Chain), " ")+" "+strconv.Itoa(c.Rules))
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
