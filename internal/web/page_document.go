package web

import (
	"strings"
	"time"

	"golang.org/x/net/html"
)

// document returns the page of the view. The elements with data-live are moved into the page on
// display by the script; the rest changes with a reload only.
func (v pageView) document() *html.Node {
	n := &html.Node{Type: html.DocumentNode}
	n.AppendChild(&html.Node{Type: html.DoctypeNode, Data: "html"})
	add(n, list{"\n", block("html", attrs{{"lang", "en"}, {"data-build", v.Build}}, v.head(), v.body()), "\n"})
	return n
}

// head returns the head: the title, the icon and the style.
func (v pageView) head() *html.Node {
	title := v.Verdict.Title
	if !v.Verdict.Since.IsZero() {
		title += " " + clockText(v.Verdict.Since, v.Now)
	}
	title += " · "
	if v.Node != "" {
		title += v.Node + " · "
	}
	return block("head", nil,
		el("meta", attrs{{"charset", "utf-8"}}),
		el("meta", attrs{{"name", "viewport"}, {"content", "width=device-width, initial-scale=1"}}),
		el("meta", attrs{{"name", "color-scheme"}, {"content", "light dark"}}),
		el("meta", attrs{{"name", "robots"}, {"content", "noindex"}}),
		el("title", nil, title+"canaryd"),
		el("link", attrs{{"rel", "icon"}, {"id", "icon"}, {"href", v.Verdict.icon()}}),
		el("style", nil, pageCSS),
	)
}

// body returns everything that the page shows, and the script.
func (v pageView) body() *html.Node {
	return block("body", nil,
		v.header(),
		el("p", attrs{{"id", "stale"}, {"role", "alert"}, {"hidden", ""}}),
		el("p", attrs{{"id", "say"}, {"role", "status"}, {"class", "hush"}}),
		block("main", attrs{{"id", "main"}, {"data-live", ""}},
			v.headline(),
			v.warnings(),
			v.cards(),
			v.flushes(),
		),
		footer(),
		el("script", nil, pageScript),
	)
}

// header returns the line above the headline: the node, the time of the page and the button.
func (v pageView) header() *html.Node {
	return block("header", nil,
		el("p", class("name"), bird(), "canaryd", when(v.Node != "", " ", el("span", nil, v.Node))),
		el("p", class("asof"),
			el("span", attrs{{"id", "asof"}, {"data-live", ""}}, "as of ", v.clock(v.Now)), " ",
			el("button", attrs{{"type", "button"}, {"id", "live"}, {"aria-pressed", "true"}, {"hidden", ""}}, "live")),
		el("noscript", nil, el("p", class("asof"), "This page refreshes itself only with JavaScript. ", el("a", attrs{{"href", ""}}, "Reload"))),
	)
}

// footer returns the links to the other documents of the server.
func footer() *html.Node {
	return el("footer", nil,
		el("p", nil,
			el("a", attrs{{"href", "api/v1/status"}}, "status as JSON"), " ",
			el("a", attrs{{"href", "metrics"}}, "metrics"), " ",
			el("a", attrs{{"href", "readyz"}}, "readiness")),
		el("p", nil, "This page shows; it changes nothing. Commands go through the socket, on the node."),
	)
}

// headline returns the section with the verdict on the node.
func (v pageView) headline() *html.Node {
	var lines list
	for _, line := range v.Verdict.Lines {
		lines = append(lines, el("p", nil, line))
	}
	since := v.Verdict.Since
	title := el("h1", attrs{{"id", "verdict"}}, v.Verdict.Title, when(!since.IsZero(), " ", v.clock(since)))
	return block("section", attrs{{"id", "part-verdict"}, {"class", "verdict " + v.Verdict.Class}, {"aria-labelledby", "verdict"}},
		sign(v.Verdict.Class),
		block("div", nil, append(list{title}, lines...)...),
	)
}

// warnings returns the section of warnings; nil if there are none.
func (v pageView) warnings() any {
	if len(v.Warnings) == 0 {
		return nil
	}
	var items list
	for _, w := range v.Warnings {
		items = append(items, w.item())
	}
	return block("section", attrs{{"id", "part-warnings"}, {"aria-labelledby", "warnings"}},
		el("h2", attrs{{"id", "warnings"}, {"class", "hush"}}, "Warnings"),
		block("ul", class("warnings"), items...),
	)
}

// item returns the warning as an item of the list, with its chains, commands and alert.
func (w pageWarning) item() *html.Node {
	var chains, choices list
	for i, c := range w.Chains {
		chains = append(chains, when(i > 0, ", "), el("code", nil, c))
	}
	for _, c := range w.Choices {
		choices = append(choices, " ", el("span", nil, "If "+c.If+":"), " ", command(c.Command))
	}
	return el("li", attrs{{"id", "warning-" + w.Name}, {"class", w.Class}},
		el("strong", nil, w.Title), " ", el("span", nil, w.Text),
		when(len(chains) > 0, " ", el("span", nil, chains...)),
		when(w.Command != "", " ", command(w.Command)),
		choices,
		when(w.Alert != "", " ", el("a", attrs{{"href", runbook + strings.ToLower(w.Alert)}}, w.Alert)),
	)
}

// command returns a command for the reader to run.
func command(text string) *html.Node { return el("code", class("run"), text) }

// clock returns the time of day of t.
func (v pageView) clock(t time.Time) *html.Node { return timed(t, clockText(t, v.Now)) }

// ago returns the age of t.
func (v pageView) ago(t time.Time) *html.Node { return timed(t, agoText(t, v.Now)) }

// timed returns a text about t, which shows t in full under the pointer.
func timed(t time.Time, text string) *html.Node {
	return el("time", attrs{{"datetime", isoText(t)}, {"title", utcText(t)}}, text)
}

// bird returns canaryd's mark.
func bird() *html.Node {
	return el("svg", attrs{{"class", "bird"}, {"viewBox", "0 0 24 24"}, {"aria-hidden", "true"}},
		path("M3 20c5 0 7-1 9-4l-1 6 4-5c4-1 6-4 6-8l2-2-3-1c-1-2-3-3-5-3-3 0-4 2-4 5 0 4-3 8-8 12z"),
		el("circle", attrs{{"cx", "16.6"}, {"cy", "6.6"}, {"r", "1.1"}}))
}

// sign returns the picture next to the headline of that class.
func sign(class string) *html.Node {
	lines := "M8.5 9a3.5 3.5 0 1 1 5 3.2c-1 .5-1.5 1.1-1.5 2.3M12 18.2v.3"
	switch class {
	case "healthy":
		lines = "M5 12.5l4.5 4.5L19 7.5"
	case "lost", "partial":
		lines = "M12 5v9M12 18.2v.3"
	case "paused":
		lines = "M9 6v12M15 6v12"
	case "stopped":
		lines = "M7 7h10v10H7z"
	}
	return el("svg", attrs{{"class", "sign"}, {"viewBox", "0 0 24 24"}, {"aria-hidden", "true"}}, path(lines))
}

// path returns the lines of a picture.
func path(lines string) *html.Node { return el("path", attrs{{"d", lines}}) }
