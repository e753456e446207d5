package watch

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A gatedSource is a subscription whose reader waits while the gate is locked.
type gatedSource struct {
	CommitSource
	gate *sync.Mutex
}

func (s gatedSource) Receive() (nft.Commit, error) {
	s.gate.Lock()
	defer s.gate.Unlock()
	return s.CommitSource.Receive()
}

// eventually waits until is returns true.
func eventually(t *testing.T, is func() bool) {
	t.Helper()
	testkit.Until(t, "the watcher", func() error {
		if !is() {
			return errors.New("not yet")
		}
		return nil
	})
}

// TestCommitWatcherOnTheKernel: a socket overflows, and a socket dies under the
// watcher. Each gives a hint and is replaced, and the watcher receives from the
// new socket.
func TestCommitWatcherOnTheKernel(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "iptables-nft-restore")
		k, err := iptables.Open(t.Context(), iptables.Config{Backend: iptables.NFT})
		if err != nil {
			t.Fatal(err)
		}
		defer k.Close()
		subscribed := make(chan CommitSource, 64)
		var gate sync.Mutex
		w := &CommitWatcher{Hints: NewHints(), Writers: new(Writers), Subscribe: func() (CommitSource, error) {
			source, err := k.Subscribe()
			if err == nil {
				subscribed <- source
			}
			return gatedSource{source, &gate}, err
		}}
		defer start(w.Run)()
		first := <-subscribed
		seen := func() bool { // by the watcher, up to the newest commit
			now, err := k.Stamp(t.Context(), rules.IPv4)
			if err != nil {
				t.Fatal(err)
			}
			return len(w.Writers.Between(uint32(now.Value)-1, uint32(now.Value))) == 1
		}
		overflows := func() uint64 { return w.Hints.Counts()[SourceOverflow] }

		// One commit frees the gate from the waiting Receive.
		held := make(chan struct{})
		go func() { gate.Lock(); close(held) }()
		nstest.Command(t, "iptables-nft", "-w", "5", "-N", "SOMEBODY")
		testkit.Until(t, "the gate", func() error {
			select {
			case <-held:
				return nil
			default:
				nstest.Command(t, "iptables-nft", "-w", "5", "-A", "SOMEBODY")
				return errors.New("Receive waits behind it")
			}
		})
		// The kernel charges 768 bytes for each message of 56: more than twice
		// the 1 MiB.
		flood := strings.Repeat("*filter\n-A SOMEBODY -j RETURN\nCOMMIT\n*filter\n-F SOMEBODY\nCOMMIT\n", 2000)
		nstest.CommandInput(t, flood, "iptables-nft-restore", "--noflush", "-w", "5")
		drain(t, w.Hints)
		gate.Unlock()
		waitHint(w.Hints)
		second := <-subscribed
		if overflows() != 1 || second == first {
			t.Errorf("%d overflows were told, and the same socket is used: %t", overflows(), second == first)
		}
		nstest.Command(t, "iptables-nft", "-w", "5", "-F")
		nstest.Command(t, "iptables-nft", "-w", "5", "-A", "SOMEBODY")
		eventually(t, seen)

		if err := second.Close(); err != nil {
			t.Fatal(err)
		}
		<-subscribed
		if overflows() != 2 {
			t.Errorf("%d ends of a socket were told, want two", overflows())
		}
		drain(t, w.Hints)
		nstest.Command(t, "iptables-nft", "-w", "5", "-F")
		waitHint(w.Hints)
		eventually(t, seen)
	})
}
