package web

import (
	"cmp"
	"strconv"

	"golang.org/x/net/html"

	"github.com/canaryd/canaryd/internal/api"
)

// cards returns the three cards: the canaries, the generation, and this canaryd.
func (v pageView) cards() *html.Node {
	return block("div", attrs{{"id", "part-cards"}, {"class", "cards"}}, v.canaries(), v.generation(), v.canaryd())
}

// canaries returns the card with the verdict on each table.
func (v pageView) canaries() *html.Node {
	lines := list{el("h2", attrs{{"id", "canaries"}}, "Canaries")}
	switch {
	case v.OnlyNative():
		lines = append(lines, v.natives(), el("p", class("note"), v.IptablesText()+"."))
	case v.NativeFirst():
		lines = append(lines, v.natives(), v.families())
	default:
		lines = append(lines, v.families(), v.natives())
	}
	known := list{"The content of the tables is unknown yet."}
	if !v.LastKnown.IsZero() {
		known = list{"The content of the tables was last known ", v.ago(v.LastKnown), "."}
	}
	lines = append(lines, el("p", class("note"), when(v.CanaryChain != "", "Chain ", el("code", nil, v.CanaryChain), ". "), known))
	return block("section", attrs{{"class", "card wide"}, {"aria-labelledby", "canaries"}}, lines...)
}

// families returns the verdicts on iptables' tables, with a row for each family.
func (v pageView) families() *html.Node {
	if len(v.Rows) == 0 {
		return el("p", nil, "No family has been looked at yet.")
	}
	head := list{column(el("span", class("hush"), "family"))}
	for _, t := range v.Tables {
		head = append(head, column(string(t)))
	}
	var rows list
	for _, r := range v.Rows {
		rows = append(rows, v.familyRow(r))
	}
	return block("table", class("matrix"),
		el("caption", class("hush"), "The verdict on each table of each IP family"),
		el("thead", nil, el("tr", nil, head...)),
		block("tbody", nil, rows...),
	)
}

// familyRow returns the row of one family: its verdicts, or the reason why it is not watched.
func (v pageView) familyRow(r pageRow) *html.Node {
	var cells list
	for _, c := range r.Cells {
		cells = append(cells, el("td", nil, c.element()))
	}
	if r.Disabled != "" {
		cells = list{el("td", attrs{{"colspan", strconv.Itoa(len(v.Tables))}, {"class", "off"}}, "not watched: "+r.Disabled)}
	}
	return el("tr", attrs{{"id", "family-" + r.Family.String()}}, rowHead(r.Label), cells)
}

// natives returns the verdicts on native tables, and the list of tables that need no guard. It
// leaves out either if no table belongs to it, and returns nil without any native table.
func (v pageView) natives() any {
	return when(len(v.Native) > 0,
		when(len(v.Guarded) > 0, guardedTables(v.Guarded)),
		when(len(v.Immune) > 0, immuneTables(v.Immune)))
}

// guardedTables returns the verdicts on native tables, with a row for each and a second one for
// the reason.
func guardedTables(tables []api.NativeTable) *html.Node {
	var rows list
	for _, t := range tables {
		cells := list{rowHead(api.TableCell(t.Table)), el("td", nil, cellOf(t.Verdict).element())}
		for _, n := range t.CountCells(countText) {
			cells = append(cells, el("td", nil, n))
		}
		rows = append(rows, el("tr", nil, cells))
		if t.Why != "" {
			rows = append(rows, el("tr", nil, el("td", attrs{{"colspan", "5"}, {"class", "off"}}, t.Why)))
		}
	}
	return block("table", attrs{{"class", "matrix natives"}, {"id", "native"}},
		el("caption", class("hush"), "The verdict on each native nftables table"),
		el("thead", nil, el("tr", nil, column("native table"), column("verdict"), column("chains"), column("rules"), column("elements"))),
		block("tbody", nil, rows...),
	)
}

// immuneTables returns the native tables that need no guard, each with the reason.
func immuneTables(tables []api.NativeTable) *html.Node {
	need := " native tables need no guard"
	if len(tables) == 1 {
		need = " native table needs no guard"
	}
	var items list
	for _, t := range tables {
		items = append(items, el("li", nil, el("code", nil, api.TableCell(t.Table)), " "+t.Why))
	}
	return el("details", class("immune"), el("summary", nil, countText(len(tables))+need), block("ul", nil, items...))
}

// column returns the head of a column.
func column(content any) *html.Node { return el("th", attrs{{"scope", "col"}}, content) }

// rowHead returns the head of a row.
func rowHead(text string) *html.Node { return el("th", attrs{{"scope", "row"}}, text) }

// element returns the verdict with its sign. A browser may break the line behind an underscore.
func (c pageCell) element() *html.Node {
	var words list
	for i, w := range c.Words {
		words = append(words, when(i > 0, "_", el("wbr", nil)), w)
	}
	return el("span", attrs{{"class", "cell " + c.Class}, {"title", c.Meaning}}, el("span", attrs{{"aria-hidden", "true"}}, c.Sign), " ", words)
}

// generation returns the card about the generation.
func (v pageView) generation() *html.Node {
	var content any = el("p", nil, "There is none yet: nothing could be put back.")
	if v.Generation.ID != "" {
		content = block("dl", nil, v.generationFacts()...)
	}
	return card("generation", "Generation", content)
}

// generationFacts returns the rows about a generation that exists.
func (v pageView) generationFacts() (rows list) {
	g := v.Generation
	if !v.OnlyNative() {
		rows = list{fact("ID", el("code", nil, g.ID)), fact("rules", countText(g.Rules)), fact("chains", countText(g.Chains))}
	}
	return append(rows,
		when(len(v.Native) > 0, fact("of native tables", v.NativeText(countText))),
		fact("source", g.Source),
		fact("captured", v.ago(g.Captured)),
		when(!v.LearningPendingSince.IsZero(), fact("pending", "changes of ", v.ago(v.LearningPendingSince), " are not in it yet")),
		when(len(v.Stored) > 0, fact("on disk", strconv.Itoa(len(v.Stored))+", the last ", v.ago(v.LastSaved()))))
}

// canaryd returns the card about this canaryd: its version, backend and mode.
func (v pageView) canaryd() *html.Node {
	mode := cmp.Or(string(v.Mode), "unknown yet")
	if v.Paused {
		mode += ", paused"
	}
	return card("backend", "This canaryd", block("dl", nil,
		factUnlessEmpty("version", v.Version),
		fact("started", v.ago(v.Began)),
		fact("backend", cmp.Or(string(v.Backend.Name), "unknown yet")+" "+v.Backend.Version),
		factUnlessEmpty("because", v.Backend.Reason),
		fact("mode", mode),
		factUnlessEmpty("protects", v.Protect),
		factUnlessEmpty("keeper", v.Keeper),
		factUnlessEmpty("standby", v.Standby),
	))
}

// card returns a narrow card with a title. Its title has that id.
func card(id, title string, content any) *html.Node {
	return block("section", attrs{{"class", "card"}, {"aria-labelledby", id}}, el("h2", attrs{{"id", id}}, title), content)
}

// fact returns a row of a list of facts.
func fact(name string, content ...any) *html.Node {
	return el("div", nil, el("dt", nil, name), el("dd", nil, content...))
}

// factUnlessEmpty returns a row of a list of facts; nil if the text is empty.
func factUnlessEmpty(name, text string) any { return when(text != "", fact(name, text)) }
