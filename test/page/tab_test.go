package page

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/browser"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// one is the browser of all tests of this process. The first test that needs it starts it.
// Tests share only the program: each page has its own profile.
var one struct {
	begin   sync.Once
	browser *browser.Browser
	err     error
}

func TestMain(m *testing.M) {
	code := nodetest.Main(m)
	if one.browser != nil {
		if err := one.browser.Close(); err != nil {
			fmt.Fprintln(os.Stderr, "closing the browser:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// start returns the browser.
func start(t *testing.T) *browser.Browser {
	t.Helper()
	_, err := browser.Find()
	nstest.Need(t, "a browser", err)
	one.begin.Do(func() { one.browser, one.err = browser.Start(context.Background()) })
	if one.err != nil {
		t.Fatal(one.err)
	}
	return one.browser
}

// A tab is an open page in a test.
type tab struct {
	*browser.Tab
	t   *testing.T
	url string
}

func open(t *testing.T, b *browser.Browser, url string, look browser.Look) *tab {
	t.Helper()
	opened, err := b.Open(url, look)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := opened.Close(); err != nil {
			t.Error(err)
		}
	})
	return &tab{opened, t, url}
}

func (b *tab) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// eval stores an expression's value in out.
func (b *tab) eval(expression string, out any) {
	b.t.Helper()
	b.must(b.Eval(expression, out))
}

// value returns an expression's value as a string.
func (b *tab) value(expression string) string {
	b.t.Helper()
	var got json.RawMessage
	b.eval("String("+expression+")", &got)
	var text string
	b.must(json.Unmarshal(got, &text))
	return text
}

// text returns the visible text of the first selected element.
func (b *tab) text(selector string) string {
	b.t.Helper()
	quoted, err := json.Marshal(selector)
	b.must(err)
	return b.value("document.querySelector(" + string(quoted) + ").innerText")
}

// within waits until a JavaScript condition holds.
func (b *tab) within(what, condition string) {
	b.t.Helper()
	testkit.Until(b.t, what, func() error {
		var holds bool
		if err := b.Eval(condition, &holds); err == nil && holds { // a loading page has no answer
			return nil
		}
		var says string
		err := b.Eval("document.body.innerText", &says)
		return errors.Join(fmt.Errorf("the page says:\n%s", says), err)
	})
}

// clean fails the test if the page requested anything but itself, or logged a complaint.
func (b *tab) clean() {
	b.t.Helper()
	for _, url := range b.Requests() {
		if url != b.url {
			b.t.Errorf("the page asked for %s", url)
		}
	}
	for _, line := range b.Troubles() {
		b.t.Errorf("the page's console: %s", strings.TrimSpace(line))
	}
}
