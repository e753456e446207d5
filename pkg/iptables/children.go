package iptables

import (
	"os"
	"slices"
	"sync"
)

// childrenKept covers all replays between one intact look and the next loss while canaryd and a
// flusher write against each other. The kernel reuses a pid after 32,768 processes at the
// earliest.
const childrenKept = 64

// children are the pids of the last programs that wrote for canaryd. The search for a culprit
// reads them while canaryd may start another program.
type children struct {
	mu   sync.Mutex
	pids []int
}

// note adds the pid of a child that was just started; restore calls it.
func (c *children) note(pid int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pids = append(c.pids[max(0, len(c.pids)+1-childrenKept):], pid)
}

// has reports whether a pid is that of one of the last children, for Own and OwnCommit.
func (c *children) has(pid int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Contains(c.pids, pid)
}

// OwnCommit reports whether a commit from that netlink address, by the process with that pid, is
// the Kernel's own. The kernel gives a program its pid as its address (netlink_autobind),
// counted in the pid namespace of the program. Any program may bind itself to such an address,
// so the pid of the process must be equal, too. The kernel names that pid as in the initial
// namespace (NFTA_GEN_PROC_PID, Linux 4.14; 0 before). In any other namespace the two cannot be
// compared. A flusher there is not named if its address equals the pid of one of canaryd's
// programs.
func (k *Kernel) OwnCommit(port, pid uint32) bool {
	if port == k.port || k.keeper.ownPort(port) || port != 0 && port == k.muted.Load() {
		return true // random numbers of 30 bits: see nft.NewPort
	}
	comparable := pid != 0 && k.initialPIDs
	return k.children.has(int(port)) && (!comparable || pid == port)
}

// Own reports whether a process that wrote is this process or one of its children, which /proc
// may no longer know. OwnCommit is certain about commits of this process itself. Here, pid may
// be a thread's, or of another pid namespace.
func (k *Kernel) Own(pid uint32) bool {
	return int(pid) == os.Getpid() || k.children.has(int(pid))
}
