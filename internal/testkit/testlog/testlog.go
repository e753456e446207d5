// Package testlog has a [Log] that a test can read while other goroutines write it.
package testlog

import (
	"bytes"
	"sync"
)

// A Log keeps what is written to it. The zero Log is empty, and many goroutines may use it.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write appends to the log.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns what was written so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
