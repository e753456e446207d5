package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"regexp"
	"strings"
)

// The picture's measures, in its own units, which are pixels if it is not scaled.
const (
	width     = 840
	left      = 112 // of the plot
	right     = 816 // of the plot
	top       = 74  // of the plot's first row
	row       = 17
	textRow   = 20
	lead      = 25.0 // milliseconds shown before the flush
	behind    = 70.0 // and shown after the proof
	slowdown  = 30   // how many times slower the picture is than the recording
	tickEvery = 50   // milliseconds between two numbers of the axis
)

// style has the colours of GitHub's pages, light and dark, because most readers see the picture
// there. It moves only for people who have not requested less motion.
const style = `
.card{fill:#fff;stroke:#d1d9e0}.cover{fill:#fff}text{fill:#1f2328;font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.quiet{fill:#59636e}.title{font-size:14px;font-weight:600}.ok,.bad,.mark,.axis{fill:none}
.ok{stroke:#1a7f37;stroke-width:4;stroke-linecap:round}.bad{stroke:#d1242f;stroke-width:1.6}
.mark{stroke:#0969da;stroke-dasharray:3 3}.axis{stroke:#d1d9e0}.when{fill:#0969da}
.cover{opacity:0}
@media(prefers-color-scheme:dark){.card{fill:#0d1117;stroke:#3d444d}.cover{fill:#0d1117}text{fill:#f0f6fc}.quiet{fill:#9198a1}
.ok{stroke:#3fb950}.bad{stroke:#f85149}.mark{stroke:#4493f8}.axis{stroke:#3d444d}.when{fill:#4493f8}}
@media(prefers-reduced-motion:no-preference){.cover{opacity:1;animation:reveal %ds linear forwards}.said{animation:appear .3s backwards}}
@keyframes reveal{to{transform:translateX(%dpx)}}@keyframes appear{from{opacity:0}}
`

// An event is a moment that the picture names.
type event struct {
	at   float64
	name string
	text string
}

// draw returns the picture of a recording: the answered connections, and canaryd's log
// meanwhile.
func (r recording) draw() []byte {
	events := r.events()
	to := events[len(events)-1].at + behind
	x := func(ms float64) float64 { return left + (ms+lead)/(to+lead)*(right-left) }
	bottom := top + row*len(r.Targets)
	height := bottom + 48 + textRow*len(events) + 12
	seconds := int(math.Ceil((to + lead) * slowdown / 1000))

	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img" aria-labelledby="title">`+"\n", width, height)
	fmt.Fprintf(&out, "<title id=\"title\">%s</title>\n", escape(r.caption(events)))
	fmt.Fprintf(&out, "<style>"+style+"</style>\n", seconds, right-left+16)
	fmt.Fprintf(&out, `<rect class="card" x=".5" y=".5" width="%d" height="%d" rx="8"/>`+"\n", width-1, height-1)
	text(&out, "title", 16, 26, fmt.Sprintf("%s, on a node with %d services", r.Command, r.Services))
	text(&out, "quiet", 16, 46, "Each mark is a connection that a client began:")
	fmt.Fprintf(&out, `<path class="ok" d="M362 42h0"/><path class="bad" d="M440 39l6 6m0-6l-6 6"/>`)
	text(&out, "quiet", 370, 46, "answered")
	text(&out, "quiet", 452, 46, fmt.Sprintf("not within %d ms", patience.Milliseconds()))
	for ms := 0.0; ms < to; ms += tickEvery {
		fmt.Fprintf(&out, `<path class="axis" d="M%.1f %dv4"/>`, x(ms), bottom+2)
		text(&out, "quiet", x(ms)-8, float64(bottom+20), fmt.Sprint(ms))
	}
	text(&out, "quiet", right-14, float64(bottom+20), "ms")
	for i, name := range r.Targets {
		text(&out, "quiet", 16, float64(top+row*i+10), name)
	}
	r.marks(&out, to, x)
	for _, e := range events {
		fmt.Fprintf(&out, `<path class="mark" d="M%.1f %dV%d"/>`+"\n", x(e.at), top-8, bottom)
	}
	fmt.Fprintf(&out, `<svg x="%d" y="%d" width="%d" height="%d"><rect class="cover" width="100%%" height="100%%"/></svg>`+"\n",
		left-6, top-10, right-left+16, bottom-top+12)
	for i, e := range events {
		y := float64(bottom + 48 + textRow*i)
		fmt.Fprintf(&out, `<g class="said" style="animation-delay:%.1fs">`, (e.at+lead)*slowdown/1000)
		text(&out, "when", 16, y, fmt.Sprintf("%4.0f ms", e.at))
		text(&out, "", left, y, e.name)
		text(&out, "quiet", left+float64(len(e.name)+2)*7.25, y, e.text)
		out.WriteString("</g>\n")
	}
	out.WriteString("</svg>\n")
	return out.Bytes()
}

// marks draws the connections, one row for each target.
func (r recording) marks(out *bytes.Buffer, to float64, x func(float64) float64) {
	answered, lost := new(strings.Builder), new(strings.Builder)
	for _, a := range r.Attempts {
		if a.At < -lead || a.At > to {
			continue
		}
		y := top + row*a.Target + 6
		if a.OK {
			fmt.Fprintf(answered, "M%.1f %dh0", x(a.At), y)
		} else {
			fmt.Fprintf(lost, "M%.1f %dl6 6m0-6l-6 6", x(a.At)-3, y-3)
		}
	}
	fmt.Fprintf(out, `<path class="ok" d="%s"/>`+"\n"+`<path class="bad" d="%s"/>`+"\n", answered, lost)
}

// field finds a field of a log line.
func field(text, name string) string {
	if found := regexp.MustCompile(` ` + name + `="?([^" ]+(?: [^"=]*)?)"?`).FindStringSubmatch(text); found != nil {
		return strings.TrimSpace(found[1])
	}
	return ""
}

var message = regexp.MustCompile(`^"([^"]*)"`)

// events returns the named moments: the flush, and canaryd's log lines about it until the rules
// were proved.
func (r recording) events() []event {
	events := []event{{0, "$ " + r.Command, ""}}
	for _, l := range r.Log {
		found := message.FindStringSubmatch(l.Text)
		if found == nil {
			continue
		}
		e := event{at: l.At, name: found[1]}
		switch {
		case strings.HasPrefix(e.name, "Rules are being flushed"):
			e.text = "noticed after " + field(l.Text, "noticedAfter")
		case strings.HasPrefix(e.name, "Rules were lost"):
			by, _, _ := strings.Cut(regexp.MustCompile(`by="([^"]*)"`).FindString(l.Text), " <-")
			e.text = fmt.Sprintf("%s rules in %s chains, %s", number(l.Text, "rules"), number(l.Text, "chains"), strings.Trim(by, `"`))
			e.text = strings.Replace(e.text, `by="`, "by ", 1)
		case strings.HasPrefix(e.name, "The rules are back"):
			e.text = "absent for " + field(l.Text, "absent")
			return append(events, e)
		}
		events = append(events, e)
	}
	return events
}

func number(text, name string) string {
	if found := regexp.MustCompile(` ` + name + `=(\d+)`).FindStringSubmatch(text); found != nil {
		return found[1]
	}
	return "?"
}

// caption describes the picture in words, for people who do not see it.
func (r recording) caption(events []event) string {
	last := events[len(events)-1]
	lost := 0
	for _, a := range r.Attempts {
		if !a.OK && a.At > -lead {
			lost++
		}
	}
	return fmt.Sprintf("%s on a node with %d services while canaryd runs: %.0f ms later the rules are back and proved; %d connections of clients were not answered at once",
		r.Command, r.Services, last.at, lost)
}

func text(out *bytes.Buffer, class string, x, y float64, s string) {
	if class != "" {
		class = ` class="` + class + `"`
	}
	fmt.Fprintf(out, `<text%s x="%.0f" y="%.0f" xml:space="preserve">%s</text>`+"\n", class, x, y, escape(s))
}

func escape(s string) string {
	var out bytes.Buffer
	_ = xml.EscapeText(&out, []byte(s)) // a buffer takes all
	return out.String()
}
