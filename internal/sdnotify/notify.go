// Package sdnotify informs a service manager: that canaryd is ready, that it is alive, and how the
// node is.
//
// Fill in a [Notifier] and call its Run once, next to the daemon. Run asks the daemon for its
// status and whether its loop works. A message that cannot be sent is logged once, and is no error.
package sdnotify

import (
	"context"
	"strings"
	"time"
	"unicode"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/severity"
)

const (
	// readyPoll is how often the daemon is asked whether it is ready: at boot, other services wait
	// for it.
	readyPoll = 20 * time.Millisecond
	// readyGrace is how long other services wait at most. A firewall must not stay down because a
	// table cannot be read or planted; canaryd goes on trying.
	readyGrace = 5 * time.Second
	// sendEvery is how old the service manager's line about the daemon may be.
	sendEvery = 2 * time.Second
)

// A Notifier informs a service manager in the words of sd_notify(3): that the daemon is ready, that
// it is alive, what it does, and that it stops. It runs once, next to the daemon.
type Notifier struct {
	Send   func(message string) error // one datagram to the manager
	Status func() api.Status          // of the daemon
	Alive  func() error               // of the daemon
	// Watchdog is the silence after which the service manager kills the daemon; 0 means never.
	Watchdog time.Duration
}

// Run sends messages until ctx ends. The daemon is ready when its canaries are planted and it has
// looked at every table, whatever it saw. After readyGrace it counts as ready, too, with a status
// that says what it waits for. The daemon counts as alive only while its loop works, so that the
// service manager restarts one that hangs. A message that cannot be sent is logged once.
func (n Notifier) Run(ctx context.Context) error {
	s := session{Notifier: n, log: klog.FromContext(ctx), since: time.Now()}
	for {
		s.step()
		select {
		case <-time.After(s.pace()):
		case <-ctx.Done():
			s.send("STOPPING=1", "STATUS=Stopping; canaries and rules stay in place")
			return nil
		}
	}
}

// A session is what was sent so far.
type session struct {
	Notifier
	log    klog.Logger
	since  time.Time // when it began
	ready  bool
	line   string    // the last status line
	alive  time.Time // when WATCHDOG=1 was last sent
	failed bool      // a message could not be sent
}

// pace is how often there may be something to send.
func (s *session) pace() time.Duration {
	switch {
	case !s.ready:
		return readyPoll
	case s.Watchdog > 0:
		return min(sendEvery, s.Watchdog/3)
	default:
		return sendEvery
	}
}

// step sends what is new.
func (s *session) step() {
	var words []string
	status := s.Status()
	if !s.ready && (status.Begun() || time.Since(s.since) >= readyGrace) {
		s.ready = true
		words = append(words, "READY=1")
	}
	if line := status.Line(); line != s.line {
		s.line = line
		words = append(words, "STATUS="+oneLine(line))
	}
	if s.Watchdog > 0 && time.Since(s.alive) >= s.Watchdog/4 && s.Alive() == nil {
		s.alive = time.Now()
		words = append(words, "WATCHDOG=1")
	}
	if len(words) > 0 {
		s.send(words...)
	}
}

// oneLine replaces what would begin another word of the protocol, whatever a status quotes.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
}

func (s *session) send(words ...string) {
	if err := s.Send(strings.Join(words, "\n")); err != nil && !s.failed {
		s.failed = true
		severity.Warnings(s.log).Error(err, "The service manager could not be notified of canaryd's state; it may restart canaryd")
	}
}
