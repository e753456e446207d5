// Package sdnotify keeps a service manager informed: that canaryd is ready, that it lives, and how the
// node is.
package sdnotify

import (
	"context"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
)

const (
	// readyPoll is how often it is looked whether the daemon is ready: others
	// wait for it at boot.
	readyPoll = 20 * time.Millisecond
	// readyGrace is how long others wait at most: a firewall must not stay down
	// because a table cannot be read or planted. Canaryd goes on trying.
	readyGrace = 5 * time.Second
	// tellEvery is how old the manager's line about the daemon may be.
	tellEvery = 2 * time.Second
)

// A Notifier tells a service manager how the daemon is, in the words of
// sd_notify(3): that it is ready, that it lives, what it is at, and that it
// stops. Run it once, beside the daemon.
type Notifier struct {
	Send   func(message string) error // one datagram to the manager
	Status func() api.Status          // of the daemon
	Alive  func() error               // of the daemon
	// Watchdog is after what silence the manager kills the daemon; 0: never.
	Watchdog time.Duration
}

// Run tells until ctx ends. The daemon is called ready when its canaries are
// planted and it has looked at every table, whatever it saw; or after
// readyGrace, with a status that says what it waits for. That it lives is told
// while its loop turns, so that a loop that hangs is what the manager hears
// nothing from. That a message cannot be sent is logged once and harms nobody.
func (n Notifier) Run(ctx context.Context) error {
	s := session{Notifier: n, log: klog.FromContext(ctx), since: time.Now()}
	ticker := time.NewTicker(readyPoll)
	defer ticker.Stop()
	for {
		if s.turn() {
			ticker.Reset(s.pace())
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			s.send("STOPPING=1", "STATUS=Stopping; canaries and rules stay in place")
			return nil
		}
	}
}

// A session is what was told so far.
type session struct {
	Notifier
	log    klog.Logger
	since  time.Time // when it began
	ready  bool
	told   string    // the last status line
	lived  time.Time // when it was last told that the daemon lives
	failed bool      // a message could not be sent
}

// pace is how often there may be news once the daemon is ready.
func (s *session) pace() time.Duration {
	if s.Watchdog > 0 {
		return min(tellEvery, s.Watchdog/3)
	}
	return tellEvery
}

// turn tells what is new, and returns true when it told that the daemon is
// ready.
func (s *session) turn() (becameReady bool) {
	var words []string
	status := s.Status()
	if !s.ready && (status.Begun() || time.Since(s.since) >= readyGrace) {
		s.ready, becameReady = true, true
		words = append(words, "READY=1")
	}
	if line := status.Line(); line != s.told {
		s.told = line
		words = append(words, "STATUS="+line)
	}
	if s.Watchdog > 0 && time.Since(s.lived) >= s.Watchdog/4 && s.Alive() == nil {
		s.lived = time.Now()
		words = append(words, "WATCHDOG=1")
	}
	if len(words) > 0 {
		s.send(words...)
	}
	return becameReady
}

func (s *session) send(words ...string) {
	if err := s.Send(strings.Join(words, "\n")); err != nil && !s.failed {
		s.failed = true
		s.log.Error(err, "The service manager cannot be told how canaryd is; it may restart it")
	}
}
