package standby_test

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

var kubeProxy = tableid.IPv4.Table("kube-proxy")

// captured returns a native table.
func captured(t *testing.T, conn *nft.Conn, id tableid.TableID) *native.Table {
	t.Helper()
	r, err := native.Capture(conn, func(of nft.Table) bool { return of.Family.Table(of.Name) == id })
	must(t, err)
	if r.Tables[id] == nil {
		t.Fatalf("there is no table %s", id)
	}
	return r.Tables[id]
}

// nftServices is a table of one service, as kube-proxy's nftables mode writes it.
const nftServices = `table FAMILY kube-proxy {
	map service-ips { type ADDRESS . inet_proto . inet_service : verdict; elements = { SERVICE . udp . 53 : goto service-A, SERVICE . udp . 443 : goto service-A } }
	set affinity { type ADDRESS; size 65535; flags dynamic,timeout; timeout 1h; elements = { POD timeout 1h } }
	map firewall-ips { type ADDRESS . inet_proto . inet_service : verdict; elements = { SERVICE . udp . 443 : goto firewall-A } }
	map no-endpoints { type ADDRESS . inet_proto . inet_service : verdict; elements = { SERVICE . udp . 80 : drop } }
	chain filter-forward { type filter hook forward priority filter; FAMILY daddr . meta l4proto . th dport vmap @no-endpoints; }
	chain filter-prerouting-pre-dnat { type filter hook prerouting priority dstnat - 10; ct state new jump firewall-check; }
	chain firewall-check { FAMILY daddr . meta l4proto . th dport vmap @firewall-ips; }
	chain firewall-A { FAMILY saddr != { POD } counter drop; }
	chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
	chain nat-output { type nat hook output priority -100; jump services; }
	chain nat-postrouting { type nat hook postrouting priority srcnat; jump masquerading; }
	chain services { FAMILY daddr . meta l4proto . th dport vmap @service-ips; }
	chain service-A { update @affinity { FAMILY saddr }; FAMILY saddr != POD jump mark-for-masquerade; meta l4proto udp dnat FAMILY to numgen random mod 2 map { 0 : POD . 5353, 1 : POD . 5353 }; }
	chain mark-for-masquerade { meta mark set meta mark or 0x4000; }
	chain masquerading { meta mark & 0x4000 == 0 return; meta mark set meta mark xor 0x4000; masquerade fully-random; }
}
`

// TestANativeTableIsCopied: flows must have the same fate through the copy as through kube-proxy's
// own table. The copy must follow a change while it is shut.
func TestANativeTableIsCopied(t *testing.T) {
	for _, family := range []tableid.Family{tableid.IPv4, tableid.IPv6} {
		t.Run(family.String(), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				l := newLab(t, family)
				conn := dial(t)
				d := &deck{family: family}
				client, service, pod, kind := "10.1.0.1", "10.2.0.1", "10.3.0.1", "ipv4_addr"
				if family == tableid.IPv6 {
					client, service, pod, kind = "fd00:0:0:1::1", "fd00:0:0:2::1", "fd00:0:0:3::1", "ipv6_addr"
				}
				text := strings.NewReplacer("FAMILY", d.family.NFT(), "ADDRESS", kind, "SERVICE", service, "POD", pod).Replace(nftServices)
				id := family.Table("kube-proxy")
				nstest.CommandInput(t, text, "nft", "-f", "-")
				at := func(a string, port uint16) netip.AddrPort {
					return netip.AddrPortFrom(netip.MustParseAddr(a), port)
				}
				flows := []flow{{unix.IPPROTO_UDP, at(client, 2001), at(service, 53)}, {unix.IPPROTO_UDP, at(pod, 2002), at(service, 53)},
					{unix.IPPROTO_UDP, at(client, 2003), at(service, 99)}, {unix.IPPROTO_UDP, at(client, 2005), at(service, 443)},
					{unix.IPPROTO_UDP, at(pod, 2006), at(service, 443)}, {unix.IPPROTO_UDP, netip.AddrPortFrom(node[family], 2004), at(service, 53)}}
				want := classes(l.fates(flows))
				if want[flows[0]].To.Addr().String() != pod {
					t.Fatalf("the table itself translates nothing: %v", want)
				}
				if _, passes := want[flows[3]]; passes || want[flows[4]].To.Addr().String() != pod {
					t.Fatalf("the table's own source range holds nothing off, or all: %v", want)
				}
				s := open(t, standby.Config{})
				table := captured(t, conn, id)
				c, err := standby.TranslateNative(table, nil)
				must(t, err)
				must(t, s.Put(c))
				copied := listed(t, id)
				if strings.Contains(copied, "filter-forward") || strings.Contains(copied, "no-endpoints") || !strings.Contains(copied, "dstnat + 1") || !strings.Contains(copied, "dstnat - 9") {
					t.Errorf("the copy has what decides behind nat, or lacks what decides before it:\n%s", copied)
				}
				if !strings.Contains(copied, "size 1024") || !strings.Contains(copied, "expires") {
					t.Errorf("the copy has no affinity, or has room for as many clients as the table:\n%s", copied)
				}
				whole, err := c.Probe(conn)
				must(t, err)
				if hooks, _ := c.Openable(whole); len(hooks) > 0 {
					t.Errorf("of the whole table %v may be opened", hooks)
				}
				if diff := cmp.Diff(want, classes(l.fates(flows)), comparer); diff != "" {
					t.Errorf("while both stand (-want +got):\n%s", diff)
				}
				drop(t, family.Table("kube-proxy"))
				for f, is := range l.fates(flows) {
					if !untouched(f, is) {
						t.Errorf("the shut copy makes %v of %v", is, f)
					}
				}
				losses, err := c.Probe(conn)
				must(t, err)
				hooks, _ := c.Openable(losses)
				if diff := cmp.Diff(c.Hooks(), hooks); diff != "" {
					t.Errorf("the hooks that may be opened (-want +got):\n%s", diff)
				}
				must(t, s.Open(id, hooks, nil))
				if diff := cmp.Diff(want, classes(l.fates(flows)), comparer); diff != "" {
					t.Errorf("through the copy (-want +got):\n%s", diff)
				}
				changed := strings.Replace(text, "udp . 53 :", "udp . 54 :", 1)
				nstest.CommandInput(t, changed, "nft", "-f", "-")
				table = captured(t, conn, id)
				next, err := standby.TranslateNative(table, s.Held(id))
				must(t, err)
				if next.Outstanding(s.Held(id)) == 0 {
					t.Error("nothing is outstanding")
				}
				if err := s.Put(next); !errors.Is(err, standby.ErrOutdated) {
					t.Errorf("an open copy is written: %v", err)
				}
				must(t, s.Shut(id))
				must(t, s.Put(next))
				if n := next.Outstanding(s.Held(id)); n != 0 || !strings.Contains(listed(t, id), "udp . 54") {
					t.Errorf("%d parts are outstanding:\n%s", n, listed(t, id))
				}
			})
		})
	}
}

// TestKubeProxysNativeTable: kube-proxy's table of 100 services must be copied as a whole.
func TestKubeProxysNativeTable(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedRoot(t)
		nstest.NeedProgram(t, "nft")
		text := testkit.Unpacked(t, "../../hack/bench/heal/testdata/services-100.nft.gz")
		nstest.CommandInput(t, text, "nft", "-f", "-")
		conn := dial(t)
		table := captured(t, conn, kubeProxy)
		c, err := standby.TranslateNative(table, nil)
		must(t, err)
		s := open(t, standby.Config{})
		must(t, s.Put(c))
		st := s.Status(kubeProxy)
		t.Logf("%d chains, %d bytes, %s", st.Chains, st.Bytes, st.Took)
		nstest.Command(t, "nft", "flush", "ruleset")
		must(t, s.Open(kubeProxy, c.Hooks(), nil))
		if got := len(s.Status(kubeProxy).Open); got != 3 {
			t.Errorf("%d hooks are open, want 3", got)
		}
		must(t, s.Close())
		goneOf(t, conn, kubeProxy)
	})
}

// base returns a base chain at prerouting with a rule of these expressions.
func base(kind string, priority int32, expressions ...string) native.Chain {
	number := func(n uint32) []byte { return binary.BigEndian.AppendUint32(nil, n) }
	hook := nft.AppendAttr(nft.AppendAttr(nil, unix.NFTA_HOOK_HOOKNUM, number(0), 0), unix.NFTA_HOOK_PRIORITY, number(uint32(priority)), 0)
	c := native.Chain{Name: kind, Base: true, Attrs: nft.AppendAttr(nft.AppendAttr(nil, unix.NFTA_CHAIN_TYPE, kind, 1), unix.NFTA_CHAIN_HOOK, hook, 0)}
	var list []byte
	for _, name := range expressions {
		list = nft.AppendAttr(list, unix.NFTA_LIST_ELEM, nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, name, 1), 0)
	}
	c.Rules = []native.Rule{{Attrs: nft.AppendAttr(nil, unix.NFTA_RULE_EXPRESSIONS, list, 0)}}
	return c
}

// TestNativeTablesThatAreNotCopied: the error must say why a table is not copied.
func TestNativeTablesThatAreNotCopied(t *testing.T) {
	for name, table := range map[string]*native.Table{
		"one process owns":     {ID: kubeProxy, Owner: 7},
		"no base chain of nat": {ID: kubeProxy},
		"no native table":      {ID: nat},
		"more than":            {ID: kubeProxy, Sets: make([]native.Set, 9000)},
		`filters by "limit"`:   {ID: kubeProxy, Chains: []native.Chain{base("nat", -100), base("filter", -110, "limit")}},
		`filters by "dynset"`:  {ID: kubeProxy, Chains: []native.Chain{base("nat", -100), base("filter", -300, "counter", "dynset")}},
	} {
		if _, err := standby.TranslateNative(table, nil); !errors.Is(err, standby.ErrUnavailable) || !strings.Contains(err.Error(), name) {
			t.Errorf("got %v, want %q", err, name)
		}
	}
}
