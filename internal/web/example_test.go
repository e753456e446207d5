package web_test

import (
	"fmt"
	"net/http/httptest"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/web"
)

// The handler serves health, readiness, metrics, the status and the page.
func ExampleNewHTTPHandler() {
	handler := web.NewHTTPHandler(web.About{Node: "worker-1"},
		func() api.Status { return api.Status{Mode: api.Observe} }, func() error { return nil }, prometheus.NewRegistry())
	for _, path := range []string{"/healthz", "/metrics", "/api/v1/status", "/"} {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, httptest.NewRequest("GET", "http://localhost"+path, nil))
		fmt.Println(answer.Code, path)
	}
	// Output:
	// 200 /healthz
	// 200 /metrics
	// 200 /api/v1/status
	// 200 /
}
