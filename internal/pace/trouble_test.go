package pace

import (
	"errors"
	"fmt"
	"testing"
	"time"
)

// TestTroubleIsToldOnce: each row is a minute, with the number of log lines about a trouble and
// about its end.
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
			var tr Trouble
			told, end := 0, 0
			for i := range 60 {
				now := time.Date(2000, 1, 1, 0, 0, i, 0, time.UTC)
				switch err := test.second(i); {
				case err == nil && tr.Over():
					end++
				case err != nil && tr.Met(err, now):
					told++
				}
				if tr.There() != (test.second(i) != nil) {
					t.Errorf("second %d: there is trouble: %t", i, tr.There())
				}
			}
			if told != test.told || end != test.end {
				t.Errorf("told %d times, ended %d times; want %d and %d", told, end, test.told, test.end)
			}
		})
	}
}
