package standby

import (
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/native"
)

// BeforeSending lets f run before each transaction, while hooks may be opened.
func (s *Standby) BeforeSending(f func()) { s.sending = f }

// KnockOf returns the datagram that opens a hook.
func KnockOf(h Hook) []byte { return knockOf(h) }

// Knocks returns the knocks that open hooks, in order, if others are open already.
func Knocks(hooks, open []Hook) []Hook {
	are := map[Hook]bool{}
	for _, h := range open {
		are[h] = true
	}
	return knocks(hooks, are)
}

// Until ends a Receive at that time.
func (m *Misses) Until(t time.Time) error { return m.conn.SetReadDeadline(t) }

// Outstanding returns how many chains of the copy differ from held, the kernel's copy
// (Standby.Held, nil: none). A base chain also counts if the real base chain has changed.
func (c *Copy) Outstanding(held *Copy) int {
	if held == nil {
		return len(c.chains) + len(c.hooks)
	}
	if c.native != nil && held.native != nil {
		return len(native.Diff(held.native, c.native))
	}
	n := 0
	for name, chain := range c.chains {
		if was := held.chains[name]; was != chain && (was == nil || !slices.Equal(was.digests, chain.digests)) {
			n++
		}
	}
	for name := range held.chains {
		if c.chains[name] == nil {
			n++
		}
	}
	for h, hook := range c.hooks {
		if was := held.hooks[h]; was == nil || !slices.Equal(was.body.digests, hook.body.digests) || !slices.Equal(was.real, hook.real) {
			n++
		}
	}
	return n
}
