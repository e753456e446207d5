package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// patience is the longest time of a connection. TCP sends a SYN again after a second, so a
	// connection that began during an outage fails.
	patience = 500 * time.Millisecond
	// maxOpen bounds the connections that may be open at the same time: twice as many as 1,000
	// a second need while no pod answers.
	maxOpen = 1000
)

// A load describes the connections that a client opens.
type load struct {
	Rate      int
	Services  []netip.AddrPort
	HostPorts []netip.AddrPort
}

// target returns the target of the nth connection: services and host ports alternate.
func (l load) target(n int) (index int, at netip.AddrPort) {
	if n%2 == 0 {
		index = n / 2 % len(l.Services)
		return index, l.Services[index]
	}
	index = n / 2 % len(l.HostPorts)
	return len(l.Services) + index, l.HostPorts[index]
}

// The outcomes of a connection.
const (
	answered = "answered"
	refused  = "refused"
	silent   = "silent"
	other    = "other"
)

// An attempt is one connection.
type attempt struct {
	Start, End int64 // microseconds of the machine's monotonic clock
	Target     int   // services first, then host ports
	Outcome    string
	Pod        netip.Addr // the pod that answered
}

func (a attempt) String() string {
	return fmt.Sprintf("%d %d %d %s %s", a.Start, a.End, a.Target, a.Outcome, a.Pod)
}

func parseAttempt(line string) (attempt, error) {
	var a attempt
	words := strings.Fields(line)
	if len(words) < 4 {
		return a, fmt.Errorf("an attempt of %d words: %q", len(words), line)
	}
	var errs [4]error
	a.Start, errs[0] = strconv.ParseInt(words[0], 10, 64)
	a.End, errs[1] = strconv.ParseInt(words[1], 10, 64)
	a.Target, errs[2] = strconv.Atoi(words[2])
	if a.Outcome = words[3]; a.Outcome == answered {
		a.Pod, errs[3] = netip.ParseAddr(words[len(words)-1])
	}
	return a, errors.Join(errs[:]...)
}

// clock returns the machine's monotonic time, which all processes share, in microseconds.
func clock() int64 {
	var t unix.Timespec
	// It fails for unknown clocks only.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return t.Nano() / 1000
}

// runClient opens connections at the rate of its load until its input ends. It writes a line
// for each: its attempt, or "skipped" if too many were open at its time.
func runClient(ctx context.Context, text string, stdin io.Reader, stdout io.Writer) error {
	var l load
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		return fmt.Errorf("the load: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, stdin)
		cancel()
	}()
	lines := make(chan string, maxOpen)
	var writing sync.WaitGroup
	var failed error
	writing.Go(func() {
		out := bufio.NewWriterSize(stdout, 1<<16)
		for line := range lines {
			_, _ = out.WriteString(line + "\n") // the Writer keeps its error
		}
		failed = out.Flush()
	})
	var open atomic.Int64
	var connections sync.WaitGroup
	begin, begun := time.Now(), 0
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
		for due := int(time.Since(begin).Seconds() * float64(l.Rate)); begun < due; begun++ {
			if open.Load() >= maxOpen {
				lines <- "skipped"
				continue
			}
			open.Add(1)
			n := begun
			connections.Go(func() {
				lines <- l.connect(n).String()
				open.Add(-1)
			})
		}
	}
	connections.Wait()
	close(lines)
	writing.Wait()
	return failed
}

// connect opens one connection and, once it is answered, ends it with a reset, so that neither
// side keeps it in memory.
func (l load) connect(n int) attempt {
	index, at := l.target(n)
	a := attempt{Start: clock(), Target: index, Outcome: other}
	deadline := time.Now().Add(patience)
	dialer := net.Dialer{Deadline: deadline}
	conn, err := dialer.Dial("tcp4", at.String())
	if err != nil {
		a.Outcome = outcome(err)
		a.End = clock()
		return a
	}
	defer conn.Close()
	_ = conn.(*net.TCPConn).SetLinger(0) // if that fails, the connection just ends later
	_ = conn.SetDeadline(deadline)       // after an error, the pod answers or the connection ends
	line, err := bufio.NewReaderSize(conn, 64).ReadString('\n')
	if err != nil {
		a.Outcome = outcome(err)
		a.End = clock()
		return a
	}
	if a.Pod, err = netip.ParseAddr(strings.TrimSpace(line)); err == nil {
		a.Outcome = answered
	}
	a.End = clock()
	return a
}

func outcome(err error) string {
	var timeout net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		return refused
	case errors.As(err, &timeout) && timeout.Timeout():
		return silent
	default:
		return other
	}
}
