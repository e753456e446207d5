package outcome

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestOf: rows are the tests of the binary itself, and not the tests in its namespaces.
func TestOf(t *testing.T) {
	const text = `=== RUN   TestA
=== RUN   TestA/x/y
    a_test.go:1: in the namespace: exit status 1
        === RUN   TestA
            a_test.go:3: broken
        --- FAIL: TestA (0.00s)
=== RUN   TestB
    b_test.go:1: fine
--- FAIL: TestA (0.02s)
    --- FAIL: TestA/x/y (0.01s)
--- PASS: TestB (0.00s)
FAIL
`
	const broken = `    a_test.go:1: in the namespace: exit status 1
        === RUN   TestA
            a_test.go:3: broken
        --- FAIL: TestA (0.00s)
`
	for _, c := range []struct {
		subtests bool
		want     []Outcome
	}{
		{false, []Outcome{{"TestA", "FAIL", broken}, {"TestB", "PASS", ""}}},
		{true, []Outcome{{"TestA/x/y", "FAIL", broken}}},
	} {
		if diff := cmp.Diff(c.want, Of(text, c.subtests)); diff != "" {
			t.Errorf("subtests %t (-want +got):\n%s", c.subtests, diff)
		}
	}
}
