package serve_test

import (
	"errors"
	"fmt"
	"net/http/httptest"

	"github.com/canaryd/canaryd/internal/serve"
)

// A check answers with one line, which a probe and a person can read.
func ExampleWriteCheck() {
	for _, problem := range []error{nil, errors.New("3 rules of ipv4 nat are missing")} {
		answer := httptest.NewRecorder()
		serve.WriteCheck(answer, problem, "ok")
		fmt.Print(answer.Code, " ", answer.Body)
	}
	// Output:
	// 200 ok
	// 503 3 rules of ipv4 nat are missing
}
