package web

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/net/html"

	"github.com/canaryd/canaryd/internal/api"
)

// flushes returns the section of the flush records.
func (v pageView) flushes() *html.Node {
	lines := list{el("h2", attrs{{"id", "flushes"}}, "Flushes")}
	if len(v.Records) == 0 {
		lines = append(lines, v.noFlush())
	} else {
		lines = append(lines, v.Strip.element(), columns(), v.records(), when(v.Older > 0, v.older()))
	}
	return block("section", attrs{{"id", "part-flushes"}, {"class", "card flushes"}, {"aria-labelledby", "flushes"}}, lines...)
}

// noFlush returns the text in place of records.
func (v pageView) noFlush() *html.Node {
	if !v.LossSince.IsZero() {
		return block("div", class("empty"),
			el("p", nil, el("strong", nil, "No flush is recorded yet; rules were found missing ", v.ago(v.LossSince))))
	}
	return block("div", class("empty"),
		el("p", nil, el("strong", nil, "No flush seen since ", v.clock(v.Began))),
		el("p", nil, "That is when this canaryd started. A loss appears here within seconds of the flush: the lost rules, the process, and the time until they are back."))
}

// element returns the strip as a picture: a tick for each flush.
func (s pageStrip) element() *html.Node {
	var ticks list
	for _, t := range s.Ticks {
		ticks = append(ticks, el("rect", attrs{{"class", t.Class}, {"x", t.X + "%"}, {"width", "4"}, {"height", "100%"}, {"rx", "2"}}))
	}
	return block("div", attrs{{"class", "strip"}, {"aria-hidden", "true"}},
		el("svg", nil, ticks...),
		el("p", nil, el("span", nil, s.Span), el("span", nil, "now")))
}

// columns returns the names of the columns of records.
func columns() *html.Node {
	var names list
	for _, name := range []string{"when", "what", "by", "lost", "absent", "outcome"} {
		names = append(names, el("span", nil, name))
	}
	return el("div", attrs{{"class", "columns"}, {"aria-hidden", "true"}}, names...)
}

// older returns the note about records that the page leaves out.
func (v pageView) older() *html.Node {
	return el("p", class("note older"), strconv.Itoa(v.Older)+" older ones are in ", command("canaryd status -o json"))
}

// records returns the flush records, the newest first. The reader opens one for its details.
func (v pageView) records() *html.Node {
	var items list
	for _, r := range v.Records {
		details := block("div", class("record"), r.facts(), r.losses())
		items = append(items, el("li", attrs{{"id", "flush-" + r.ID}}, block("details", nil, v.summary(r), details)))
	}
	return block("ol", attrs{{"id", "records"}}, items...)
}

// summary returns the line of a record that is always visible.
func (v pageView) summary(r pageRecord) *html.Node {
	return block("summary", nil,
		el("span", class("when"), v.ago(r.Time)),
		el("span", class("what"), el("strong", nil, string(r.Kind)), " "+r.Where),
		el("span", class("by"), label("by"), " ", r.by()),
		el("span", class("lost"), label("lost"), " "+r.LostFirst, when(r.LostRest != "", el("small", nil, ", "+r.LostRest))),
		el("span", class("absent"), label("absent"), " "+r.Absent),
		el("span", class("outcome"), el("span", class("badge "+r.Class), r.OutcomeText()),
			when(r.Repeated != nil, " ", el("small", nil, r.Repeated.Text()))),
	)
}

// label returns the name of a field, which shows where the columns have no names.
func label(name string) *html.Node { return el("span", class("label"), name) }

// by returns the processes that removed something, in a few words.
func (r pageRecord) by() any {
	c := r.Culprit
	switch {
	case len(r.Culprits) > 1 || r.CulpritsMissed || r.CulpritsLikely:
		return r.ByText()
	case c.PID != 0:
		place := ""
		if in := c.In(); in != "" {
			place = ", " + in
		}
		return list{when(c.Comm != "", c.Comm+" "), el("small", nil, fmt.Sprintf("pid %d%s", c.PID, place))}
	case r.Drill != "":
		return el("small", nil, "canaryd drill")
	default:
		return el("small", nil, "unknown")
	}
}

// facts returns the details of a record.
func (r pageRecord) facts() *html.Node {
	return block("dl", nil,
		fact("time", el("time", attrs{{"datetime", isoText(r.Time)}}, utcText(r.Time)), when(r.Earlier, ", seen by an earlier run of canaryd")),
		fact("kind", string(r.Kind)+withPrefix(": ", r.KindMeans)),
		fact("outcome", r.OutcomeText()+withPrefix(": ", r.OutcomeMeans)),
		fact("noticed", "after "+r.Noticed),
		fact("absent", r.Absent, when(r.Attempts > 1, fmt.Sprintf(", %d replays", r.Attempts))),
		when(r.Standby != nil, fact("meanwhile", r.Standby.Text())),
		fact("lost", r.LostFirst+withPrefix(", ", r.LostRest)+r.Lost.UnprotectedText()),
		r.takers(),
		when(r.Repeated != nil, fact("again", r.Repeated.Text())),
		r.hostPorts(),
		factUnlessEmpty("writers", writersText(r.Writers)),
		when(len(r.Policies) > 0, fact("policies", strings.Join(r.Policies, ", "))),
	)
}

// takers returns the row with all processes that removed something, each on a line; nil if they
// are unknown.
func (r pageRecord) takers() any {
	var names list
	for i, c := range r.Takers() {
		names = append(names, when(i > 0, el("br", nil)), c.Text())
	}
	return when(len(names) > 0, fact("by", names...))
}

// hostPorts returns the row with the pods that lost host ports; nil if there are none.
func (r pageRecord) hostPorts() any {
	var pods []string
	for _, p := range r.Pods {
		pods = append(pods, p.String())
	}
	return when(len(pods) > 0, fact("host ports", strings.Join(pods, ", "), when(r.MorePods != 0, " and "+countText(r.MorePods)+" more")))
}

// writersText names processes with their pids.
func writersText(writers []api.Culprit) string {
	var names []string
	for _, w := range writers {
		name := fmt.Sprintf("(pid %d)", w.PID)
		if w.Comm != "" {
			name = w.Comm + " " + name
		}
		names = append(names, name)
	}
	return strings.Join(names, ", ")
}

// withPrefix returns the text behind a prefix; "" if the text is empty.
func withPrefix(prefix, text string) string {
	if text == "" {
		return ""
	}
	return prefix + text
}

// losses returns the lost parts of each table, and the command that shows the rules.
func (r pageRecord) losses() *html.Node {
	var lines list
	for _, l := range r.Native {
		lines = append(lines, el("p", nil, l.String()), nativeParts(l), moreNote(l.More, "parts"))
	}
	for _, g := range r.Groups {
		lines = append(lines, g.title(), g.chains(), moreNote(g.More, "chains"))
	}
	lines = append(lines,
		el("p", class("note"), "The rules themselves and command lines are not shown here. On the node:"),
		el("p", nil, command("canaryd status --flush "+r.ID)))
	return block("div", class("chains"), lines...)
}

// nativeParts returns the lost parts of a native table; nil if none is known.
func nativeParts(l api.NativeLoss) any {
	var items list
	for _, part := range l.Parts {
		items = append(items, el("li", nil, el("code", nil, part)))
	}
	return when(len(items) > 0, el("ul", nil, items...))
}

// moreNote says how many parts or chains a list leaves out; nil if it is complete.
func moreNote(n int, things string) any {
	return when(n != 0, el("p", class("note"), "and "+countText(n)+" more "+things))
}

// title returns the table's name with the counts of its loss.
func (g pageGroup) title() *html.Node {
	counts := fmt.Sprintf("%s: %s rules, %s chains, %s jumps", g.Kind, countText(g.Rules), countText(g.Chains), countText(g.Jumps))
	switch {
	case g.UnprotectedUnknown:
		counts += ", not known how many not named by --protect"
	case g.Unprotected != 0:
		counts += ", " + countText(g.Unprotected) + " not named by --protect"
	}
	return el("h3", nil, fmt.Sprintf("%s %s ", g.Family, g.Table), el("small", nil, counts+withPrefix(", by ", g.By)))
}

// chains returns the chains of the table that lost rules; nil if none is known.
func (g pageGroup) chains() any {
	var items list
	for _, c := range g.PerChain {
		unit := "rules"
		if c.Jumps != 0 && c.Jumps == c.Rules {
			unit = "jumps"
		}
		items = append(items, el("li", nil, el("code", nil, c.Chain), " ", el("span", nil, countText(c.Rules)+" "+unit)))
	}
	return when(len(items) > 0, el("ul", nil, items...))
}
