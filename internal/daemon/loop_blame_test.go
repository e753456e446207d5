package daemon

import (
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A parent is a kernel in which one writing process is a child of canaryd.
type parent struct {
	*iptablestest.Fake
	child uint32
}

func (p parent) Own(pid uint32) bool { return pid == p.child || p.Fake.Own(pid) }

// TestOurOwnRestoreIsNoCulprit: another process flushes while canaryd's iptables-restore works.
// The child's next commit is the last before canaryd sees the loss.
func TestOurOwnRestoreIsNoCulprit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := loadedFake(t, iptables.NFT)
		r := run(t, fake, setup{kernel: parent{fake, 777}})
		r.settled()
		flushed := false
		fake.OnCommit(func(c nft.Commit) {
			if c.PID == 4711 && !flushed {
				flushed = true
				must(t, fake.As(777, "iptables-nft-re").RestoreNoflush(rules.IPv4, section(rules.Mangle, ":OURS - [0:0]")))
			}
		})
		must(t, fake.As(4711, "evil").Flush(rules.IPv4, rules.Nat, ""))
		r.after(5 * time.Second)
		record := r.oneRecord()
		if record.Culprit.PID != 4711 || len(record.Writers) != 1 {
			t.Errorf("the culprit is %+v of %+v; we are %d", record.Culprit, record.Writers, os.Getpid())
		}
	})
}
