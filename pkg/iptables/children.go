package iptables

import (
	"os"
	"slices"
	"sync"
)

// childrenKept spans the replays of a war between one intact look and the next
// loss; pids come back after 32,768 processes at the earliest.
const childrenKept = 64

// children are the pids of the programs that wrote for us last. Who blames asks
// while the next one may be started.
type children struct {
	mu   sync.Mutex
	pids []int
}

func (c *children) note(pid int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pids = append(c.pids[max(0, len(c.pids)+1-childrenKept):], pid)
}

func (c *children) has(pid int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Contains(c.pids, pid)
}

// ownPort reports whether commits from that netlink address are ours. Programs are
// given their process number for one, in the pid namespace that they and we live in
// (netlink_autobind). A flusher on the host that happens to have the number of a pod's
// program is not named then.
func (k *Kernel) ownPort(port uint32) bool {
	return port == k.port || k.keeper.ownPort(port) || k.children.has(int(port))
}

// Own reports whether a process that wrote is this one or a child of its, of
// which /proc tells nothing any more. What this one sent itself is known for certain by
// its Commit: here the number may be that of a thread, or of another pid namespace.
func (k *Kernel) Own(pid uint32) bool {
	return int(pid) == os.Getpid() || k.children.has(int(pid))
}
