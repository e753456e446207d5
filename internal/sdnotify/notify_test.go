package sdnotify

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A manager is a service manager that records its messages and their times.
type manager struct {
	began time.Time
	heard []string // "SECONDS MESSAGE"
	err   error    // of sending
}

func (m *manager) send(message string) error {
	m.heard = append(m.heard, time.Since(m.began).String()+" "+message)
	return m.err
}

func verdictOf(v canary.Verdict, id string) api.Status {
	s := api.Status{
		Families:   map[rules.Family]api.Verdicts{rules.IPv4: {rules.Mangle: v, rules.Nat: v, rules.Filter: v}},
		Generation: api.Generation{ID: id, Rules: 460, Chains: 147},
	}
	if id != "" {
		s.Generation.Captured = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	}
	return s
}

func TestNotifier(t *testing.T) {
	const whole = "STATUS=Healthy: 460 rules in 147 chains"
	const waits = "STATUS=Waiting for every table to be readable and planted: ipv4 mangle is unknown"
	const stops = "STOPPING=1\nSTATUS=Stopping; canaries and rules stay in place"
	flushed := verdictOf(canary.Emptied, "g1")
	flushed.Flushes = []api.Flush{{Time: time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC), Kind: canary.Emptied, Outcome: api.Pending}}
	back := verdictOf(canary.Intact, "g1")
	back.Flushes = []api.Flush{{Time: flushed.Flushes[0].Time, Kind: canary.Emptied, Outcome: "proved"}}
	for _, test := range []struct {
		name     string
		watchdog time.Duration
		status   func(time.Duration) api.Status
		alive    func(time.Duration) error
		sendErr  error
		lasts    time.Duration
		want     []string
	}{{
		name: "ready as soon as every table was looked at",
		status: func(at time.Duration) api.Status {
			if at < 100*time.Millisecond {
				return verdictOf(canary.Unknown, "")
			}
			return verdictOf(canary.Intact, "g1")
		},
		lasts: 20 * time.Second,
		want:  []string{"0s " + waits, "100ms READY=1\n" + whole, "20s " + stops},
	}, {
		name:   "a loss is no reason to keep others waiting",
		status: func(time.Duration) api.Status { return verdictOf(canary.Emptied, "g1") },
		lasts:  time.Second,
		want:   []string{"0s READY=1\nSTATUS=NOT healthy: ipv4 mangle is emptied, ipv4 nat is emptied, ipv4 filter is emptied", "1s " + stops},
	}, {
		name:   "nobody waits for ever for a table that cannot be read",
		status: func(time.Duration) api.Status { return verdictOf(canary.Unknown, "") },
		lasts:  9 * time.Second,
		want:   []string{"0s " + waits, "5s READY=1", "9s " + stops},
	}, {
		name: "a flush and its end",
		status: func(at time.Duration) api.Status {
			switch {
			case at < 3*time.Second:
				return verdictOf(canary.Intact, "g1")
			case at < 5*time.Second:
				return flushed
			default:
				return back
			}
		},
		lasts: 9 * time.Second,
		want: []string{
			"0s READY=1\n" + whole,
			"4s STATUS=NOT healthy: ipv4 mangle is emptied, ipv4 nat is emptied, ipv4 filter is emptied; last flush at 2026-05-01T12:00:00Z: emptied, pending",
			"6s " + whole + "; last flush at 2026-05-01T12:00:00Z: emptied, proved",
			"9s " + stops,
		},
	}, {
		name:     "the watchdog is fed while the loop turns, and starves when it hangs",
		watchdog: 3 * time.Second,
		status:   func(time.Duration) api.Status { return verdictOf(canary.Intact, "g1") },
		alive: func(at time.Duration) error {
			if at > 2500*time.Millisecond {
				return errors.New("the loop has not turned for 15s")
			}
			return nil
		},
		lasts: 6500 * time.Millisecond,
		want:  []string{"0s READY=1\n" + whole + "\nWATCHDOG=1", "1s WATCHDOG=1", "2s WATCHDOG=1", "6.5s " + stops},
	}, {
		name:     "the watchdog is fed before the daemon is ready",
		watchdog: 4 * time.Second,
		status:   func(time.Duration) api.Status { return verdictOf(canary.Unknown, "") },
		lasts:    2500 * time.Millisecond,
		want:     []string{"0s " + waits + "\nWATCHDOG=1", "1s WATCHDOG=1", "2s WATCHDOG=1", "2.5s " + stops},
	}, {
		name:    "a manager that cannot be reached harms nobody",
		status:  func(time.Duration) api.Status { return verdictOf(canary.Intact, "g1") },
		sendErr: errors.New("no such file"),
		lasts:   time.Second,
		want:    []string{"0s READY=1\n" + whole, "1s " + stops},
	}} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				m := &manager{began: began, err: test.sendErr}
				ctx, cancel := context.WithTimeout(t.Context(), test.lasts)
				defer cancel()
				n := Notifier{
					Send: m.send, Watchdog: test.watchdog,
					Status: func() api.Status { return test.status(time.Since(began)) },
					Alive: func() error {
						if test.alive == nil {
							return nil
						}
						return test.alive(time.Since(began))
					},
				}
				if err := n.Run(ctx); err != nil {
					t.Error(err)
				}
				if diff := cmp.Diff(test.want, m.heard); diff != "" {
					t.Errorf("what the manager heard (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func TestStatusLine(t *testing.T) {
	until := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	for want, s := range map[string]api.Status{
		"Replays are paused until 2026-05-01T12:00:00Z":                                        {Paused: true, PausedUntil: until},
		"Stopped by a cleanup; a restart begins again":                                         {Stopped: true},
		"Waiting for every table to be readable and planted: no family has been looked at yet": {},
		"Healthy: 460 rules in 147 chains":                                                     verdictOf(canary.Changed, "g1"),
		"NOT healthy: ipv4 mangle is unknown":                                                  verdictOf(canary.Unknown, "g1"),
	} {
		if got := s.Line(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
