package testkit

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// A patient is a test with a deadline, that notes how it fails instead of failing.
type patient struct {
	testing.TB
	deadline time.Time
	failure  string
}

func (p *patient) Deadline() (time.Time, bool) { return p.deadline, !p.deadline.IsZero() }

func (p *patient) Fatalf(format string, args ...any) {
	p.failure = fmt.Sprintf(format, args...)
	panic(p) // as runtime.Goexit, it ends what runs
}

// TestUntil: a wait ends with its state, however long that takes, and else shortly before the test
// would be killed, with what it waited for.
func TestUntil(t *testing.T) {
	for _, test := range []struct {
		story          string
		deadline, back time.Duration // zero: never
		want           string
		took           time.Duration
	}{
		{"at once", time.Minute, 1, "", pollEvery},
		{"after an hour without a deadline", 0, time.Hour, "", time.Hour},
		{"before the deadline", 30 * time.Minute, 29 * time.Minute, "", 29 * time.Minute},
		{"never", 30 * time.Minute, 0, "waited 29m50s for the rules, until the test's time was nearly over: 0 rules", 29*time.Minute + 50*time.Second},
		{"never, in a short test", 10 * time.Second, 0, "waited 9s for the rules, until the test's time was nearly over: 0 rules", 9 * time.Second},
	} {
		t.Run(test.story, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				p := &patient{TB: t}
				if test.deadline > 0 {
					p.deadline = start.Add(test.deadline)
				}
				func() {
					defer func() { _ = recover() }()
					Until(p, "the rules", func() error {
						if test.back > 0 && time.Since(start) >= test.back {
							return nil
						}
						return errors.New("0 rules")
					})
				}()
				if p.failure != test.want {
					t.Errorf("failed with %q, want %q", p.failure, test.want)
				}
				if took := time.Since(start); took < test.took || took > test.took+2*pollEvery {
					t.Errorf("it took %s, want %s", took, test.took)
				}
			})
		})
	}
}

func TestPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		Pass(t, time.Minute, "that no record comes")
		if took := time.Since(start); took != time.Minute {
			t.Errorf("%s passed, want a minute", took)
		}
	})
}

func TestReceive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		values := make(chan int)
		go func() { time.Sleep(time.Hour); values <- 7 }()
		if got := Receive(&patient{TB: t}, values, "a value"); got != 7 {
			t.Errorf("received %d, want 7", got)
		}
		p := &patient{TB: t, deadline: time.Now().Add(time.Minute)}
		func() {
			defer func() { _ = recover() }()
			Receive(p, values, "another value")
		}()
		if want := "waited for another value, until the test's time was nearly over"; p.failure != want {
			t.Errorf("failed with %q, want %q", p.failure, want)
		}
	})
}
