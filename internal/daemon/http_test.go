package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// face is the read-only handler for one status.
func face(s Status, dead error) http.Handler {
	reg := prometheus.NewRegistry()
	NewMetrics(reg, MetricsOptions{Families: rules.Families()})
	return NewHTTPHandler(func() Status { return s }, func() error { return dead }, reg)
}

func ask(h http.Handler, method, path string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, path, nil))
	return w
}

func TestHTTPChecks(t *testing.T) {
	lost := sampleStatus()
	lost.Families[rules.IPv4][rules.Nat] = canary.TableDeleted
	dead := errors.New("the loop has not turned for 12s")
	tests := []struct {
		name   string
		path   string
		status Status
		dead   error
		code   int
		body   string
	}{
		{"alive", "/healthz", sampleStatus(), nil, 200, "ok\n"},
		{"alive in mid-outage", "/healthz", lost, nil, 200, "ok\n"},
		{"not alive", "/healthz", sampleStatus(), dead, 503, "the loop has not turned for 12s\n"},
		{"ready", "/readyz", sampleStatus(), nil, 200, "ok\n"},
		{"not ready", "/readyz", lost, nil, 503, "ipv4 nat is table_deleted\n"},
		{"not ready before the first look", "/readyz", Status{}, nil, 503, "no family has been looked at yet\n"},
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
		w := ask(face(sampleStatus(), nil), "GET", path)
		if w.Code != http.StatusOK {
			t.Errorf("%s: %d", path, w.Code)
		}
		if strings.Contains(w.Body.String(), "SECRET") {
			t.Errorf("%s shows a command line or a rule", path)
		}
	}
}

func TestHTTPStatus(t *testing.T) {
	w := ask(face(sampleStatus(), nil), "GET", "/api/v1/status")
	if got := w.Header().Get("Content-Type"); got != "application/json" {
		t.Errorf("content type %q", got)
	}
	var got Status
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sampleStatus().Public(), got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestHTTPIsReadOnly(t *testing.T) {
	h := face(sampleStatus(), nil)
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
	for _, path := range []string{"/v1/restore", "/v1/status", "/other"} {
		if w := ask(h, "GET", path); w.Code != http.StatusNotFound {
			t.Errorf("GET %s: %d", path, w.Code)
		}
	}
}

func TestPage(t *testing.T) {
	s := sampleStatus()
	s.Flushes[0].Culprit.Comm = "<b>evil"
	w := ask(face(s, nil), "GET", "/")
	for _, part := range []string{"KUBE-CANARYD-CANARY", "All rules are in force", "&lt;b&gt;evil (4242)", "30 rules", "120ms", "not watched: the kernel lacks it"} {
		if !strings.Contains(w.Body.String(), part) {
			t.Errorf("no %q on the page", part)
		}
	}
	w = ask(face(Status{}, nil), "GET", "/")
	for _, part := range []string{"no family has been looked at yet", "There is none yet", "None since the start", "</html>"} {
		if !strings.Contains(w.Body.String(), part) {
			t.Errorf("no %q on the page of an empty status", part)
		}
	}
}

func TestServeHTTP(t *testing.T) {
	l, err := ListenHTTP("127.0.0.1:0")
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

func TestHTTPTurnedOff(t *testing.T) {
	l, err := ListenHTTP("")
	if l != nil || err != nil {
		t.Fatalf("got %v, %v", l, err)
	}
	if err := ServeHTTP(t.Context(), l, nil); err != nil {
		t.Error(err)
	}
}
