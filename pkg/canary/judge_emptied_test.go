package canary

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

const witnessLine = `-m comment --comment "canaryd-witness:0123456789abcdef"`

// ownersNat and ownersFilter are tables of a node with chains of many owners. Each chain is
// written as its owner writes it.
const (
	ownersNat = `*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:CNI-27c2f15bd9d43ae9b0aa5cdc - [0:0]
:CNI-DN-31c7af326e67a1a733e30 - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-MASQ - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
:DOCKER - [0:0]
:KUBE-CANARYD-CANARY - [0:0]
:NETAVARK-1D8721804F16F - [0:0]
:NETAVARK-HOSTPORT-MASQ - [0:0]
:corp - [0:0]
:ts-postrouting - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A PREROUTING -j corp
-A PREROUTING ` + witnessLine + `
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A POSTROUTING -s 10.88.0.2/32 -j CNI-27c2f15bd9d43ae9b0aa5cdc
-A POSTROUTING -j NETAVARK-HOSTPORT-MASQ
-A POSTROUTING -s 10.89.0.0/24 -j NETAVARK-1D8721804F16F
-A POSTROUTING -j ts-postrouting
-A POSTROUTING ` + witnessLine + `
-A CNI-27c2f15bd9d43ae9b0aa5cdc ! -d 224.0.0.0/4 -j MASQUERADE
-A CNI-DN-31c7af326e67a1a733e30 -s 10.88.0.0/24 -p tcp -m tcp --dport 8080 -j CNI-HOSTPORT-SETMARK
-A CNI-DN-31c7af326e67a1a733e30 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.88.0.2:80
-A CNI-HOSTPORT-DNAT -p tcp -m multiport --dports 8080 -j CNI-DN-31c7af326e67a1a733e30
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A CNI-HOSTPORT-SETMARK -j MARK --set-xmark 0x2000/0x2000
-A DOCKER -p tcp -m tcp --dport 8081 -j DNAT --to-destination 172.17.0.2:80
-A KUBE-CANARYD-CANARY -m comment --comment "canaryd-canary:0123456789abcdef"
-A NETAVARK-1D8721804F16F -d 10.89.0.0/24 -j ACCEPT
-A NETAVARK-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A corp -j RETURN
-A ts-postrouting -m mark --mark 0x40000/0xff0000 -j MASQUERADE
COMMIT
`
	ownersFilter = `*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:CNI-ADMIN - [0:0]
:CNI-FORWARD - [0:0]
:DOCKER - [0:0]
:DOCKER-BRIDGE - [0:0]
:DOCKER-CT - [0:0]
:DOCKER-FORWARD - [0:0]
:DOCKER-USER - [0:0]
:KUBE-CANARYD-CANARY - [0:0]
:KUBE-SERVICES - [0:0]
:LIBVIRT_FWI - [0:0]
:NETAVARK_FORWARD - [0:0]
:ts-forward - [0:0]
-A FORWARD -j CNI-FORWARD
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-FORWARD
-A FORWARD -j KUBE-SERVICES
-A FORWARD -j LIBVIRT_FWI
-A FORWARD -j NETAVARK_FORWARD
-A FORWARD -j ts-forward
-A FORWARD ` + witnessLine + `
-A CNI-ADMIN -s 192.0.2.0/24 -j ACCEPT
-A CNI-FORWARD -j CNI-ADMIN
-A CNI-FORWARD -s 10.88.0.2/32 -j ACCEPT
-A DOCKER ! -i docker0 -o docker0 -j DROP
-A DOCKER-BRIDGE -o docker0 -j DOCKER
-A DOCKER-CT -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-FORWARD -j DOCKER-CT
-A DOCKER-FORWARD -j DOCKER-BRIDGE
-A DOCKER-FORWARD -i docker0 -j ACCEPT
-A DOCKER-USER -s 192.0.2.0/24 -j DROP
-A KUBE-CANARYD-CANARY -m comment --comment "canaryd-canary:0123456789abcdef"
-A KUBE-SERVICES -d 10.96.0.9/32 -j REJECT --reject-with icmp-port-unreachable
-A LIBVIRT_FWI -o virbr0 -j REJECT --reject-with icmp-port-unreachable
-A NETAVARK_FORWARD -s 10.89.0.0/24 -j ACCEPT
-A ts-forward -o tailscale0 -j ACCEPT
COMMIT
`
)

// TestAChainThatWasEmptiedAlone: a process runs `iptables -F CHAIN`, chain by chain. The
// verdict must be right at once, and after the grace.
func TestAChainThatWasEmptiedAlone(t *testing.T) {
	const accepted, waits, lost = "its owner's doing", "waits", "lost"
	for _, test := range []struct {
		text, chain   string
		atOnce, stood string
	}{
		{ownersNat, "CNI-HOSTPORT-MASQ", lost, lost},
		{ownersNat, "CNI-HOSTPORT-SETMARK", lost, lost},
		{ownersNat, "CNI-HOSTPORT-DNAT", waits, lost}, // the pods' chains are full
		{ownersNat, "CNI-DN-31c7af326e67a1a733e30", waits, lost},
		{ownersNat, "CNI-27c2f15bd9d43ae9b0aa5cdc", waits, lost},
		{ownersNat, "NETAVARK-HOSTPORT-MASQ", lost, lost},
		{ownersNat, "NETAVARK-1D8721804F16F", waits, lost},
		{ownersNat, "DOCKER", accepted, accepted},
		{ownersNat, "ts-postrouting", accepted, accepted},
		{ownersNat, "corp", accepted, accepted},
		{ownersFilter, "CNI-FORWARD", lost, lost},
		{ownersFilter, "CNI-ADMIN", accepted, accepted},
		{ownersFilter, "DOCKER", accepted, accepted},
		{ownersFilter, "DOCKER-USER", accepted, accepted},
		{ownersFilter, "DOCKER-CT", accepted, accepted},
		{ownersFilter, "DOCKER-FORWARD", waits, lost},
		{ownersFilter, "DOCKER-BRIDGE", waits, lost}, // DOCKER holds rules, and nothing leads there
		{ownersFilter, "KUBE-SERVICES", accepted, accepted},
		{ownersFilter, "LIBVIRT_FWI", accepted, accepted},
		{ownersFilter, "NETAVARK_FORWARD", accepted, accepted},
		{ownersFilter, "ts-forward", waits, lost},
	} {
		selector, err := protect.NewSelector([]string{"kube", "cni", "docker", "podman", "libvirt", "tailscale", "corp*"})
		if err != nil {
			t.Fatal(err)
		}
		protection := selector.Protection()
		whole, left := tableOf(t, test.text), tableOf(t, flushed(test.chain)(test.text))
		section := protection.Extract(whole, IsMark)
		want := Wanted{CanaryChain: DefaultChain, Mark: Mark{Nonce: nonce, Witnessed: section.JumpChains(whole.Name)}, Section: section, Piecewise: selector.Piecewise}
		became := func(stood bool) string {
			seen := Seen{Table: left, Section: protection.Extract(left, IsMark), Over: func(rules.Jump) bool { return stood }}
			got := Judge(want, seen)
			switch {
			case cmp.Equal(got, Finding{Verdict: Changed}, cmpopts.EquateEmpty()):
				return accepted
			case got.Verdict == Changed && len(got.Waiting) == 1 && got.Waiting[0].Chain == test.chain:
				return waits
			case got.Verdict == Emptied && cmp.Equal(got.Emptied, []string{test.chain}):
				return lost
			default:
				t.Errorf("%s %s: %+v", whole.Name, test.chain, got)
				return ""
			}
		}
		if atOnce, stood := became(false), became(true); atOnce != test.atOnce || stood != test.stood {
			t.Errorf("%s %s: %s, and later %s; want %s, and later %s", whole.Name, test.chain, atOnce, stood, test.atOnce, test.stood)
		}
	}
}

// TestAChainThatNothingLeadsToMayBeEmpty: portmap's DEL has already deleted the jump, and
// kube-proxy deleted a service with the rule that led to its chain.
func TestAChainThatNothingLeadsToMayBeEmpty(t *testing.T) {
	selector, err := protect.NewSelector([]string{"kube", "cni"})
	if err != nil {
		t.Fatal(err)
	}
	const pod = "CNI-DN-31c7af326e67a1a733e30"
	const another = "-A CNI-HOSTPORT-DNAT -p udp -m multiport --dports 53 -j " + pod
	text := with(another)(ownersNat)
	left := without("-A CNI-HOSTPORT-DNAT -p tcp -m multiport --dports 8080 -j "+pod, another)(flushed(pod)(text))
	section := selector.Protection().Extract(tableOf(t, text), IsMark)
	want := Wanted{CanaryChain: DefaultChain, Mark: Mark{Nonce: nonce, Witnessed: section.JumpChains(rules.Nat)}, Section: section, Piecewise: selector.Piecewise}
	table := tableOf(t, left)
	for _, quiet := range []bool{false, true} {
		got := Judge(want, Seen{Table: table, Section: selector.Protection().Extract(table, IsMark), Quiet: quiet})
		for _, name := range append(got.Emptied, chainsOf(got.Waiting)...) {
			if quiet && name == pod {
				t.Errorf("%s is called emptied, quiet %t: %+v", pod, quiet, got)
			}
		}
	}
}

func chainsOf(list []rules.Jump) (names []string) {
	for _, h := range list {
		names = append(names, h.Chain)
	}
	return names
}
