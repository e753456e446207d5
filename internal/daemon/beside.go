package daemon

import (
	"sync/atomic"
	"time"
)

// A beside does one kind of work on a goroutine of its own, so that the loop does not wait for
// the kernel or the disk. It gets values, and the loop takes up the results once done has a
// message. The loop hands over the next work only after that.
type beside struct {
	name  string
	limit time.Duration // how long one piece of work may take
	todo  chan func()
	done  chan struct{}
	now   atomic.Pointer[running] // the work under way; nil: none
	delay func()                  // called before each piece of work; nil, except in tests
}

func newBeside(name string, limit time.Duration) *beside {
	return &beside{name: name, limit: limit, todo: make(chan func(), 1), done: make(chan struct{}, 1)}
}

// runBeside works until b.todo is closed.
func (d *Daemon) runBeside(b *beside) {
	for do := range b.todo {
		used := d.cpu()
		b.now.Store(&running{b.name, time.Now(), b.limit})
		if b.delay != nil {
			b.delay()
		}
		do()
		b.now.Store(nil)
		d.elsewhere.Add(int64(d.cpu() - used))
		b.done <- struct{}{}
	}
}
