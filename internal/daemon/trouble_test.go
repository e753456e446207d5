package daemon

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestTroubleIsToldOnce: each row is a minute; how often the log has a line that
// something is wrong, and how often that it is right again.
func TestTroubleIsToldOnce(t *testing.T) {
	a, b := errors.New("a"), errors.New("b")
	for _, test := range []struct {
		name      string
		second    func(i int) error
		told, end int
	}{
		{"all is well", func(int) error { return nil }, 0, 0},
		{"one that lasts", func(int) error { return a }, 1, 0},
		{"one that ends", func(i int) error { return map[bool]error{true: a}[i < 10] }, 1, 1},
		{"told in turns", func(i int) error { return []error{a, b}[i%2] }, 2, 0},
		{"told in other words each time", func(i int) error { return fmt.Errorf("request %d failed", i) }, 2, 0},
		{"it comes and goes", func(i int) error { return []error{a, nil}[i%2] }, 2, 2},
		{"it comes again and stays", func(i int) error { return map[bool]error{true: a}[i != 5] }, 2, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			var tr trouble
			told, end := 0, 0
			for i := range 60 {
				now := time.Date(2000, 1, 1, 0, 0, i, 0, time.UTC)
				switch err := test.second(i); {
				case err == nil && tr.over():
					end++
				case err != nil && tr.met(err, now):
					told++
				}
				if tr.there() != (test.second(i) != nil) {
					t.Errorf("second %d: there is trouble: %t", i, tr.there())
				}
			}
			if told != test.told || end != test.end {
				t.Errorf("told %d times, ended %d times; want %d and %d", told, end, test.told, test.end)
			}
		})
	}
}

// TestErrorsInTurnsDoNotFillTheLog: the kernel refuses with one reason and another.
func TestErrorsInTurnsDoNotFillTheLog(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		fail := map[string]func(error){
			"probes": r.fake.FailProbes, "reads": r.fake.FailReads,
			"a table": func(err error) { r.fake.DropTableFromReads(rules.IPv4, rules.Nat, err) },
		}
		for name, fails := range fail {
			before := r.logged("could not be ")
			for i := range 120 {
				fails(fmt.Errorf("refused, for the reason %d", i%2))
				r.write(rules.Nat, fmt.Sprintf("-A PREROUTING -s 198.51.100.%d -j ACCEPT", i))
				r.after(500 * time.Millisecond)
			}
			if n := r.logged("could not be ") - before; n < 1 || n > 6 {
				t.Errorf("%s: the log has %d lines of it in a minute, want one for each family in 30 s", name, n)
			}
			fails(nil)
			r.after(40 * time.Second)
			r.wantReady()
		}
	})
}
