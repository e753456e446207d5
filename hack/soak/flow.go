package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

const (
	// deadAfter is how long an established connection may be without an answer.
	deadAfter = 20 * time.Second
	// opensIn is the longest time to establish a connection without a flush.
	opensIn = 5 * time.Second
	// idlePing is the time between two requests long before and after a flush.
	idlePing = 100 * time.Millisecond
)

// The states of a flow.
const (
	alive = ""
	reset = "reset"
	dead  = "dead"  // no answer for deadAfter
	moved = "moved" // another pod answers
)

// A flow is an established connection that sends requests all the time. Over UDP it is a socket
// that has had an answer.
type flow struct {
	way    way
	target target
	conn   net.Conn
	pod    string
	pace   *pace
	ended  chan struct{} // closed once no goroutine reads conn

	mu      sync.Mutex
	last    int64 // the time of the last answer, by clock
	longest int64 // time between two answers
	lost    string
}

// A pace is the time between two requests of flows.
type pace struct {
	mu   sync.Mutex
	wait time.Duration
}

func (p *pace) set(d time.Duration) { p.mu.Lock(); p.wait = d; p.mu.Unlock() }
func (p *pace) rest()               { p.mu.Lock(); d := p.wait; p.mu.Unlock(); time.Sleep(d) }

// openFlow establishes a connection and begins to send requests.
func openFlow(w way, t target, p *pace) (*flow, error) {
	f := &flow{way: w, target: t, pace: p, ended: make(chan struct{})}
	var err error
	if f.conn, err = w.dial(t, opensIn); err != nil {
		return nil, fmt.Errorf("establishing a connection, %s: %w", w, err)
	}
	deadline := time.Now().Add(opensIn)
	_ = f.conn.SetDeadline(deadline)
	if w.Network == "udp4" {
		f.pod, err = askUntil(f.conn, deadline)
	} else {
		f.pod, err = readLine(f.conn)
	}
	if err != nil {
		_ = f.conn.Close()
		return nil, fmt.Errorf("the first answer, %s: %w", w, err)
	}
	f.last = clock()
	_ = f.conn.SetDeadline(time.Time{})
	if w.Network == "udp4" {
		go f.askDatagrams()
		go f.hearDatagrams()
	} else {
		go f.askStream()
	}
	return f, nil
}

// askStream sends a request, waits for the answer, rests, and begins again. Go sets
// TCP_NODELAY.
func (f *flow) askStream() {
	defer close(f.ended)
	for {
		_ = f.conn.SetDeadline(time.Now().Add(deadAfter))
		_, err := f.conn.Write([]byte("?"))
		var pod string
		if err == nil {
			pod, err = readLine(f.conn)
		}
		if !f.record(pod, err) {
			return
		}
		f.pace.rest()
	}
}

// askDatagrams sends requests, with or without answers, until the flow is lost.
func (f *flow) askDatagrams() {
	for {
		select {
		case <-f.ended:
			return
		default:
			_, _ = f.conn.Write([]byte("?")) // an error is about an earlier request
			f.pace.rest()
		}
	}
}

func (f *flow) hearDatagrams() {
	defer close(f.ended)
	answer := make([]byte, 64)
	for {
		_ = f.conn.SetReadDeadline(time.Now().Add(deadAfter))
		for start := time.Now(); ; {
			n, err := f.conn.Read(answer)
			// Each request may be refused once. A refusal does not count.
			if errors.Is(err, syscall.ECONNREFUSED) && time.Since(start) < deadAfter {
				continue
			}
			if !f.record(string(answer[:n]), err) {
				return
			}
			break
		}
	}
}

// record records an answer, or an error at the end of the flow, and reports whether the flow
// continues.
func (f *flow) record(pod string, err error) bool {
	now := clock()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.longest = max(f.longest, now-f.last)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		f.lost = dead
	case err != nil:
		f.lost = reset
	case pod != f.pod:
		f.lost = moved
	default:
		f.last = now
	}
	return f.lost == alive
}

// A flowView is the state of a flow around one flush.
type flowView struct {
	Stall int64  // the longest time between two answers, in microseconds
	Lost  string // alive, reset, dead or moved
}

// begin forgets earlier observations.
func (f *flow) begin() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.longest, f.last = 0, clock()
}

// isLost reports whether the flow has ended.
func (f *flow) isLost() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lost != alive
}

// now returns the state of the flow so far; a stall may still last.
func (f *flow) now() flowView {
	f.mu.Lock()
	defer f.mu.Unlock()
	return flowView{max(f.longest, clock()-f.last), f.lost}
}

// after waits until the flow has an answer from after the moment, or is lost.
func (f *flow) after(moment int64) flowView {
	for {
		f.mu.Lock()
		v, last := flowView{f.longest, f.lost}, f.last
		f.mu.Unlock()
		if v.Lost != alive || last >= moment {
			return v
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (f *flow) close() {
	_ = f.conn.Close()
	<-f.ended
}
