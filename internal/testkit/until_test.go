package testkit

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// A patient is a test with a deadline that notes how it fails instead of failing.
type patient struct {
	testing.TB
	deadline time.Time
	failure  string
}

func (p *patient) Deadline() (time.Time, bool) { return p.deadline, !p.deadline.IsZero() }

func (p *patient) Fatalf(format string, args ...any) {
	p.failure = fmt.Sprintf(format, args...)
	panic(p) // like runtime.Goexit, it ends the running function
}

// TestUntil: a wait ends when its state is reached, after any time. Otherwise it ends shortly
// before the test would be killed, and names the state.
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
				if took := time.Since(start); took < test.took || took > test.took+2*pollLater {
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

// TestStays: there are looks in between, and one when the time is over.
func TestStays(t *testing.T) {
	const long = time.Minute
	for _, test := range []struct {
		story string
		until time.Duration
		want  string
	}{
		{"for all the time", long + 1, ""},
		{"to a third", 20 * time.Second, "after 20s of 1m0s, in which is to be seen that rules stay: 0 rules"},
		{"to the end", long, "after 1m0s of 1m0s, in which is to be seen that rules stay: 0 rules"},
	} {
		t.Run(test.story, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start, p, looks := time.Now(), &patient{TB: t}, 0
				func() {
					defer func() { _ = recover() }()
					Stays(p, long, "that rules stay", func() error {
						looks++
						if time.Since(start) >= test.until {
							return errors.New("0 rules")
						}
						return nil
					})
				}()
				if p.failure != test.want {
					t.Errorf("failed with %q, want %q", p.failure, test.want)
				}
				if took := time.Since(start); took != min(test.until, long) || looks < int(took/pollEvery) {
					t.Errorf("it took %s and %d looks", took, looks)
				}
			})
		})
	}
}

// TestPausesGrow: the longer Until has waited, the fewer looks it takes, and Steadily continues
// as it began.
func TestPausesGrow(t *testing.T) {
	for name, test := range map[string]struct {
		wait        func(testing.TB, string, func() error) time.Duration
		least, most int
	}{"Until": {Until, 40, 60}, "Steadily": {Steadily, 250, 251}} {
		synctest.Test(t, func(t *testing.T) {
			start, looks := time.Now(), 0
			took := test.wait(&patient{TB: t}, "five seconds", func() error {
				if looks++; time.Since(start) < 5*time.Second {
					return errors.New("not yet")
				}
				return nil
			})
			if looks < test.least || looks > test.most || took > 5*time.Second+pollLater {
				t.Errorf("%s took %d looks and %s", name, looks, took)
			}
		})
	}
}

// TestLooksThatTakeLong: pauses as long, up to a second, follow long looks.
func TestLooksThatTakeLong(t *testing.T) {
	for takes, want := range map[time.Duration]time.Duration{0: pollEvery, time.Second / 2: time.Second, time.Hour: time.Hour + pollSlowly} {
		synctest.Test(t, func(t *testing.T) {
			var at []time.Time
			Until(&patient{TB: t}, "three looks", func() error {
				at = append(at, time.Now())
				time.Sleep(takes)
				if len(at) < 3 {
					return errors.New("fewer")
				}
				return nil
			})
			if got := at[2].Sub(at[1]); got != want {
				t.Errorf("looks of %s come each %s, want %s", takes, got, want)
			}
		})
	}
}

func TestDuring(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start, last := time.Now(), time.Duration(0)
		for passed := range During(t, time.Minute, "a storm") {
			last = passed
			time.Sleep(time.Second)
		}
		if took := time.Since(start); took != time.Minute || last != 59*time.Second {
			t.Errorf("it lasted %s, and the last turn began at %s", took, last)
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
