package measure

import (
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
)

func TestSummarize(t *testing.T) {
	for name, tc := range map[string]struct {
		values []float64
		want   Summary
		text   string
	}{
		"nothing":      {nil, Summary{}, "-"},
		"one":          {[]float64{0.25}, Summary{0.25, 0.25, 0.25, 1}, "250 ms"},
		"odd number":   {[]float64{3, 1, 2}, Summary{2, 1, 3, 3}, "2.00 s (1.00 s - 3.00 s)"},
		"even number":  {[]float64{4e-3, 1e-4, 2e-3, 3e-3}, Summary{2.5e-3, 1e-4, 4e-3, 4}, "2.50 ms (100 µs - 4.00 ms)"},
		"nothing took": {[]float64{0, 0}, Summary{0, 0, 0, 2}, "0 (0 - 0)"},
	} {
		t.Run(name, func(t *testing.T) {
			got := Summarize(tc.values...)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("summary (-want +got):\n%s", diff)
			}
			if got.Spread() != tc.text {
				t.Errorf("for people it is %q, want %q", got.Spread(), tc.text)
			}
		})
	}
}

func TestExponent(t *testing.T) {
	for name, tc := range map[string]struct {
		fewer, more, want float64
	}{
		"constant":  {2, 2, 0},
		"linear":    {2, 10, 1},
		"quadratic": {2, 50, 2},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Exponent(Summarize(tc.fewer), Summarize(tc.more), 5); math.Abs(got-tc.want) > 1e-9 {
				t.Errorf("the exponent is %v, want %v", got, tc.want)
			}
		})
	}
	if got := Exponent(Summarize(), Summarize(1), 5); !math.IsNaN(got) {
		t.Errorf("the exponent of what was not measured is %v", got)
	}
}

func TestTable(t *testing.T) {
	table := NewTable("what", "took")
	table.Row("a µs", "1 ms")
	table.Row("b", "10 ms")
	var b strings.Builder
	if n, err := table.WriteTo(&b); err != nil || n != int64(b.Len()) {
		t.Fatal(n, err)
	}
	want := "| what | took  |\n|------|-------|\n| a µs | 1 ms  |\n| b    | 10 ms |\n"
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}
}

// TestProgram: the measurement shows a program's work for 200 ms, and that a sleeping program
// uses no processor.
func TestProgram(t *testing.T) {
	busy, err := Program(t.Context(), "", "sh", "-c", "n=0; while [ $n -lt 100000 ]; do n=$((n+1)); done")
	if err != nil {
		t.Fatal(err)
	}
	if busy.Seconds <= 0 || busy.UserSeconds <= 0 || busy.MiB <= 0 {
		t.Errorf("a busy program used %+v", busy)
	}
	idle, err := Program(t.Context(), "", "sleep", "0.3")
	if err != nil {
		t.Fatal(err)
	}
	if idle.Seconds < 0.3 || idle.UserSeconds+idle.SystemSeconds > 0.2 {
		t.Errorf("a program that slept for 0.3 s used %+v", idle)
	}
	if _, err := Program(t.Context(), "", "sh", "-c", "echo refused >&2; exit 3"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("a program that failed gives the error %v", err)
	}
}

// TestThisProcess: every measurement shows this process's work.
func TestThisProcess(t *testing.T) {
	before, _, err := Times(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	use, err := Work(func() error {
		for range testkit.During(t, 200*time.Millisecond, "the work") {
		}
		return nil
	})
	if err != nil || use.Seconds < 0.2 || use.UserSeconds+use.SystemSeconds <= 0 {
		t.Errorf("200 ms of work: %+v, %v", use, err)
	}
	if after, _, err := Times(os.Getpid()); err != nil || after <= before {
		t.Errorf("processor times went from %v to %v, %v", before, after, err)
	}
	resident, peak, err := Memory(os.Getpid())
	if err != nil || resident <= 0 || peak < resident {
		t.Errorf("resident %v MiB, at most %v MiB, %v", resident, peak, err)
	}
}
