package watch

import (
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A committer is the process that committed last, as /proc had it. Of an owner that never rests
// only whether it is the same is asked, each stillFor, and the rest once in originStays: that is
// most of what a commit of another process costs. The zero committer is none.
type committer struct {
	pid  uint32 // 0 for none
	dir  processFolder
	was  process
	read time.Time
	seen time.Time // when it was last asked
}

// originStays is for how long a process is taken to have the ancestors, unit and container that it
// had: it may be moved to another unit, or lose its parent.
const originStays = time.Second

// stillFor is for how long a process that is called the same is not asked again. In it no number is
// given to another process: that takes as many new ones as there are numbers.
const stillFor = 20 * time.Millisecond

// of returns process pid.
//
// It is empty if the process is gone, which is usual for a short-lived
// iptables, or if its name is not comm. So it is where proc is known to be of
// another pid namespace than the initial one, in which the kernel counts: there the
// same number is another process, and it may have the same name.
func (c *committer) of(proc string, pid uint32, comm string, now time.Time) process {
	if pid == 0 || comm == "" {
		return process{}
	}
	comm = bounded(comm, maxComm)
	if c.pid == pid && c.was.comm == comm && now.Sub(c.seen) < stillFor {
		return c.was
	}
	if initial, err := nft.InitialPIDs(proc); err == nil && !initial {
		c.forget()
		return process{}
	}
	if p := c.process(proc, pid, now); p.comm == comm {
		return p
	}
	c.forget()
	return process{}
}

// process returns what /proc shows of process pid.
func (c *committer) process(proc string, pid uint32, now time.Time) process {
	if c.pid == pid && now.Sub(c.read) < originStays && c.still() {
		c.seen = now
		return c.was
	}
	c.forget()
	dir, err := openProcess(proc, pid)
	if err != nil {
		return process{}
	}
	*c = committer{pid, dir, dir.process(proc, pid), now, now}
	return c.was
}

// still reports whether the process lives and executes what it did. A folder is one process's: of
// one that has ended nothing can be read, also where another one has its number by now.
func (c *committer) still() bool {
	return c.was.command != "" && c.dir.command() == c.was.command && c.dir.comm() == c.was.comm
}

// forget makes it none.
func (c *committer) forget() {
	if c.pid != 0 {
		c.dir.close()
	}
	*c = committer{}
}
