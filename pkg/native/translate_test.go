package native_test

import (
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// site is a node with one address of each family.
type site struct{}

func (site) Local(a netip.Addr) bool {
	return a == netip.MustParseAddr("192.0.2.1") || a == netip.MustParseAddr("2001:db8::1")
}

func (site) Beyond(string, netip.Addr) bool { return true }

// The protocols of flows.
const tcp, udp, sctp = 6, 17, 132

// translationsOf loads a text and returns its translations.
func translationsOf(t *testing.T, text string, f tableid.Family) *nat.Translations {
	t.Helper()
	nstest.CommandInput(t, "flush ruleset\n"+text, "nft", "-f", "-")
	conn, err := nft.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r, err := native.Capture(conn, func(nft.Table) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	return nat.New(site{}, native.NatHooks(r.InOrder(), f))
}

func flowOf(protocol uint8, from, to string) nat.Flow {
	return nat.Flow{Protocol: protocol, Source: netip.MustParseAddrPort(from), Destination: netip.MustParseAddrPort(to)}
}

var serviceElement = regexp.MustCompile(`^\s*(?:elements = \{ )?([0-9.]+) \. (tcp|udp) \. (\d+)(?: comment "[^"]*")? : goto (service|external)-`)

// TestTranslatesServices: kube-proxy's table must certainly translate each flow to a service, from
// a pod, from the node and from a stranger. It must translate no other flow.
func TestTranslatesServices(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		text := services(t, services100)
		tr := translationsOf(t, text, tableid.IPv4)
		found := 0
		for line := range strings.Lines(text) {
			m := serviceElement.FindStringSubmatch(line)
			if m == nil {
				continue
			}
			protocol := map[string]uint8{"tcp": tcp, "udp": udp}[m[2]]
			for _, from := range []string{"10.1.7.9:4000", "192.0.2.1:4000", "198.51.100.7:4000"} {
				if flow := flowOf(protocol, from, m[1]+":"+m[3]); !tr.Translates(flow) {
					t.Errorf("%s from %s is not translated for sure", strings.TrimSpace(line), from)
				}
			}
			port, _ := strconv.Atoi(m[3])
			for _, other := range []nat.Flow{
				flowOf(sctp, "10.1.7.9:4000", m[1]+":"+m[3]), flowOf(protocol, "10.1.7.9:4000", m[1]+":"+strconv.Itoa(port+7)),
				flowOf(protocol, "10.1.7.9:4000", "10.128.0.4:8080"),
			} {
				if tr.Translates(other) {
					t.Errorf("%v is translated", other)
				}
			}
			found++
		}
		if found < 90 {
			t.Errorf("the test knows %d services only", found)
		}
		if !nat.New(site{}, native.NatHooks(nil, tableid.IPv4)).Empty() || tr.Empty() {
			t.Error("whether there is anything that translates is not what the tables say")
		}
	})
}

// TestTranslatesForms: these are rules of owners and users, and conditions that make a translation
// uncertain.
func TestTranslatesForms(t *testing.T) {
	t.Parallel()
	pod := "10.88.0.2:4000"
	tests := []struct {
		name, rules string // in a chain of prerouting
		more        string // other content of the table
		flow        nat.Flow
		want        bool
	}{
		{"a port", "tcp dport 8080 dnat to 10.88.0.9:80", "", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"another port", "tcp dport 8080 dnat to 10.88.0.9:80", "", flowOf(tcp, pod, "192.0.2.1:8081"), false},
		{"another protocol", "tcp dport 8080 dnat to 10.88.0.9:80", "", flowOf(udp, pod, "192.0.2.1:8080"), false},
		{"the node's address", "fib daddr type local tcp dport 8080 dnat to 10.88.0.9:80", "", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"perhaps not the node's", "fib daddr type local tcp dport 8080 dnat to 10.88.0.9:80", "", flowOf(tcp, pod, "192.0.2.9:8080"), false},
		{"a jump", "jump ports", "chain ports { tcp dport 8080 dnat to 10.88.0.9:80; }", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"a jump that returns", "jump ports; tcp dport 8080 dnat to 10.88.0.9", "chain ports { ip saddr 10.88.0.2 return; dnat to 10.88.0.8; }", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"a goto that ends", "goto ports; tcp dport 8080 dnat to 10.88.0.9", "chain ports { udp dport 1 dnat to 10.88.0.8; }", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"a map of destinations", "dnat to tcp dport map { 8080 : 10.88.0.9, 8081 : 10.88.0.8 }", "", flowOf(tcp, pod, "192.0.2.1:8081"), true},
		{"not in the map", "dnat to tcp dport map { 8080 : 10.88.0.9 }", "", flowOf(tcp, pod, "192.0.2.1:8081"), false},
		{"to itself", "tcp dport 8080 dnat to 192.0.2.1:8080", "", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"to another port of the same address", "tcp dport 8080 dnat to 192.0.2.1:80", "", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"to the same address and some port", "tcp dport 8080 dnat to 192.0.2.1:80-8090", "", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"to another address and some port", "tcp dport 8080 dnat to 10.88.0.9:80-8090", "", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"to a range that may have it", "tcp dport 8080 dnat to 192.0.2.0-192.0.2.9", "", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"to one of several ports, with its own", "tcp dport 8080 dnat to numgen random mod 2 map { 0 : 192.0.2.1 . 80, 1 : 192.0.2.1 . 8080 }", "", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"to one of several ports", "tcp dport 8080 dnat to numgen random mod 2 map { 0 : 192.0.2.1 . 80, 1 : 192.0.2.1 . 81 }", "", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"accepted before", "ip saddr 10.88.0.0/16 accept; tcp dport 8080 dnat to 10.88.0.9", "", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"others accepted before", "ip saddr 10.99.0.0/16 accept; tcp dport 8080 dnat to 10.88.0.9", "", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"perhaps accepted before", "meta mark 7 accept; tcp dport 8080 dnat to 10.88.0.9", "", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"from an interface", `iifname "eth0" tcp dport 8080 dnat to 10.88.0.9`, "", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"from one interface or not", `iifname "eth0" tcp dport 8080 dnat to 10.88.0.9; tcp dport 8080 dnat to 10.88.0.8`, "", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"in an interval", "ip daddr @nets dnat to 10.88.0.9", "set nets { type ipv4_addr; flags interval; elements = { 192.0.2.0/24 }; }", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"not in an interval", "ip daddr @nets dnat to 10.88.0.9", "set nets { type ipv4_addr; flags interval; elements = { 192.0.2.0/25, 192.0.2.200-192.0.2.210 }; }", flowOf(tcp, pod, "192.0.2.130:8080"), false},
		{"in the second interval", "ip daddr @nets dnat to 10.88.0.9", "set nets { type ipv4_addr; flags interval; elements = { 192.0.2.0/25, 192.0.2.200-192.0.2.210 }; }", flowOf(tcp, pod, "192.0.2.210:8080"), true},
		{"right behind an interval", "ip daddr @nets dnat to 10.88.0.9", "set nets { type ipv4_addr; flags interval; elements = { 192.0.2.200-192.0.2.210 }; }", flowOf(tcp, pod, "192.0.2.211:8080"), false},
		{"intervals that touch", "ip daddr vmap @nets; dnat to 10.88.0.9", "map nets { type ipv4_addr : verdict; flags interval; elements = { 192.0.2.0/25 : return, 192.0.2.128/25 : continue }; }", flowOf(tcp, pod, "192.0.2.128:8080"), true},
		{"intervals that touch, the first", "ip daddr vmap @nets; dnat to 10.88.0.9", "map nets { type ipv4_addr : verdict; flags interval; elements = { 192.0.2.0/25 : return, 192.0.2.128/25 : continue }; }", flowOf(tcp, pod, "192.0.2.127:8080"), false},
		{"an excepted interval", "ip daddr != @nets dnat to 10.88.0.9", "set nets { type ipv4_addr; flags interval; elements = { 192.0.2.0/24 }; }", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"to the end of all addresses", "ip daddr @nets dnat to 10.88.0.9", "set nets { type ipv4_addr; flags interval; elements = { 192.0.2.0-255.255.255.255 }; }", flowOf(tcp, pod, "200.0.0.1:8080"), true},
		{"all other addresses", "ip daddr vmap @nets", "map nets { type ipv4_addr : verdict; elements = { 192.0.2.9 : accept, * : goto pods }; }; chain pods { dnat to 10.88.0.9; }", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"not the other addresses", "ip daddr vmap @nets", "map nets { type ipv4_addr : verdict; elements = { 192.0.2.1 : accept, * : goto pods }; }; chain pods { dnat to 10.88.0.9; }", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"a map of intervals", "dnat to tcp dport map { 8000-8999 : 10.88.0.9, 9000-9999 : 10.88.0.8 }", "", flowOf(tcp, pod, "192.0.2.1:8999"), true},
		{"not in the map of intervals", "dnat to tcp dport map { 8000-8999 : 10.88.0.9 }", "", flowOf(tcp, pod, "192.0.2.1:9000"), false},
		{"ranges of several fields", "ip daddr . tcp dport @nets dnat to 10.88.0.9", "set nets { type ipv4_addr . inet_service; flags interval; elements = { 192.0.2.0/24 . 8000-8100 }; }", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"not in ranges of several fields", "ip daddr . tcp dport @nets dnat to 10.88.0.9", "set nets { type ipv4_addr . inet_service; flags interval; elements = { 192.0.2.0/24 . 8000-8050 }; }", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"a range of ports", "tcp dport 8000-8100 dnat to 10.88.0.9", "", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"not in a range of ports", "tcp dport 8000-8050 dnat to 10.88.0.9", "", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"outside of a range of ports", "tcp dport != 8000-8050 dnat to 10.88.0.9", "", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"with a timeout", "ip daddr @nets dnat to 10.88.0.9", "set nets { type ipv4_addr; flags interval, timeout; timeout 1h; elements = { 192.0.2.0/24 }; }", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"not in a set", "ip saddr != @pods tcp dport 8080 dnat to 10.88.0.9", "set pods { type ipv4_addr; elements = { 10.88.0.3 }; }", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"in a set that is excepted", "ip saddr != @pods tcp dport 8080 dnat to 10.88.0.9", "set pods { type ipv4_addr; elements = { 10.88.0.2 }; }", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"some of the numbers", "numgen random mod 3 vmap { 0 : goto a, 1 : goto a }", "chain a { dnat to 10.88.0.9; }", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"all numbers", "numgen random mod 2 vmap { 0 : goto a, 1 : goto b }", "chain a { dnat to 10.88.0.9; }; chain b { dnat to 10.88.0.8; }", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"all numbers, one of them dropped", "numgen random mod 2 vmap { 0 : goto a, 1 : drop }", "chain a { dnat to 10.88.0.9; }", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"one of several", "tcp dport 8080 dnat to numgen random mod 2 map { 0 : 10.88.0.9, 1 : 10.88.0.8 }", "", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"one of several, itself", "tcp dport 8080 dnat to numgen random mod 2 map { 0 : 10.88.0.9, 1 : 192.0.2.1 }", "", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"not all of several", "tcp dport 8080 dnat to numgen random mod 3 map { 0 : 10.88.0.9, 1 : 10.88.0.8 }", "", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"redirected", "tcp dport 8080 redirect to :80", "", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"a limit", "limit rate 1/second tcp dport 8080 dnat to 10.88.0.9", "", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"counted", "tcp dport 8080 counter log dnat to 10.88.0.9", "", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"counted by name", "counter name n tcp dport 8080 dnat to 10.88.0.9", "counter n { }", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"a limit by name", "limit name l tcp dport 8080 dnat to 10.88.0.9", "limit l { rate 1/second; }", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"a quota by name", "quota name q tcp dport 8080 dnat to 10.88.0.9", "quota q { over 1 mbytes; }", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"counted in a set", "ip saddr @pods tcp dport 8080 dnat to 10.88.0.9", "set pods { type ipv4_addr; counter; elements = { 10.88.0.2 }; }", flowOf(tcp, pod, "192.0.2.1:8080"), true},
		{"a limit in a set", "ip saddr @pods tcp dport 8080 dnat to 10.88.0.9", "set pods { type ipv4_addr; limit rate 1/second; elements = { 10.88.0.2 }; }", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"a verdict that continues in the rule", "ip saddr vmap { 10.88.0.2 : continue } accept; tcp dport 8080 dnat to 10.88.0.9", "", flowOf(tcp, pod, "192.0.2.1:8080"), false},
		{"the node's own", "tcp dport 8080 dnat to 10.88.0.9", "", flowOf(tcp, "192.0.2.1:4000", "192.0.2.1:8080"), false},
	}
	nstest.Run(t, func(t *testing.T) {
		texts := map[tableid.TableID]string{}
		for i, test := range tests {
			for _, family := range []tableid.Family{tableid.IPv4, tableid.Inet} {
				form, more := test.rules, test.more
				if family == tableid.Inet {
					form, more = strings.ReplaceAll(form, "dnat to", "dnat ip to"), strings.ReplaceAll(more, "dnat to", "dnat ip to")
					form = strings.ReplaceAll(form, "; dnat", "; meta nfproto ipv4 dnat")
				}
				id := family.Table("t" + strconv.Itoa(i))
				texts[id] = "table " + family.NFT() + " " + id.Name + " {\n" + more + "\nchain c { type nat hook prerouting priority dstnat; " + form + "; }\n}\n"
			}
		}
		for id, table := range loadTables(t, texts) {
			i, _ := strconv.Atoi(id.Name[1:])
			if got := nat.New(site{}, native.NatHooks([]*native.Table{table}, tableid.IPv4)).Translates(tests[i].flow); got != tests[i].want {
				t.Errorf("%s, %s: translated for sure: %t, want %t\n%s", tests[i].name, id.Family.NFT(), got, tests[i].want, texts[id])
			}
		}
	})
}

// TestTranslatesOtherFamily: in a table of inet, a nat expression of one family does nothing to
// the packets of the other, and the rule goes on.
func TestTranslatesOtherFamily(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		four, six := flowOf(udp, "10.88.0.2:4000", "192.0.2.1:8080"), flowOf(udp, "[fd00::2]:4000", "[2001:db8::1]:8080")
		for rules, want := range map[string][2]bool{
			"udp dport 8080 dnat ip to 10.88.0.9":                                         {true, false},
			"udp dport 8080 dnat ip6 to fd00::9":                                          {false, true},
			"udp dport 8080 dnat ip to 10.88.0.9; udp dport 8080 dnat ip6 to fd00::9":     {true, true},
			"udp dport 8080 dnat ip6 to fd00::9; udp dport 8080 dnat ip to 10.88.0.9":     {true, true},
			"udp dport 8080 dnat ip6 to 2001:db8::1; udp dport 8080 dnat ip to 10.88.0.9": {true, false},
			"udp dport 8080 dnat ip to 192.0.2.1; udp dport 8080 dnat ip6 to fd00::9":     {false, true},
		} {
			text := "table inet t { chain c { type nat hook prerouting priority dstnat; " + rules + "; }; }\n"
			got := [2]bool{translationsOf(t, text, tableid.IPv4).Translates(four), translationsOf(t, text, tableid.IPv6).Translates(six)}
			if got != want {
				t.Errorf("%s: IPv4 and IPv6 are translated for sure: %v, want %v", rules, got, want)
			}
		}
	})
}

// loadTables loads one table for each text by a single execution of nft, and captures all of them.
func loadTables(t *testing.T, texts map[tableid.TableID]string) map[tableid.TableID]*native.Table {
	t.Helper()
	nstest.NeedProgram(t, "nft")
	nstest.CommandInput(t, strings.Join(slices.Collect(maps.Values(texts)), ""), "nft", "-f", "-")
	tables := capture(t, dial(t)).Tables
	if len(tables) != len(texts) {
		t.Fatalf("%d tables of %d texts", len(tables), len(texts))
	}
	return tables
}

// TestTranslatesIPv6: a table of IPv6 must translate flows of its own family only.
func TestTranslatesIPv6(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		const text = "table ip6 t { chain c { type nat hook prerouting priority dstnat; ip6 daddr fd00::7 tcp dport 80 dnat to [fd00::9]:8080; }; }\n"
		six := flowOf(tcp, "[fd00::2]:4000", "[fd00::7]:80")
		var got []bool
		for _, f := range []tableid.Family{tableid.IPv4, tableid.IPv6} {
			got = append(got, translationsOf(t, text, f).Translates(six))
		}
		if !slices.Equal(got, []bool{false, true}) {
			t.Errorf("translated: %v", got)
		}
		// The registers still hold the key behind the address of the destination.
		const itself = "table ip6 t { chain c { type nat hook prerouting priority dstnat; ip6 daddr . meta l4proto . tcp dport { fd00::7 . tcp . 80 } " +
			"dnat to numgen random mod 2 map { 0 : fd00::7 . 80, 1 : fd00::9 . 80 }; }; }\n"
		if translationsOf(t, itself, tableid.IPv6).Translates(six) {
			t.Error("a flow that is perhaps sent to its own destination is translated for sure")
		}
	})
}
