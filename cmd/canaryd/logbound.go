package main

import (
	"sync"
	"time"
)

const (
	// logAtOnce is how many lines of one message are logged at once; after that, one is logged
	// every logEvery. A flush logs fewer, and no contention needs more.
	logAtOnce = 60
	logEvery  = time.Second
	// logMessages is how many messages have a bound of their own. canaryd has about a hundred.
	logMessages = 500
)

// A logBound keeps other processes from filling the log. A message that such a process causes
// again and again is logged once a second. Each message has its own bound, so that many lines
// of one message hide no other.
type logBound struct {
	mu       sync.Mutex
	messages map[string]*messageBound
}

type messageBound struct {
	spent   time.Duration // each line costs logEvery, and time pays it back
	at      time.Time     // when spent was last updated
	leftOut int           // lines dropped since the last written one
}

// admit reports whether to log another line of the message; each message has its own bound. The
// values belong on that line: how many lines were left out, or that the next ones will be.
func (b *logBound) admit(message string) (values []any, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.messages[message] == nil && len(b.messages) >= logMessages {
		message = "" // all further messages share one bound
	}
	m := b.messages[message]
	if m == nil {
		if b.messages == nil {
			b.messages = map[string]*messageBound{}
		}
		m = &messageBound{}
		b.messages[message] = m
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
