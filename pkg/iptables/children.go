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

// OwnCommit reports whether a commit from that netlink address, by the process of that number,
// is the Kernel's. Programs are given their process number for an address, in the pid namespace
// that they and we live in (netlink_autobind). Any program may bind itself to such an address,
// so the number of the process has to be the same. The kernel names it by its number in the
// initial namespace (NFTA_GEN_PROC_PID, Linux 4.14; 0 before). In any other one the two cannot
// be compared: there a flusher with the number of a pod's program for an address is not named.
func (k *Kernel) OwnCommit(port, pid uint32) bool {
	if port == k.port || k.keeper.ownPort(port) || port != 0 && port == k.also.Load() {
		return true // random numbers of 30 bits: see nft.NewPort
	}
	comparable := pid != 0 && k.initialPIDs
	return k.children.has(int(port)) && (!comparable || pid == port)
}

// Own reports whether a process that wrote is this one or a child of its, of
// which /proc says nothing any more. What this one sent itself is known for certain by
// its Commit: here the number may be that of a thread, or of another pid namespace.
func (k *Kernel) Own(pid uint32) bool {
	return int(pid) == os.Getpid() || k.children.has(int(pid))
}
