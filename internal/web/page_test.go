package web

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/html"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/internal/testkit/sample"
	"github.com/canaryd/canaryd/pkg/canary"
)

// viewOf returns the view of a status at pageTime.
func viewOf(s api.Status, dead error, node, version string) pageView {
	return pageView{Build: "0123456789ab", Node: node, Version: version, Began: pageTime.Add(-time.Hour)}.of(s.Public(), dead, pageTime)
}

// pageOf returns the page of a view.
func pageOf(t *testing.T, v pageView) []byte {
	t.Helper()
	var text bytes.Buffer
	if err := html.Render(&text, v.document()); err != nil {
		t.Fatal(err)
	}
	return text.Bytes()
}

// canonical returns the page as a parser understands it. The parser moves lines behind the body
// into it.
func canonical(t *testing.T, page []byte) string {
	t.Helper()
	n, err := html.Parse(bytes.NewReader(page))
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	if err := html.Render(&text, n); err != nil {
		t.Fatal(err)
	}
	out, found := strings.CutSuffix(text.String(), "</body></html>")
	if !found {
		t.Fatalf("the page ends with %q", out[len(out)-20:])
	}
	return strings.TrimRight(out, "\n") + "\n</body></html>\n"
}

// goldenPages are the states whose whole pages are in testdata.
var goldenPages = []string{"empty", "healthy", "paused", "native tables first", "warnings", "records"}

// TestPages compares whole pages with files, without the text of style and script.
func TestPages(t *testing.T) {
	states := pageStates()
	for _, name := range goldenPages {
		page := canonical(t, pageOf(t, viewOf(states[name], nil, "node-1", "0.1.0")))
		golden.Compare(t, goldenName(name), masked(page))
	}
}

// goldenName returns the name of the file of a state's page.
func goldenName(state string) string { return strings.ReplaceAll(state, " ", "-") + ".html" }

// masked replaces the text of style and script, which have files of their own.
func masked(page string) []byte {
	return []byte(strings.NewReplacer(pageCSS, "page.css", pageScript, "page.js").Replace(page))
}

// TestPageBuild: the digest depends on the program only. Pages differ only in parts that the script
// replaces, so that an empty page is enough for the digest.
func TestPageBuild(t *testing.T) {
	if a, b := pageBuild(), pageBuild(); a != b || len(a) != 12 {
		t.Errorf("the digests are %q and %q", a, b)
	}
	for _, page := range []string{ask(face(sample.Status(), nil), "GET", "/").Body.String(), ask(face(api.Status{}, nil), "GET", "/").Body.String()} {
		if want := ` data-build="` + pageBuild() + `"`; !strings.Contains(page, want) {
			t.Errorf("no %q on the page", want)
		}
	}
	want := fixedPart(viewOf(api.Status{}, nil, "node-1", "").document())
	if text := strings.Join(want, "\n"); !strings.Contains(text, pageCSS) || !strings.Contains(text, pageScript) {
		t.Error("the fixed part of the page lacks the style or the script")
	}
	for name, s := range pageStates() {
		if diff := cmp.Diff(want, fixedPart(viewOf(s, nil, "node-1", "0.1.0").document())); diff != "" {
			t.Errorf("%s has other elements that the script does not replace (-empty +this):\n%s", name, diff)
		}
	}
}

// fixedPart returns the elements and texts below n that the script does not replace.
func fixedPart(n *html.Node) []string {
	for c := range n.Descendants() {
		live := slices.ContainsFunc(c.Attr, func(a html.Attribute) bool { return a.Key == "data-live" })
		for (live || c.Data == "title") && c.FirstChild != nil {
			c.RemoveChild(c.FirstChild)
		}
		if c.Data == "link" {
			c.Attr = nil
		}
	}
	return outline(n)
}

// TestPageParses: a parser finds the elements and texts that canaryd has built, and no others.
func TestPageParses(t *testing.T) {
	for name, s := range pageStates() {
		checkParses(t, name, viewOf(s, nil, "node-1", "0.1.0"))
	}
	for i := range uint64(200) {
		r := rand.New(rand.NewPCG(i, 0))
		checkParses(t, fmt.Sprint("drawn ", i), viewOf(drawStatus(r, hostile), errors.New(one(r, hostile)), one(r, hostile), one(r, hostile)))
	}
}

// FuzzPage: no name breaks out of its text, and the page shows all its visible characters.
func FuzzPage(f *testing.F) {
	for i, name := range hostile {
		f.Add(uint64(i), name)
	}
	f.Fuzz(func(t *testing.T, seed uint64, name string) {
		r := rand.New(rand.NewPCG(seed, 0))
		s := drawStatus(r, []string{name, name, ""})
		s.Families, s.NativeOverLimit = nil, 0
		s.CanaryChain, s.Mode, s.Generation.ID = name, api.Mode(name), name
		s.Native = []api.NativeTable{{Table: "ip t", Verdict: canary.Verdict(name), Why: name}}
		s.Flushes = []api.Flush{{ID: name, Kind: canary.Verdict(name), Outcome: api.Outcome(name), Policies: []string{name},
			Culprit: api.Culprit{PID: 1, Comm: name, ContainerName: name}, Native: []api.NativeLoss{{Table: name, Parts: []string{name}}},
			Lost: api.Lost{Tables: []api.TableLoss{{Table: name, Rules: 1, PerChain: []api.ChainLoss{{Chain: name}}}}}}}
		page := checkParses(t, "page", viewOf(s, errors.New(name), name, name))
		shown := strings.Map(visible, name)
		if n := strings.Count(page, shown); n < 10 {
			t.Errorf("%q is %d times on the page", shown, n)
		}
	})
}

// checkParses compares the page that a parser reads with the elements of the view, and returns
// them as text.
func checkParses(t *testing.T, name string, v pageView) string {
	t.Helper()
	parsed, err := html.ParseWithOptions(bytes.NewReader(pageOf(t, v)), html.ParseOptionEnableScripting(false))
	if err != nil {
		t.Fatal(err)
	}
	want, got := outline(v.document()), outline(parsed)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-built +parsed):\n%s", name, diff)
	}
	return strings.Join(got, "\n")
}

// outline returns the elements and texts below n in order. It joins neighbouring texts, as a
// parser does, and skips white space around head, body and the children of body.
func outline(n *html.Node) []string {
	var lines []string
	text := ""
	flush := func() {
		if text != "" && !(slices.Contains([]string{"", "html", "body"}, n.Data) && strings.TrimSpace(text) == "") {
			lines = append(lines, "text "+text)
		}
		text = ""
	}
	for c := range n.ChildNodes() {
		if c.Type == html.TextNode {
			text += c.Data
			continue
		}
		flush()
		line := fmt.Sprint(c.Type, " ", c.Data)
		for _, a := range c.Attr {
			line += fmt.Sprintf(" %s=%q", a.Key, a.Val)
		}
		lines = append(append(lines, line), outline(c)...)
		lines = append(lines, "end of "+c.Data)
	}
	flush()
	return lines
}
