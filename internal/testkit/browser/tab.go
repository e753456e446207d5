package browser

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// A Look is a way to display a page.
type Look struct {
	Width, Height int
	Phone         bool // with touch, and with the viewport that the page sets
	Dark          bool
	NoScript      bool
	Reduced       bool // the user prefers reduced motion
}

// A Tab is an open page.
type Tab struct {
	b       *Browser
	session string
	profile string

	// b.mu guards these.
	loads    int
	requests []string
	troubles []string
}

// Open opens url in a profile of its own, and returns when it is loaded.
func (b *Browser) Open(url string, look Look) (*Tab, error) {
	var context struct{ BrowserContextID string }
	if err := b.call("", "Target.createBrowserContext", nil, &context); err != nil {
		return nil, err
	}
	var target struct{ TargetID string }
	if err := b.call("", "Target.createTarget", object{"url": "about:blank", "browserContextId": context.BrowserContextID}, &target); err != nil {
		return nil, err
	}
	var attached struct{ SessionID string }
	if err := b.call("", "Target.attachToTarget", object{"targetId": target.TargetID, "flatten": true}, &attached); err != nil {
		return nil, err
	}
	t := &Tab{b: b, session: attached.SessionID, profile: context.BrowserContextID}
	b.mu.Lock()
	b.tabs[t.session] = t
	b.mu.Unlock()
	for _, method := range []string{"Page.enable", "Network.enable", "Log.enable", "Runtime.enable"} {
		if err := t.Call(method, nil, nil); err != nil {
			return nil, err
		}
	}
	if err := t.Show(look); err != nil {
		return nil, err
	}
	return t, t.Go(url)
}

// Close closes the tab and removes its profile.
func (t *Tab) Close() error {
	err := t.b.call("", "Target.disposeBrowserContext", object{"browserContextId": t.profile}, nil)
	t.b.mu.Lock()
	delete(t.b.tabs, t.session)
	t.b.mu.Unlock()
	return err
}

// Show displays the page in another way. NoScript has an effect at the next load.
func (t *Tab) Show(look Look) error {
	scheme, motion := "light", "no-preference"
	if look.Dark {
		scheme = "dark"
	}
	if look.Reduced {
		motion = "reduce"
	}
	for _, step := range []struct {
		method string
		params any
	}{
		{"Emulation.setDeviceMetricsOverride", object{"width": look.Width, "height": look.Height, "deviceScaleFactor": 1, "mobile": look.Phone}},
		{"Emulation.setTouchEmulationEnabled", object{"enabled": look.Phone}},
		{"Emulation.setEmulatedMedia", object{"features": []object{
			{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": motion}}}},
		{"Emulation.setScriptExecutionDisabled", object{"value": look.NoScript}},
	} {
		if err := t.Call(step.method, step.params, nil); err != nil {
			return err
		}
	}
	return nil
}

type object = map[string]any

// Go opens another url in the tab, and returns when it is loaded.
func (t *Tab) Go(url string) error {
	t.b.mu.Lock()
	before := t.loads
	t.b.mu.Unlock()
	var went struct{ ErrorText string }
	if err := t.Call("Page.navigate", object{"url": url}, &went); err != nil {
		return err
	}
	if went.ErrorText != "" {
		return fmt.Errorf("opening %s: %s", url, went.ErrorText)
	}
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for {
		t.b.mu.Lock()
		loaded := t.loads > before
		t.b.mu.Unlock()
		if loaded {
			return nil
		}
		select {
		case <-look.C:
		case <-t.b.done:
			return fmt.Errorf("opening %s: %w", url, t.b.gone)
		}
	}
}

// Call calls any method of the debugging protocol. in and out may be nil.
func (t *Tab) Call(method string, in, out any) error { return t.b.call(t.session, method, in, out) }

// Eval evaluates a JavaScript expression in the page, awaits its promise if it is one, and stores
// its value in out, which may be nil. It works even if the page's own scripts may not run.
func (t *Tab) Eval(expression string, out any) error {
	var got struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	if err := t.Call("Runtime.evaluate", object{"expression": expression, "returnByValue": true, "awaitPromise": true}, &got); err != nil {
		return err
	}
	if e := got.ExceptionDetails; e != nil {
		return fmt.Errorf("%s: %s %s", expression, e.Text, e.Exception.Description)
	}
	if out == nil {
		return nil
	}
	if len(got.Result.Value) == 0 {
		return fmt.Errorf("%s: it has no value", expression)
	}
	return json.Unmarshal(got.Result.Value, out)
}

// Press presses and releases a key, such as "Tab" or "Enter".
func (t *Tab) Press(key string) error {
	code := map[string]int{"Tab": 9, "Enter": 13}[key]
	text := map[string]string{"Enter": "\r"}[key]
	if code == 0 {
		return fmt.Errorf("no key is called %q", key)
	}
	down := object{"type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
	if err := t.Call("Input.dispatchKeyEvent", down, nil); err != nil {
		return err
	}
	return t.Call("Input.dispatchKeyEvent", object{"type": "keyUp", "key": key, "code": key, "windowsVirtualKeyCode": code}, nil)
}

// Screenshot writes a picture of the visible part, or of the whole page.
func (t *Tab) Screenshot(path string, whole bool) error {
	params := object{"format": "png", "captureBeyondViewport": whole}
	if whole {
		var size struct {
			CSSContentSize struct{ Width, Height float64 }
		}
		if err := t.Call("Page.getLayoutMetrics", nil, &size); err != nil {
			return err
		}
		params["clip"] = object{"x": 0, "y": 0, "width": size.CSSContentSize.Width, "height": size.CSSContentSize.Height, "scale": 1}
	}
	var picture struct{ Data []byte }
	if err := t.Call("Page.captureScreenshot", params, &picture); err != nil {
		return err
	}
	small, err := shrunk(picture.Data)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return os.WriteFile(path, small, 0o644)
}

// Requests returns the addresses that the page has requested so far.
func (t *Tab) Requests() []string {
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	return slices.Clone(t.requests)
}

// Troubles returns the errors, warnings and refusals of the page's policy in its console.
func (t *Tab) Troubles() []string {
	t.b.mu.Lock()
	defer t.b.mu.Unlock()
	return slices.Clone(t.troubles)
}

// handle handles an event. b.mu must be held.
func (t *Tab) handle(method string, params json.RawMessage) {
	switch method {
	case "Page.loadEventFired":
		t.loads++
	case "Network.requestWillBeSent":
		var p struct{ Request struct{ URL string } }
		if json.Unmarshal(params, &p) == nil {
			t.requests = append(t.requests, p.Request.URL)
		}
	case "Log.entryAdded":
		var p struct {
			Entry struct{ Level, Text, URL string }
		}
		if json.Unmarshal(params, &p) == nil && p.Entry.Level != "info" && p.Entry.Level != "verbose" {
			t.troubles = append(t.troubles, strings.TrimSpace(p.Entry.Text+" "+p.Entry.URL))
		}
	case "Runtime.exceptionThrown", "Runtime.consoleAPICalled":
		t.troubles = append(t.troubles, string(params))
	}
}
