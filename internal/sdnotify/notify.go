// Package sdnotify informs a service manager that canaryd is ready and alive, and about the
// state of the node.
//
// Fill in a [Notifier] and call its Run once, next to the daemon. Run queries the daemon's
// status and whether its loop works. A message that cannot be sent is logged once, and is no
// error.
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
	// readyPoll is the time between checks whether the daemon is ready: at boot, other services
	// wait for it.
	readyPoll = 20 * time.Millisecond
	// readyGrace is the longest time that other services wait. A firewall must not stay down
	// because a table cannot be read or planted; canaryd continues to try.
	readyGrace = 5 * time.Second
	// sendEvery is how old the service manager's line about the daemon may be.
	sendEvery = 2 * time.Second
)

// A Notifier informs a service manager in the words of sd_notify(3). It reports that the daemon
// is ready, alive and working, and that it stops. It runs once, next to the daemon.
type Notifier struct {
	Send   func(message string) error // one datagram to the manager
	Status func() api.Status          // of the daemon
	Alive  func() error               // of the daemon
	// Watchdog is the silence after which the service manager kills the daemon; 0 means never.
	Watchdog time.Duration
}

// Run sends messages until ctx ends. The daemon is ready when its canaries are planted and it
// has looked at every table, with any verdict. After readyGrace it counts as ready anyway, with
// a status that names the missing part. The daemon counts as alive only while its loop works,
// so that the service manager restarts a hanging one. A message that cannot be sent is logged
// once.
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

// A session records the messages sent so far.
type session struct {
	Notifier
	log    klog.Logger
	since  time.Time // when it began
	ready  bool
	line   string    // the last status line
	alive  time.Time // when WATCHDOG=1 was last sent
	failed bool      // a message could not be sent
}

// pace is the time until the next step: short until canaryd is ready, and often enough for the
// watchdog.
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

// step sends the news to the service manager: that canaryd is ready, a changed status line, and
// the sign of life for the watchdog. Without news it sends nothing.
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

// oneLine replaces control characters, which would begin another word of the protocol.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
}

// send sends a message of these words, and logs the first failure.
func (s *session) send(words ...string) {
	if err := s.Send(strings.Join(words, "\n")); err != nil && !s.failed {
		s.failed = true
		severity.Warnings(s.log).Error(err, "The service manager could not be notified of canaryd's state; it may restart canaryd")
	}
}
