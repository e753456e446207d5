package iptables

import (
	"testing"

	"github.com/canaryd/canaryd/internal/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestOwnRestoresAreKnown: what our own iptables-restore commits is told from
// others', also when the program has ended.
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
			if got := k.Own(c.PID); got != own || c.Own != own {
				t.Errorf("commit %d, by %s (pid %d), is our own: %t by its pid, %t by its address, want %t", i+1, c.Comm, c.PID, got, c.Own, own)
			}
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
