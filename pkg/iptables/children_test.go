package iptables

import (
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestOwnRestoresAreKnown: commits by our own iptables-restore are distinguished
// from others', also after the program has ended.
func TestOwnRestoresAreKnown(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "nft")
		k := openKernel(t, Config{Backend: NFT, Replay: ReplayText})
		s, err := k.Subscribe()
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		written := begin(t, k).RestoreAnyway(t.Context(), Payload{rules.IPv4: {{Table: rules.Nat, Declare: []string{"OURS"}}}})
		if err := written[rules.IPv4].Err; err != nil {
			t.Fatal(err)
		}
		nstest.Command(t, "nft", "add", "table", "ip", "theirs")
		for i, own := range []bool{true, false} {
			c, err := s.Receive()
			if err != nil {
				t.Fatal(err)
			}
			// In another pid namespace no process here has the number.
			if got := k.Own(c.PID); got != (own && k.initialPIDs) || c.Own != own {
				t.Errorf("commit %d, by %s (pid %d), is our own: %t by its pid, %t by its address, want %t", i+1, c.Comm, c.PID, got, c.Own, own)
			}
		}
	})
}

// TestAFlusherWithAnAddressOfOurs: a program binds itself to the address of one
// of our own programs. Its process number distinguishes it, where numbers can be
// compared.
func TestAFlusherWithAnAddressOfOurs(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		k := openKernel(t, Config{Backend: NFT})
		s, err := k.Subscribe()
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		const child = 4_000_000 // no process has it: /proc/sys/kernel/pid_max ends at 2^22
		k.children.note(child)
		flush := func(name string) nft.Commit {
			t.Helper()
			b := nft.NewBatch()
			b.Begin(unix.NFT_MSG_NEWTABLE, netlink.Create, rules.IPv4)
			b.Text(unix.NFTA_TABLE_NAME, name)
			b.End()
			b.Finish()
			b.Port = child
			if err := b.Send(); err != nil {
				t.Fatal(err)
			}
			c, err := s.Receive()
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		k.initialPIDs = true
		if c := flush("a"); c.Own {
			t.Errorf("a flusher with the address %d counts as our own: %+v", child, c)
		}
		k.initialPIDs = false
		if c := flush("b"); !c.Own {
			t.Errorf("where process numbers cannot be compared the address decides: %+v", c)
		}
	})
}

func TestOnlyTheLastChildrenAreKept(t *testing.T) {
	var c children
	for pid := 1; pid <= 3*childrenKept; pid++ {
		c.note(pid)
	}
	if len(c.pids) != childrenKept || !c.has(3*childrenKept) || !c.has(2*childrenKept+1) || c.has(2*childrenKept) {
		t.Errorf("kept are %v", c.pids)
	}
}
