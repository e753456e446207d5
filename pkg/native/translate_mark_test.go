package native_test

import (
	"cmp"
	"net/netip"
	"regexp"
	"strconv"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestMasquerades: a table has sent a flow to a backend. Masquerades must say whether it certainly
// changes the flow's source, too.
func TestMasquerades(t *testing.T) {
	const (
		mark   = "meta mark set meta mark | 0x4000; "
		marked = "meta mark & 0x4000 == 0 return; masquerade"
		send   = "tcp dport 8080 dnat to 10.88.0.9:80"
	)
	tests := []struct {
		name, pre, post, more string
		from                  string
		want                  bool
	}{
		{"always", send, "masquerade", "", "", true},
		{"never", send, "", "", "", false},
		{"a fixed source", send, "snat to 192.0.2.1", "", "", true},
		{"a fixed source, which it has", send, "snat to 10.88.0.2", "", "", false},
		{"a range of sources", send, "snat to 10.88.0.1-10.88.0.9", "", "", false},
		{"sent to another port", "tcp dport 8080 dnat to 10.88.0.9:81", "masquerade", "", "", false},
		{"sent to some port", "tcp dport 8080 dnat to 10.88.0.9:80-90", "masquerade", "", "", true},
		{"from these", send, "ip saddr 10.88.0.0/16 masquerade", "", "", true},
		{"from others", send, "ip saddr 10.99.0.0/16 masquerade", "", "", false},
		{"to there", send, "ip daddr 10.88.0.9 tcp dport 80 masquerade", "", "", true},
		{"to where it was sent first", send, "ip daddr 192.0.2.1 masquerade", "", "", false},
		{"a mark that was set", mark + send, marked, "", "", true},
		{"no mark", send, marked, "", "", false},
		{"another mark", "meta mark set meta mark | 0x2000; " + send, marked, "", "", false},
		{"a whole mark", "meta mark set 0x4000; " + send, "meta mark != 0x4000 return; masquerade", "", "", true},
		{"a mark that was cleared", mark + "meta mark set meta mark & 0xffffbfff; " + send, marked, "", "", false},
		{"perhaps a mark", "iifname eth0 " + mark + send, marked, "", "", false},
		{"a mark in a jump", "jump marks; " + send, marked, "chain marks { " + mark + "}", "", true},
		{"a mark in a jump that may return before", "jump marks; " + send, marked, "chain marks { iifname eth0 return; " + mark + "}", "", false},
		{"a mark on the way to another backend", "numgen random mod 2 vmap { 0 : goto a, 1 : goto b }", marked,
			"chain a { " + mark + "tcp dport 8080 dnat to 10.88.0.8:80; }; chain b { " + send + "; }", "", false},
		{"no mark on the way to another backend", "numgen random mod 2 vmap { 0 : goto a, 1 : goto b }", marked,
			"chain a { tcp dport 8080 dnat to 10.88.0.8:80; }; chain b { " + mark + send + "; }", "", true},
		{"ways to the same backend, one of them without a mark", "numgen random mod 2 vmap { 0 : goto a, 1 : goto b }", marked,
			"chain a { " + send + "; }; chain b { " + mark + send + "; }", "", false},
		{"a mark behind a set that rules fill", "ip saddr vmap @seen; " + mark + send, marked,
			"map seen { type ipv4_addr : verdict; flags timeout; }", "", false},
		{"excepted by an interface", mark + send, `oifname "lo" accept; ` + marked, "", "", false},
		{"the node's own", mark + send, marked, "", "192.0.2.1:4000", false},
	}
	nstest.Run(t, func(t *testing.T) {
		texts := map[tableid.TableID]string{}
		for i, test := range tests {
			id := tableid.IPv4.Table("t" + strconv.Itoa(i))
			texts[id] = "table ip " + id.Name + " {\n" + test.more + "\nchain pre { type nat hook prerouting priority dstnat; " + test.pre +
				"; }\nchain post { type nat hook postrouting priority srcnat; " + test.post + "; }\n}\n"
		}
		for id, table := range loadTables(t, texts) {
			i, _ := strconv.Atoi(id.Name[1:])
			flow := flowOf(tcp, cmp.Or(tests[i].from, "10.88.0.2:4000"), "192.0.2.1:8080")
			tr := nat.New(site{}, native.NatHooks([]*native.Table{table}, tableid.IPv4))
			if got := tr.Masquerades(flow, netip.MustParseAddrPort("10.88.0.9:80")); got != tests[i].want {
				t.Errorf("%s: masqueraded for sure: %t, want %t\n%s", tests[i].name, got, tests[i].want, texts[id])
			}
		}
	})
}

// TestMasqueradesServices: kube-proxy's table must masquerade flows to services from outside of the
// pods' network, and no others.
func TestMasqueradesServices(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		text := services(t, services100)
		tr := translationsOf(t, text, tableid.IPv4)
		found := 0
		for _, m := range regexp.MustCompile(`([0-9.]+) \. tcp \. (\d+)(?: comment "[^"]*")? : goto (service-[^ ,]+)`).FindAllStringSubmatch(text, -1) {
			chain := regexp.MustCompile(`chain ` + regexp.QuoteMeta(m[3]) + ` \{\n\t\tmeta l4proto tcp dnat ip to numgen random mod \d+ map \{ 0 : ([0-9.]+) \. (\d+)`).FindStringSubmatch(text)
			if chain == nil {
				continue
			}
			found++
			backend := netip.MustParseAddrPort(chain[1] + ":" + chain[2])
			for from, want := range map[string]bool{"198.51.100.7:4000": true, "10.1.7.9:4000": false} {
				if got := tr.Masquerades(flowOf(tcp, from, m[1]+":"+m[2]), backend); got != want {
					t.Errorf("%s from %s, sent to %s: masqueraded for sure: %t, want %t", m[0], from, backend, got, want)
				}
			}
		}
		if found < 20 {
			t.Errorf("%d services found", found)
		}
	})
}
