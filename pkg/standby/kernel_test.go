package standby_test

import (
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/standby"
)

func TestTry(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		restore(t, nat.Family, simple)
		conn := dial(t)
		s := open(t, standby.Config{})
		c := translate(t, source(t, conn, nat), nil)
		must(t, s.Put(c))
		t.Log(listed(t, nat))
		must(t, s.Open(nat, c.Hooks(), nil))
		t.Log(listed(t, nat))
		must(t, s.Shut(nat))
		t.Log(s.Status(nat), c.LeftOut())
	})
}

const simple = `*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SVC-A - [0:0]
:KUBE-SVC-B - [0:0]
:KUBE-SEP-A - [0:0]
:KUBE-SEP-B - [0:0]
-A PREROUTING -s 192.0.2.9/32 -j ACCEPT
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m comment --comment "x" -m udp --dport 53 -j KUBE-SVC-A
-A KUBE-SERVICES -d 10.96.0.11/32 -p tcp -m comment --comment "x" -m tcp --dport 80 -j KUBE-SVC-B
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-A ! -s 10.244.0.0/16 -j KUBE-MARK-MASQ
-A KUBE-SVC-A -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-A
-A KUBE-SVC-A -j KUBE-SEP-B
-A KUBE-SVC-B -m limit --limit 3/min -j KUBE-SEP-B
-A KUBE-SEP-A -p udp -m udp -j DNAT --to-destination 10.244.1.2:53
-A KUBE-SEP-B -p udp -m recent --set --name KUBE-SEP-B --mask 255.255.255.255 --rsource -m udp -j DNAT --to-destination 10.244.1.3-10.244.1.9:53-80 --random --persistent
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
COMMIT
`
