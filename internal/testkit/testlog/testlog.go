// Package testlog has a [Log] that a test can read while other goroutines write it.
package testlog

import (
	"bytes"
	"sync"
)

// A Log keeps the written text. The zero Log is empty, and many goroutines may use it.
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

// String returns the text written so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
