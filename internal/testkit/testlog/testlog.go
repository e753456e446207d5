// Package testlog keeps what is written to a log, for a test that reads it meanwhile.
package testlog

import (
	"bytes"
	"sync"
)

// A Log is an empty one at first. Many goroutines may use it.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write adds to the log.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns all of it so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
