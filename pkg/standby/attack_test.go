package standby_test

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// attacked is the nat table of a node with one service and its node port. Another owner's rule
// exempts client 9.
const attacked = `*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-EXT-A - [0:0]
:KUBE-SVC-A - [0:0]
:KUBE-SEP-A - [0:0]
-A PREROUTING -m comment --comment canaryd-old
-A PREROUTING -s 10.1.0.9/32 -d 10.2.0.1/32 -j ACCEPT
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-SERVICES -d 10.2.0.1/32 -p udp -m udp --dport 53 -j KUBE-SVC-A
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -p udp -m udp --dport 30053 -j KUBE-EXT-A
-A KUBE-EXT-A -j KUBE-MARK-MASQ
-A KUBE-EXT-A -j KUBE-SVC-A
-A KUBE-SVC-A ! -s 10.3.0.0/16 -d 10.2.0.1/32 -p udp -m udp --dport 53 -j KUBE-MARK-MASQ
-A KUBE-SVC-A -m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-A --rsource -j KUBE-SEP-A
-A KUBE-SVC-A -j KUBE-SEP-A
-A KUBE-SEP-A -s 10.3.0.1/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-A -p udp -m recent --set --name KUBE-SEP-A --rsource -m udp -j DNAT --to-destination 10.3.0.1:53
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
COMMIT
`

// asked returns flows of each kind. They are from a client, an exempted client, a pod, the
// service's own pod (hairpin) and the node. Others are to the node port, from outside and from
// localhost, and to no service.
func asked() []flow {
	udp := func(from, to string) flow {
		return flow{unix.IPPROTO_UDP, netip.MustParseAddrPort(from), netip.MustParseAddrPort(to)}
	}
	return []flow{
		udp("10.1.0.1:2001", "10.2.0.1:53"), udp("10.1.0.9:2002", "10.2.0.1:53"), udp("10.3.0.7:2003", "10.2.0.1:53"),
		udp("10.3.0.1:2004", "10.2.0.1:53"), udp("192.0.2.1:2005", "10.2.0.1:53"), udp("10.1.0.1:2006", "192.0.2.1:30053"),
		udp("127.0.0.1:2007", "127.0.0.1:30053"), udp("10.1.0.1:2008", "10.9.9.9:53"),
	}
}

// An attack is a loss, and the hooks that may be opened after it.
type attack struct {
	name string
	take string // arguments of iptables -t nat, or another program's command, one in each line
	// opens has the hooks that the probe allows to open.
	opens string
}

func attacks() []attack {
	return []attack{
		{"everything stands", "", ""},
		{"all is flushed", "-F", "prerouting output postrouting"},
		{"all is flushed and deleted", "-F\n-X", "prerouting output postrouting"},
		{"the ruleset is flushed", "nft flush table ip nat", "prerouting output postrouting"},
		{"KUBE-SERVICES is empty", "-F KUBE-SERVICES", "prerouting output"},
		{"the jump of PREROUTING is gone", "-D PREROUTING 3", "prerouting"},
		{"OUTPUT is empty", "-F OUTPUT", "output"},
		{"KUBE-POSTROUTING is empty", "-F KUBE-POSTROUTING", "postrouting"},
		{"of KUBE-POSTROUTING the xor stands alone", "-D KUBE-POSTROUTING 3\n-D KUBE-POSTROUTING 1", ""},
		{"a mark was renewed, and all is lost below", "-D PREROUTING -m comment --comment canaryd-old\n-I PREROUTING -m comment --comment canaryd-new\n-F KUBE-SERVICES", "prerouting output"},
		{"of PREROUTING a mark stands", "-F PREROUTING\n-A PREROUTING -m comment --comment canaryd-new", "prerouting"},
		{"the exemption is gone with the jump", "-F PREROUTING\n-A PREROUTING -s 10.1.0.77 -j ACCEPT", ""},
	}
}

// TestAttacks: rules are lost, and the hooks that the probe allows are open. Each flow must have
// the fate that all rules give it. If the hooks stay shut, it must have its fate without a standby.
func TestAttacks(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		l := newLab(t, tableid.IPv4)
		conn := dial(t)
		restore(t, nat.Family, attacked)
		want := classes(l.fates(asked()))
		if diff := cmp.Diff("10.3.0.1:53", want[asked()[6]].To.String()); diff != "" {
			t.Fatalf("the node port of localhost leads nowhere: %s", diff)
		}
		for _, a := range attacks() {
			t.Run(a.name, func(t *testing.T) {
				drop(t, nat)
				restore(t, nat.Family, attacked)
				s := open(t, standby.Config{})
				c := translate(t, source(t, conn, nat), nil)
				must(t, s.Put(c))
				for command := range strings.Lines(a.take) {
					words := strings.Fields(command)
					if words[0][0] == '-' {
						words = append([]string{"iptables-nft", "-t", "nat"}, words...)
					}
					nstest.Command(t, words[0], words[1:]...)
				}
				without := classes(l.fates(asked()))
				losses, err := c.Probe(conn)
				must(t, err)
				hooks, _ := c.Openable(losses)
				if diff := cmp.Diff(a.opens, strings.Trim(fmt.Sprint(hooks), "[]")); diff != "" {
					t.Fatalf("the hooks that may be opened (-want +got):\n%s", diff)
				}
				must(t, s.Open(nat, hooks, nil))
				expect := want
				if a.opens == "" {
					expect = without
				}
				if diff := cmp.Diff(expect, classes(l.fates(asked())), comparer); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
				must(t, s.Shut(nat))
				if diff := cmp.Diff(without, classes(l.fates(asked())), comparer); diff != "" {
					t.Errorf("shut again (-before +after):\n%s", diff)
				}
				must(t, s.Close())
				gone(t, conn)
			})
		}
	})
}

// TestBothStand: all rules are in force, and the copy is open. It must change nothing: the
// exemption holds, and no mark is left.
func TestBothStand(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		l := newLab(t, tableid.IPv4)
		restore(t, nat.Family, attacked)
		want := classes(l.fates(asked()))
		s := open(t, standby.Config{})
		c := translate(t, source(t, dial(t), nat), nil)
		must(t, s.Put(c))
		must(t, s.Open(nat, c.Hooks(), nil))
		got := classes(l.fates(asked()))
		if diff := cmp.Diff(want, got, comparer); diff != "" {
			t.Errorf("(-alone +with the copy open):\n%s", diff)
		}
		for f, is := range got {
			if is.Mark != 0 {
				t.Errorf("%v leaves with mark %#x", f, is.Mark)
			}
		}
	})
}

// TestWhatIsLeftOutLeavesNoMark: a flow to a node port is marked before it reaches the service,
// which cannot be copied. It must leave unchanged. With the mark it would be masqueraded.
func TestWhatIsLeftOutLeavesNoMark(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		l := newLab(t, tableid.IPv4)
		conn := dial(t)
		odd := strings.Replace(attacked, "-A KUBE-SVC-A -j KUBE-SEP-A", "-A KUBE-SVC-A -m length --length 0:65535 -j KUBE-SEP-A", 1)
		restore(t, nat.Family, odd)
		s := open(t, standby.Config{})
		c := translate(t, source(t, conn, nat), nil)
		if got := fmt.Sprint(c.LeftOut()); !strings.Contains(got, "KUBE-SVC-A") {
			t.Fatalf("left out: %s", got)
		}
		must(t, s.Put(c))
		drop(t, nat)
		must(t, s.Open(nat, c.Hooks(), nil))
		for f, is := range l.fates(asked()) {
			if !untouched(f, is) || is.Mark != 0 {
				t.Errorf("%v fares %v", f, is)
			}
		}
	})
}

// TestAffinityOutlivesAFlush: the list of clients is shared by its name. It must survive a flush if
// the standby has a rule that names it.
func TestAffinityOutlivesAFlush(t *testing.T) {
	for _, with := range []bool{true, false} {
		t.Run(fmt.Sprintf("standby %t", with), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				l := newLab(t, tableid.IPv4)
				restore(t, nat.Family, attacked)
				if with {
					s := open(t, standby.Config{})
					must(t, s.Put(translate(t, source(t, dial(t), nat), nil)))
				}
				l.fates(asked()[:1])
				nstest.Command(t, "nft", "flush", "ruleset")
				restore(t, nat.Family, attacked)
				text, err := os.ReadFile("/proc/net/xt_recent/KUBE-SEP-A")
				must(t, err)
				if got := strings.Contains(string(text), "src=10.1.0.1 "); got != with {
					t.Errorf("after the flush the list has the client: %t, want %t:\n%s", got, with, text)
				}
			})
		})
	}
}
