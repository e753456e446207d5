// Package kubeproxy runs a real kube-proxy next to canaryd, and flushes the rules of both.
package kubeproxy

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
)

// results is the environment variable with the path of a file to which each test appends its
// results. Tests run in processes of their own.
const results = "CANARYD_TEST_KUBE_PROXY_RESULTS"

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Getenv(results) != "" {
		return nodetest.Main(m)
	}
	file, err := os.CreateTemp("", "canaryd-kube-proxy")
	if err == nil {
		defer os.Remove(file.Name())
		err = os.Setenv(results, file.Name())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer file.Close()
	code := nodetest.Main(m)
	if text, err := os.ReadFile(file.Name()); err == nil && len(text) > 0 {
		fmt.Printf("\n%s", text)
	}
	return code
}

// report appends lines to the results.
func report(t *testing.T, lines ...string) {
	t.Helper()
	file, err := os.OpenFile(os.Getenv(results), os.O_WRONLY|os.O_APPEND, 0)
	if err == nil {
		_, err = file.WriteString(strings.Join(lines, "\n") + "\n\n")
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = file.Close() // its text is written
}
