package baseline

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/reload"
)

// TestWhenToCompare: a new generation is compared at once. Further comparisons use at most 2 %
// of a core.
func TestWhenToCompare(t *testing.T) {
	made, compared := time.Unix(1e9, 0), time.Unix(1e9+60, 0)
	base := newBase(&reload.Baseline{})
	for _, test := range []struct {
		name  string
		known Known
		want  time.Time
	}{
		{"no baseline", None(), time.Time{}},
		{"never compared", Known{Base: base}, made},
		{"the same generation", Known{Base: base, comparedAt: compared, edition: 1}, time.Time{}},
		{"a comparison of a second", Known{Base: base, comparedAt: compared, cost: time.Second}, compared.Add(49 * time.Second)},
	} {
		if got := test.known.CompareAt(1, made); !got.Equal(test.want) {
			t.Errorf("%s: compared at %v, want %v", test.name, got, test.want)
		}
	}
}
