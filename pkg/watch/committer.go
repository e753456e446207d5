package watch

import (
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A committer is the last process that committed, as /proc showed it. An owner
// that never rests is checked to be the same process every stillFor, and is read
// again once in originStays. Such reads are the main cost of another process's
// commit. The zero committer is none.
type committer struct {
	pid  uint32 // 0 for none
	dir  processFolder
	was  process
	read time.Time
	seen time.Time // when it was last checked
}

// originStays limits how long a process's ancestors, unit and container are
// reused. They may change: the process may move to another unit, or lose its
// parent.
const originStays = time.Second

// stillFor is how long a process of the same name is not checked again. The
// kernel reuses no process number so soon: first it would have to use all others.
const stillFor = 20 * time.Millisecond

// of returns process pid.
//
// The result is empty if the process is gone, which is usual for a short-lived
// iptables, or if its name is not comm. It is also empty if proc is known to be
// of another pid namespace than the initial one. The kernel numbers committers in
// the initial one. Elsewhere that number is another process, perhaps of the same
// name.
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

// process returns the description of process pid in /proc; empty if it is gone. It reads the
// process only if c does not have it, or has it for longer than originStays.
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

// still reports whether the process lives and still executes the same program. A
// folder belongs to one process: after its end the folder is unreadable, even if
// another process has the number.
func (c *committer) still() bool {
	return c.was.command != "" && c.dir.command() == c.was.command && c.dir.comm() == c.was.comm
}

// forget empties c, and closes the folder of its process.
func (c *committer) forget() {
	if c.pid != 0 {
		c.dir.close()
	}
	*c = committer{}
}
