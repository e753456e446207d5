package native

import (
	"errors"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A LateKernel is a Kernel that hears of commits only once there is a table to guard. Until Wake
// has opened it, only Wake and Close may be called. It is for one goroutine.
type LateKernel struct {
	*Kernel // nil: not opened yet
	conn    *nft.Conn
	port    uint32
	own     func(port, pid uint32) bool
	muted   func() uint32
	most    int
	none    uint32 // the genid at which no wanted table existed
	asked   bool   // none is valid
}

// NewLateKernel returns a LateKernel that is not open yet. It sends transactions from the netlink
// address port. own reports whether a commit with that address and process is canaryd's own. muted
// returns the address of the standby, whose changes it need not hear (nft.OpenEvents).
// most is the size of all tables that it keeps, in rules of usual length; 0: no limit. Above it
// the largest tables are left out (Ruleset.LeftOut).
func NewLateKernel(port uint32, own func(port, pid uint32) bool, muted func() uint32, most int) *LateKernel {
	return &LateKernel{port: port, own: own, muted: muted, most: most}
}

// Wake opens the kernel if a table exists that wanted accepts, or if wanted is nil, and reports
// whether it is open. Without such a table it reads the genid, and the tables' names only if
// the genid has changed. Without nf_tables it is false. wanted must be the same in each call.
// The error is nft.ErrInterrupted if another process commits meanwhile.
func (k *LateKernel) Wake(wanted func(nft.Table) bool) (bool, error) {
	if k.Kernel != nil {
		return true, nil
	}
	if k.conn == nil { // conn stays open: closing a socket waits for the kernel's work after a flush
		conn, err := nft.Dial()
		if errors.Is(err, nft.ErrNone) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		k.conn = conn
	}
	genid, err := k.conn.Genid()
	switch {
	case errors.Is(err, nft.ErrNone):
		return false, nil
	case err != nil:
		return false, err
	case wanted != nil && k.asked && genid == k.none:
		return false, nil
	}
	found := wanted == nil
	if wanted != nil {
		err := k.conn.EachTable(func(t nft.Table) error {
			found = found || wanted(t)
			return nil
		})
		if err != nil {
			return false, err
		}
	}
	if !found { // the next call finds a table that was made after that genid
		k.none, k.asked = genid, true
		return false, nil
	}
	events, err := nft.OpenEvents(k.conn.Genid, k.own, k.muted)
	if err != nil {
		return false, err
	}
	k.Kernel, k.conn = &Kernel{conn: k.conn, events: events, port: k.port, budget: newBudget(k.most),
		hearing: hearing{upTo: events.UpTo(), follow: follower{most: k.most}}}, nil
	return true, nil
}

// Close closes the kernel, whether it was opened or not. Nothing may be called after it.
func (k *LateKernel) Close() error {
	switch {
	case k.Kernel != nil:
		return k.Kernel.Close()
	case k.conn != nil:
		return k.conn.Close()
	}
	return nil
}
