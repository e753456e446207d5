package daemon

import (
	"bytes"
	"encoding/json"
	"testing"
)

// FuzzDecode: whatever is accepted means the same when it is written and read
// again, and whatever is refused yields an empty request.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{``, `{}`, `{"generation":"0123"}`, `{"rules":true}`, `{"rules":true}x`, `null`, `[`, `{"rules":{}}`, "\xff"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		again[RestoreRequest](t, body)
		again[CleanupRequest](t, body)
		again[struct{}](t, body)
	})
}

func again[Request comparable](t *testing.T, body []byte) {
	t.Helper()
	var none Request
	request, err := decode[Request](bytes.NewReader(body))
	if err != nil {
		if request != none {
			t.Errorf("%q is refused and still yields %+v", body, request)
		}
		return
	}
	text, err := json.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	back, err := decode[Request](bytes.NewReader(text))
	if err != nil || back != request {
		t.Errorf("%q is read as %+v, written as %s and read as %+v, %v", body, request, text, back, err)
	}
}
