package native_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// textOf returns a table's lines.
func textOf(lines []native.Line) string {
	var text strings.Builder
	for _, l := range lines {
		text.WriteString(l.Text + "\n")
	}
	return text.String()
}

// TestLines: the words for each part of a table must be those of a golden file.
func TestLines(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft", "ip")
		nstest.Command(t, "ip", "link", "add", "d1", "type", "veth", "peer", "name", "d2")
		nstest.CommandInput(t, `table ip t {
	counter hits { }
	set nets { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }
	map ports { type inet_proto . inet_service : verdict; elements = { tcp . 80 : goto web, udp . 53 : drop }; }
	chain web { meta l4proto tcp dnat to numgen random mod 2 map { 0 : 10.1.0.1, 1 : 10.1.0.2 }; }
	chain pre {
		type nat hook prerouting priority -100; policy accept;
		ip saddr @nets counter packets 7 bytes 8 jump web comment "why so"
		meta l4proto . th dport vmap @ports
		ct state new meta mark set 0x10
	}
}
table netdev d {
	chain in { type filter hook ingress device lo priority 0; }
	chain more { type filter hook ingress devices = { lo, d1 } priority 1; }
}
table ip off { flags dormant; }
`, "nft", "-f", "-")
		text, tables := "", capture(t, dial(t)).Tables
		for _, id := range []tableid.TableID{tableid.IPv4.Table("t"), tableid.Netdev.Table("d"), tableid.IPv4.Table("off")} {
			text += textOf(slices.Collect(tables[id].Lines()))
		}
		golden.Compare(t, "lines.golden", []byte(text))
	})
}

// TestHookNames: a hook's number has another meaning in each family. Not each kernel has egress.
func TestHookNames(t *testing.T) {
	got := map[string]string{}
	for _, family := range []tableid.Family{tableid.IPv4, tableid.Inet, tableid.Bridge, tableid.ARP, tableid.Netdev} {
		for hook := range byte(6) {
			table := &native.Table{ID: family.Table("t"), Chains: []native.Chain{{Name: "c", Base: true,
				Attrs: nft.AppendAttr(nil, unix.NFTA_CHAIN_HOOK|unix.NLA_F_NESTED, nft.AppendAttr(nil, unix.NFTA_HOOK_HOOKNUM, []byte{0, 0, 0, hook}, 0), 0)}}}
			words := strings.Fields(slices.Collect(table.Lines())[1].Text)
			got[family.NFT()] += words[slices.Index(words, "hook")+1] + " "
		}
	}
	want := map[string]string{
		"ip":     "prerouting input forward output postrouting ingress ",
		"inet":   "prerouting input forward output postrouting ingress ",
		"bridge": "prerouting input forward output postrouting 5 ",
		"arp":    "input output forward 3 4 5 ",
		"netdev": "ingress egress 2 3 4 5 ",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("names of hooks (-want +got):\n%s", d)
	}
}

// TestDevices: the kernel names the devices of a hook in a list, and a single device in an
// attribute of its own too. The test also has prefixes, which nft 1.0 cannot make.
func TestDevices(t *testing.T) {
	const list, one, exact, prefix = 4, unix.NFTA_HOOK_DEV, 1, 2
	attr := func(kind uint16, text string) []byte { return nft.AppendAttr(nil, kind, text, 1) }
	nested := func(kind uint16, in ...[]byte) []byte {
		return nft.AppendAttr(nil, kind|unix.NLA_F_NESTED, slices.Concat(in...), 0)
	}
	for _, test := range []struct {
		name string
		hook []byte
		want string
	}{
		{"none", nil, ""},
		{"one, as before Linux 5.5", attr(one, "eth0"), " device eth0"},
		{"one", slices.Concat(attr(one, "eth0"), nested(list, attr(exact, "eth0"))), " device eth0"},
		{"two", nested(list, attr(exact, "eth0"), attr(exact, "eth1")), " devices = { eth0, eth1 }"},
		{"a prefix", nested(list, attr(prefix, "eth")), " device eth*"},
		{"a prefix and an odd name", nested(list, attr(prefix, "eth"), attr(exact, "a\"b")), ` devices = { eth*, "a\"b" }`},
	} {
		table := &native.Table{ID: tableid.Netdev.Table("t"), Chains: []native.Chain{{Name: "c", Base: true, Attrs: nested(unix.NFTA_CHAIN_HOOK, test.hook)}}}
		_, got, _ := strings.Cut(slices.Collect(table.Lines())[1].Text, "priority 0")
		if got != test.want {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
	}
}

// TestLinesOfEveryStatement: every part of the corpus must have a text of one line. A table that
// was made again must have the same text.
func TestLinesOfEveryStatement(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		loadCorpus(t)
		conn := dial(t)
		was := capture(t, conn)
		nstest.Command(t, "nft", "flush", "ruleset")
		replay(t, conn, was)
		now := capture(t, conn)
		for id, table := range was.Tables {
			lines := slices.Collect(table.Lines())
			chains, rules, elements := table.Counts()
			for i := range table.Sets { // the end of an interval is said with its begin
				for _, e := range table.Sets[i].Elements {
					if flags, err := nft.AttrUint32(nft.AttrPath(e, unix.NFTA_SET_ELEM_FLAGS)); err == nil && flags&1 != 0 && !table.Sets[i].Anonymous() {
						elements--
					}
				}
			}
			count := map[nft.ObjectKind]int{}
			for _, l := range lines {
				if count[l.Kind]++; strings.ContainsFunc(l.Text, func(r rune) bool { return r < ' ' }) || strings.Contains(l.Text, "not readable") {
					t.Errorf("%s: %q", id, l.Text)
				}
			}
			for _, c := range table.Chains { // a chain that belongs to a rule is said with it
				if c.Bound {
					rules -= len(c.Rules)
				}
			}
			if count[nft.Chains] != chains || count[nft.Rules] != rules || count[nft.Elements] != elements {
				t.Errorf("%s: %v lines for %d chains, %d rules and %d elements", id, count, chains, rules, elements)
			}
			if d := cmp.Diff(textOf(lines), textOf(slices.Collect(now.Tables[id].Lines()))); d != "" {
				t.Errorf("%s after a replay (-before +after):\n%s", id, d)
			}
		}
	})
}

// TestDifference: the words must have each change, and nothing else.
func TestDifference(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		nstest.CommandInput(t, `table ip t {
	set hosts { type ipv4_addr; elements = { 10.0.0.1, 10.0.0.2 }; }
	set seen { type ipv4_addr; flags dynamic, timeout; timeout 1h; elements = { 10.0.0.9 }; }
	chain a { ip saddr @hosts accept; drop; }
	chain b { accept; }
	chain same { counter; }
}
`, "nft", "-f", "-")
		id := tableid.IPv4.Table("t")
		was := capture(t, conn).Tables[id]
		nstest.CommandInput(t, `flush chain ip t b
add rule ip t a reject
delete element ip t hosts { 10.0.0.2 }
add element ip t seen { 10.0.0.8 }
add chain ip t more
`, "nft", "-f", "-")
		now := capture(t, conn).Tables[id]
		lost, got := native.Difference(was, now)
		if d := cmp.Diff("element hosts 10.0.0.2\nrule b accept\n", textOf(lost)); d != "" {
			t.Errorf("lost (-want +got):\n%s", d)
		}
		if d := cmp.Diff("chain more\nrule a reject\n", textOf(got)); d != "" {
			t.Errorf("got (-want +got):\n%s", d)
		}
		if lost, got := native.Difference(was, nil); len(lost) < 9 || len(got) != 0 {
			t.Errorf("of a table that is gone: lost %v, got %v", lost, got)
		}
	})
}

// TestDifferenceOfOneText: nft prints two different rules alike. They must differ anyway. An
// interval of a set with timeouts must keep its end.
func TestDifferenceOfOneText(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		load := func(rule string) *native.Table {
			nstest.CommandInput(t, `table ip t
delete table ip t
table ip t {
	set nets { type ipv4_addr; flags interval, timeout; elements = { 10.0.0.0/24, 10.0.2.0-10.0.2.9, 10.0.3.1 timeout 1h }; }
	chain a { `+rule+`; }
}
`, "nft", "-f", "-")
			return capture(t, conn).Tables[tableid.IPv4.Table("t")]
		}
		was := load("limit rate 1 mbytes/second accept")
		now := load("limit rate 1 mbytes/second burst 5 bytes accept")
		lost, got := native.Difference(was, now)
		for what, lines := range map[string][]native.Line{"lost": lost, "got": got} {
			if d := cmp.Diff("rule a limit rate 1 mbytes/second accept\n", textOf(lines)); d != "" {
				t.Errorf("%s (-want +got):\n%s", what, d)
			}
		}
		lost, _ = native.Difference(was, nil)
		var elements []native.Line
		for _, l := range lost {
			if l.Kind == nft.Elements {
				elements = append(elements, l)
			}
		}
		if d := cmp.Diff("element nets 10.0.0.0/24\nelement nets 10.0.2.0-10.0.2.9\n", textOf(elements)); d != "" {
			t.Errorf("elements that last (-want +got):\n%s", d)
		}
	})
}
