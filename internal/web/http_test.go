package web

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/internal/testkit/sample"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// face is the read-only handler for one status.
func face(s api.Status, dead error) http.Handler {
	reg := prometheus.NewRegistry()
	metrics.NewMetrics(reg, metrics.MetricsOptions{Families: rules.Families()})
	return NewHTTPHandler(About{Node: "node-1", Version: "0.1.0"}, func() api.Status { return s }, func() error { return dead }, reg)
}

func ask(h http.Handler, method, path string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, path, nil))
	return w
}

func TestHTTPChecks(t *testing.T) {
	lost := sample.Status()
	lost.Families[rules.IPv4][rules.Nat] = canary.TableDeleted
	intact := sample.Status()
	intact.RulesWithoutOwner = nil
	partial := sample.Status()
	partial.Families[rules.IPv4][rules.Nat] = canary.Partial
	partial.Quarantined = []api.Quarantined{{Family: rules.IPv4, Table: rules.Nat, Chain: "KUBE-SERVICES"}}
	dead := errors.New("the loop has not turned for 12s")
	tests := []struct {
		name   string
		path   string
		status api.Status
		dead   error
		code   int
		body   string
	}{
		{"alive", "/healthz", sample.Status(), nil, 200, "ok\n"},
		{"alive in mid-outage", "/healthz", lost, nil, 200, "ok\n"},
		{"not alive", "/healthz", sample.Status(), dead, 503, "the loop has not turned for 12s\n"},
		{"ready", "/readyz", intact, nil, 200, "ok\n"},
		{"ready, with a warning", "/readyz", sample.Status(), nil, 200, "ok, but kube-proxy's rules have no owner\n"},
		{"a rule in quarantine", "/readyz", partial, nil, 503, "one rule was lost and could not be put back: ipv4 nat is partial\n"},
		{"alive with a rule in quarantine", "/healthz", partial, nil, 200, "ok\n"},
		{"not ready", "/readyz", lost, nil, 503, "ipv4 nat is table_deleted\n"},
		{"not ready before the first look", "/readyz", api.Status{}, nil, 503, "no family has been looked at yet\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := ask(face(tt.status, tt.dead), "GET", tt.path)
			if w.Code != tt.code || w.Body.String() != tt.body {
				t.Errorf("got %d %q, want %d %q", w.Code, w.Body, tt.code, tt.body)
			}
		})
	}
}

func TestHTTPShowsNoSecret(t *testing.T) {
	for _, path := range []string{"/", "/api/v1/status", "/readyz", "/metrics"} {
		w := ask(face(sample.Status(), nil), "GET", path)
		if w.Code != http.StatusOK {
			t.Errorf("%s: %d", path, w.Code)
		}
		if strings.Contains(w.Body.String(), "SECRET") {
			t.Errorf("%s shows a command line or a rule", path)
		}
	}
}

func TestHTTPStatus(t *testing.T) {
	w := ask(face(sample.Status(), nil), "GET", "/api/v1/status")
	if got := w.Header().Get("Content-Type"); got != "application/json" {
		t.Errorf("content type %q", got)
	}
	var got api.Status
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sample.Status().Public(), got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestHTTPIsReadOnly(t *testing.T) {
	h := face(sample.Status(), nil)
	for _, path := range []string{"/", "/metrics", "/healthz", "/readyz", "/api/v1/status"} {
		if w := ask(h, "HEAD", path); w.Code != http.StatusOK {
			t.Errorf("HEAD %s: %d", path, w.Code)
		}
		for _, method := range []string{"POST", "PUT", "DELETE", "PATCH", "OPTIONS"} {
			if w := ask(h, method, path); w.Code != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: %d", method, path, w.Code)
			}
		}
	}
	for _, path := range []string{"/v1/restore", "/v1/status", "/v1/flush?name=1", "/api/v1/flush?name=1", "/other"} {
		if w := ask(h, "GET", path); w.Code != http.StatusNotFound {
			t.Errorf("GET %s: %d", path, w.Code)
		}
	}
}

func TestPage(t *testing.T) {
	s := sample.Status()
	s.LossSince = time.Time{}
	s.LastKnown = time.Now()
	for _, part := range []string{">Healthy, but kube-proxy&#39;s rules have no owner<", "kube-proxy&#39;s rules have no owner.", "If kube-proxy has left this node:",
		`<code class="run">kubectl -n kube-system delete pod --selector=k8s-app=kube-proxy --field-selector=spec.nodeName=node-1</code>`, `<code class="run">canaryd cleanup --rules --protect=kube-proxy</code>`} {
		if !strings.Contains(ask(face(s, nil), "GET", "/").Body.String(), part) {
			t.Errorf("no %q on the page of rules without an owner", part)
		}
	}
	s.RulesWithoutOwner = nil
	s.Flushes[0].Culprit.Comm = "<b>evil"
	w := ask(face(s, nil), "GET", "/")
	for _, part := range []string{"KUBE-CANARYD-CANARY", ">Healthy</h1>", "&lt;b&gt;evil <small>pid 4242, container router</small>", "30 rules", "120 ms",
		"not watched: the kernel lacks it", "seen by an earlier run", "no space left on device", "default/web-0 (8080/tcp), which is gone and 2 more", "<code class=\"run\">canaryd status --flush f1</code>"} {
		if !strings.Contains(w.Body.String(), part) {
			t.Errorf("no %q on the page", part)
		}
	}
	s.StateUnread = []api.UnreadState{{File: "/var/lib/canaryd/state.json", Reason: "no JSON", Dismiss: "canaryd dismiss"}}
	w = ask(face(s, nil), "GET", "/")
	for _, part := range []string{">Stored rules unreadable</h1>", "The stored rules cannot be read.", "`canaryd dismiss`"} {
		if !strings.Contains(w.Body.String(), part) || strings.Contains(w.Body.String(), ">Healthy<") {
			t.Errorf("no %q on the page of a stored file that cannot be read, or the page says healthy", part)
		}
	}
	w = ask(face(api.Status{}, nil), "GET", "/")
	for _, part := range []string{"Not known yet", "No family has been looked at yet", "There is none yet", "No flush seen since", "</html>"} {
		if !strings.Contains(w.Body.String(), part) {
			t.Errorf("no %q on the page of an empty status", part)
		}
	}
	if w = ask(face(api.Status{LossSince: time.Now()}, nil), "GET", "/"); strings.Contains(w.Body.String(), "No flush seen since") ||
		!strings.Contains(w.Body.String(), "No flush is recorded yet") {
		t.Error("the page of a loss that is being read says that there was none")
	}
}

// TestPageOfNativeTables: on a node in nftables mode the page counts and shows native tables
// first. It only says that iptables' tables are in force.
func TestPageOfNativeTables(t *testing.T) {
	s := sample.Status()
	s.LossSince, s.LastKnown, s.RulesWithoutOwner, s.Decision = time.Time{}, time.Now(), nil, nil
	s.Generation.Rules, s.Generation.Chains = 0, 0
	s.Native = []api.NativeTable{{Family: "ip", Table: "ip kube-proxy", Verdict: canary.Intact, Chains: 1410, Rules: 1890, Elements: 2210}}
	s.Flushes = []api.Flush{{ID: "f1", Kind: canary.Emptied, Time: time.Now(), Lost: api.Lost{Elements: 1020}, Outcome: reload.Proved,
		Native: []api.NativeLoss{{Family: "ip", Table: "ip kube-proxy", Kind: canary.Emptied, Elements: 1020}}}}
	page := ask(face(s, nil), "GET", "/").Body.String()
	for _, part := range []string{"1,890 rules, 1,410 chains and 2,210 elements of native tables are in force.", "<dd>1,890 rules, 1,410 chains and 2,210 elements</dd>",
		"tables are intact and hold no protected rule.", "</span> 1,020 elements</span>", "<dt>lost</dt><dd>1,020 elements</dd>"} {
		if !strings.Contains(page, part) {
			t.Errorf("no %q on the page", part)
		}
	}
	for _, part := range []string{">0 rules", " 0 rules", "jumps", `id="family-ipv4"`} {
		if strings.Contains(page, part) {
			t.Errorf("%q is on the page", part)
		}
	}
	s.Generation.Rules = 3
	page = ask(face(s, nil), "GET", "/").Body.String()
	if native, family := strings.Index(page, `id="native"`), strings.Index(page, `id="family-ipv4"`); native < 0 || family < native {
		t.Errorf("native tables are at %d, iptables' tables at %d", native, family)
	}
	s.Generation.Rules = 5000
	page = ask(face(s, nil), "GET", "/").Body.String()
	if native, family := strings.Index(page, `id="native"`), strings.Index(page, `id="family-ipv4"`); family < 0 || native < family {
		t.Errorf("iptables' tables are at %d, native tables at %d", family, native)
	}
}

// TestPageOfANativeQuarantine: the page names the native tables with parts that are in
// quarantine or would be refused, and quotes none of these parts.
func TestPageOfANativeQuarantine(t *testing.T) {
	s := sample.Status()
	s.LossSince, s.LastKnown, s.RulesWithoutOwner, s.Decision = time.Time{}, time.Now(), nil, nil
	s.Native = []api.NativeTable{{Family: "inet", Table: "inet fw", Verdict: canary.Partial, QuarantinedParts: 1},
		{Family: "ip", Table: "ip lb", Verdict: canary.Intact, Unreplayable: "rule secret", UnreplayableParts: 2}}
	s.Quarantined = []api.Quarantined{{Family: tableid.Inet, Table: "fw", Native: true, Chain: "input", Rule: "secret", Reason: "secret"}}
	page := ask(face(s, nil), "GET", "/").Body.String()
	for _, part := range []string{"One part of a native table was lost and could not be put back.", "inet/fw/input", "Native tables could not be put back whole.", "ip lb"} {
		if !strings.Contains(page, part) {
			t.Errorf("no %q on the page", part)
		}
	}
	if strings.Contains(page, "secret") {
		t.Error("the page quotes a rule")
	}
}

// TestPagePolicy: the page may run its own style and script and no other, and refers to no
// other site.
func TestPagePolicy(t *testing.T) {
	w := ask(face(sample.Status(), nil), "GET", "/")
	policy, page := w.Header().Get("Content-Security-Policy"), w.Body.String()
	for _, word := range []string{"default-src 'none'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'", "connect-src 'self'"} {
		if !strings.Contains(policy, word) {
			t.Errorf("no %q in the policy %q", word, policy)
		}
	}
	if strings.Contains(policy, "unsafe") {
		t.Errorf("the policy is %q", policy)
	}
	for _, name := range []string{"style", "script"} {
		_, inner, _ := strings.Cut(page, "<"+name+">")
		inner, _, found := strings.Cut(inner, "</"+name+">")
		sum := sha256.Sum256([]byte(inner))
		if want := name + "-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "';"; !found || !strings.Contains(policy, want) {
			t.Errorf("no %q in the policy %q", want, policy)
		}
	}
	rest := strings.ReplaceAll(page, "xmlns=%27http://www.w3.org/2000/svg%27", "") // a name, not a place
	rest = strings.ReplaceAll(rest, `<a href="`+runbook, "")                       // a link, which a person follows
	for _, place := range []string{"http:", "https:", "href=\"/", "src=", "url(", "@import", "style=", " on"} {
		for _, line := range strings.Split(rest, "\n") {
			if place == " on" && !eventHandler.MatchString(line) {
				continue
			}
			if strings.Contains(line, place) {
				t.Errorf("%q on the page: %s", place, line)
			}
		}
	}
	for _, path := range []string{"/", "/metrics", "/healthz", "/api/v1/status", "/other"} {
		h := ask(face(sample.Status(), nil), "GET", path).Header()
		for name, want := range map[string]string{"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"} {
			if got := h.Get(name); got != want {
				t.Errorf("%s: %s is %q, want %q", path, name, got, want)
			}
		}
		if !strings.HasPrefix(h.Get("Content-Security-Policy"), "default-src 'none'") {
			t.Errorf("%s: the policy is %q", path, h.Get("Content-Security-Policy"))
		}
	}
}

// eventHandler matches an attribute that holds a script.
var eventHandler = regexp.MustCompile(`<[a-z][^>]* on[a-z]+=`)

func TestTexts(t *testing.T) {
	now := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	var got []string
	for _, d := range []time.Duration{-1, 0, 320 * time.Microsecond, 4200 * time.Microsecond, 47860 * time.Microsecond, 1520 * time.Millisecond,
		59 * time.Second, 75 * time.Second, 3 * time.Hour, 72 * time.Hour} {
		got = append(got, durationText(d)+", "+agoText(now.Add(-d), now)+", "+clockText(now.Add(-d), now))
	}
	for _, n := range []int{0, 999, 1000, 62590, 1234567} {
		got = append(got, countText(n))
	}
	want := []string{
		"0 s, just now, 05:06:07 UTC", "0 s, just now, 05:06:07 UTC", "320 µs, just now, 05:06:06 UTC", "4.2 ms, just now, 05:06:06 UTC",
		"48 ms, just now, 05:06:06 UTC", "1.5 s, 1 s ago, 05:06:05 UTC", "59 s, 59 s ago, 05:05:08 UTC", "1 min 15 s, 1 min ago, 05:04:52 UTC",
		"3 h, 3 h ago, 02:06:07 UTC", "3 days, 3 days ago, 2026-03-01 05:06:07 UTC",
		"0", "999", "1,000", "62,590", "1,234,567",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestServeHTTP(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	began := make(chan struct{})
	go func() {
		served <- ServeHTTP(ctx, l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			close(began)
			<-r.Context().Done() // the daemon ends while a request is under way
			_, _ = io.WriteString(w, "finished")
		}))
	}()
	go func() { <-began; cancel() }()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	response, err := client.Get("http://" + l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(response.Body)
	response.Body.Close()
	if string(body) != "finished" {
		t.Errorf("a request under way got %q", body)
	}
	if err := <-served; err != nil {
		t.Errorf("an orderly end is reported as %v", err)
	}
}
