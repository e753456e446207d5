package control

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/api"
)

// FuzzDecode: an accepted request means the same after it is written and read again, and a
// refused one yields an empty request.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{``, `{}`, `{"generation":"0123"}`, `{"agreed":{"ipv4":{"nat":"0"}},"dryRun":true}`, `{"rules":true}`, `{"rules":true}x`, `null`, `[`, `{"rules":{}}`, "\xff"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		again[api.RestoreRequest](t, body)
		again[api.CleanupRequest](t, body)
		again[api.DrillRequest](t, body)
		again[struct{}](t, body)
	})
}

func again[Request any](t *testing.T, body []byte) {
	t.Helper()
	var none Request
	request, err := decode[Request](bytes.NewReader(body))
	if err != nil {
		if !reflect.DeepEqual(request, none) {
			t.Errorf("%q is refused and still yields %+v", body, request)
		}
		return
	}
	text, err := json.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	back, err := decode[Request](bytes.NewReader(text))
	same, _ := json.Marshal(back)
	if err != nil || !bytes.Equal(same, text) {
		t.Errorf("%q is read as %+v, written as %s and read as %+v, %v", body, request, text, back, err)
	}
}

// FuzzControlHandler: each request has one answer. A refused request changes nothing, and
// neither does a GET.
func FuzzControlHandler(f *testing.F) {
	for _, path := range []string{"/v1/status", "/v1/look", "/v1/restore", "/v1/pause", "/v1/resume", "/v1/drill", "/v1/watch", "/v1/cleanup", "/v1/generation?id=a&family=ipv4", "/v1/generation?family=%zz", "/v1/flush?id=1", "//v1/../v1/cleanup", "/"} {
		for _, method := range []string{"GET", "POST", "HEAD", "DELETE"} {
			f.Add(method, path, []byte(`{}`))
			f.Add(method, path, []byte(`{"rules":true,"generation":"x","seconds":1e300}`))
			f.Add(method, path, []byte("\xff{"))
		}
	}
	f.Fuzz(func(t *testing.T, method, path string, body []byte) {
		target, err := url.ParseRequestURI(path)
		if err != nil || target.Host != "" {
			return
		}
		request, err := http.NewRequest(method, target.String(), bytes.NewReader(body))
		if err != nil {
			return // no request at all
		}
		request.RequestURI = target.RequestURI()
		c := &fakeController{gone: make(chan struct{})}
		close(c.gone) // so that a watch ends
		w := httptest.NewRecorder()
		NewHandler(c).ServeHTTP(w, request)
		if w.Code != http.StatusOK && len(c.asked) != 0 {
			t.Errorf("%s %s is answered %d and was done: %q", method, path, w.Code, c.asked)
		}
		if len(c.asked) > 1 {
			t.Errorf("%s %s was done twice: %q", method, path, c.asked)
		}
		for _, done := range c.asked {
			if asks := strings.HasPrefix(done, "render") || strings.HasPrefix(done, "flush") || done == "watch"; !asks && method != http.MethodPost {
				t.Errorf("%s %s was done: %q", method, path, done)
			}
		}
	})
}
