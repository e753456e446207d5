package standby_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/standby"
)

// manyServices returns nat with services in PREROUTING and, unless alone, in OUTPUT.
func manyServices(first int, alone bool) string {
	var b strings.Builder
	b.WriteString("*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n")
	if !alone {
		b.WriteString("-A OUTPUT -j KUBE-SERVICES\n")
	}
	for n := range 300 { // so many that the kernel takes a while
		fmt.Fprintf(&b, ":KUBE-SVC-%d - [0:0]\n-A KUBE-SVC-%d -p udp -j DNAT --to-destination 10.0.0.9:%d\n", first+n, first+n, first+n)
		fmt.Fprintf(&b, "-A KUBE-SERVICES -d 192.0.2.9 -p udp -m udp --dport %d -j KUBE-SVC-%d\n", first+n, first+n)
	}
	return b.String() + "COMMIT\n"
}

// TestAGateOpensDuringAWrite: the kernel handles a change of the copy. A hook opens at once, and
// stays open behind the change. A hook whose base chain the change removes opens only behind it,
// and then there is none.
func TestAGateOpensDuringAWrite(t *testing.T) {
	for _, removes := range []bool{false, true} {
		t.Run(fmt.Sprintf("removes a hook: %t", removes), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft", "iptables-nft-restore")
				restore(t, nat.Family, manyServices(1000, false))
				conn, s := dial(t), open(t, standby.Config{})
				must(t, s.Put(copyOf(t, nat)))
				first := s.Held(nat)
				restore(t, nat.Family, manyServices(2000, removes))
				next := translate(t, source(t, conn, nat), first)
				opened := make(chan error, 1)
				s.BeforeSending(sync.OnceFunc(func() {
					if removes { // it waits for this write
						go func() { opened <- s.Open(nat, first.Hooks(), nil) }()
						return
					}
					opened <- s.Open(nat, first.Hooks(), nil)
					if diff := cmp.Diff(map[standby.Hook]bool{standby.Prerouting: true, standby.Output: true}, elements(t, s, nat)); diff != "" {
						t.Errorf("during the write (-want +got):\n%s", diff)
					}
					if s.Held(nat) != first {
						t.Error("the write has ended")
					}
				}))
				must(t, s.Put(next))
				must(t, <-opened)
				if diff := cmp.Diff(next.Hooks(), s.OpenHooks(nat)); diff != "" {
					t.Errorf("open behind the write (-want +got):\n%s", diff)
				}
				left, err := conn.HasElement(nat.Family, standby.NameOf(nat), "open-output", []byte{uint8(nat.Family)})
				must(t, err)
				if left == removes {
					t.Errorf("the gate of OUTPUT is open behind the write: %t", left)
				}
				if n := next.Outstanding(s.Held(nat)); n != 0 {
					t.Errorf("%d chains are outstanding", n)
				}
				must(t, s.Shut(nat))
				for h, is := range elements(t, s, nat) {
					if is {
						t.Errorf("%s is open behind a shut", h)
					}
				}
			})
		})
	}
}
