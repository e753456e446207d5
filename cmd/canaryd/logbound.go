package main

import (
	"sync"
	"time"
)

const (
	// logAtOnce is how many lines of one message the log has at once, and logEvery how often it has one
	// after that. No more come in the worst contention: those that a flush brings are fewer.
	logAtOnce = 60
	logEvery  = time.Second
	// logMessages is how many messages are counted one by one. canaryd has some hundred.
	logMessages = 500
)

// A logBound keeps others from filling the log: a process that makes canaryd say the same thing again and
// again is heard once a second. Each message has a bound of its own, so that a storm of one hides no other.
type logBound struct {
	mu       sync.Mutex
	messages map[string]*messageBound
}

// A messageBound is what the log has of one message.
type messageBound struct {
	spent   time.Duration // each line costs logEvery, and is earned back in that time
	at      time.Time     // when spent was right
	leftOut int           // lines since the last one that was written
}

// admit reports whether the log is to have another line of the message, and what that line adds.
func (b *logBound) admit(message string) (values []any, ok bool) {
	if b == nil {
		return nil, true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.messages[message]
	if m == nil {
		if len(b.messages) >= logMessages {
			message = "" // all others together
		}
		if m = b.messages[message]; m == nil {
			if b.messages == nil {
				b.messages = map[string]*messageBound{}
			}
			m = &messageBound{}
			b.messages[message] = m
		}
	}
	now := time.Now()
	m.spent, m.at = max(0, m.spent-now.Sub(m.at)), now
	if m.spent > (logAtOnce-1)*logEvery {
		m.leftOut++
		return nil, false
	}
	m.spent += logEvery
	if m.leftOut > 0 {
		values = append(values, "leftOut", m.leftOut)
		m.leftOut = 0
	}
	if m.spent > (logAtOnce-1)*logEvery {
		values = append(values, "next", "lines like this one are left out, but for one a second")
	}
	return values, true
}
