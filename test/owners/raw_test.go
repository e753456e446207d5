package owners

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// cacheRules makes node-cache insert its rules for an address, as cmd/node-cache
// of kubernetes/dns does, or delete each of them. One command inserts all,
// because no story looks in between.
func cacheRules(n *nodetest.Node, family rules.Family, verb, address string) {
	n.Helper()
	inserted := map[string]string{}
	for _, r := range []struct{ table, chain, protocol, side, port string }{
		{"raw", "PREROUTING", "tcp", "d", "53"}, {"raw", "PREROUTING", "udp", "d", "53"},
		{"filter", "INPUT", "tcp", "d", "53"}, {"filter", "INPUT", "udp", "d", "53"},
		{"raw", "OUTPUT", "tcp", "s", "53"}, {"raw", "OUTPUT", "udp", "s", "53"},
		{"filter", "OUTPUT", "tcp", "s", "53"}, {"filter", "OUTPUT", "udp", "s", "53"},
		{"raw", "OUTPUT", "tcp", "d", "53"}, {"raw", "OUTPUT", "udp", "d", "53"},
		{"raw", "OUTPUT", "tcp", "d", "8080"}, {"raw", "OUTPUT", "tcp", "s", "8080"},
	} {
		target, comment := "NOTRACK", "skip conntrack"
		if r.table == "filter" {
			target, comment = "ACCEPT", "allow DNS traffic"
		}
		words := []string{verb, r.chain, "-p", r.protocol, "-" + r.side, address, "--" + r.side + "port", r.port,
			"-j", target, "-m", "comment", "--comment", "NodeLocal DNS Cache: " + comment}
		if verb == "-D" {
			run(n, family, r.table, words...)
			continue
		}
		words[len(words)-1] = strconv.Quote(words[len(words)-1])
		inserted[r.table] += strings.Join(words, " ") + "\n"
	}
	for table, text := range inserted {
		n.Must(n.Programs.RestoreNoflush(n.Context(), family, "*"+table+"\n"+text+"COMMIT\n"))
	}
}

// rawOwners writes the rules of Calico, Cilium and Docker in raw, and a
// stranger's rule.
func rawOwners(n *nodetest.Node, family rules.Family, container string) {
	n.Helper()
	n.Must(n.Programs.RestoreNoflush(n.Context(), family, `*raw
:cali-PREROUTING - [0:0]
:cali-OUTPUT - [0:0]
:cali-rpf-skip - [0:0]
:CILIUM_PRE_raw - [0:0]
:CILIUM_OUTPUT_raw - [0:0]
-A PREROUTING -d `+container+` ! -i docker0 -j DROP
-A PREROUTING -m comment --comment "cilium-feeder: CILIUM_PRE_raw" -j CILIUM_PRE_raw
-A OUTPUT -m comment --comment "cilium-feeder: CILIUM_OUTPUT_raw" -j CILIUM_OUTPUT_raw
-A OUTPUT -o eth7 -j ACCEPT
-I PREROUTING 1 -m comment --comment "cali:6gwbT8clXdHdC1b1" -j cali-PREROUTING
-I OUTPUT 1 -m comment --comment "cali:tVnHkvAo15HuiPy0" -j cali-OUTPUT
-A cali-PREROUTING -m comment --comment "cali:XFX5xbM8B9qR10JG" -j MARK --set-xmark 0x0/0xf0000
-A cali-PREROUTING -i cali+ -m comment --comment "cali:EWMPb0zVROM-woQp" -j MARK --set-xmark 0x40000/0x40000
-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -m comment --comment "cali:V6ooGP15glg7wm91" -j cali-rpf-skip
-A cali-OUTPUT -m comment --comment "cali:njdnLwYeGqBJyMxW" -j MARK --set-xmark 0x0/0xf0000
-A cali-rpf-skip -j DROP
-A CILIUM_PRE_raw -m mark --mark 0x200/0xf00 -m comment --comment "cilium: NOTRACK for proxy traffic" -j CT --notrack
-A CILIUM_OUTPUT_raw -o lxc+ -m mark --mark 0xa00/0xfffffeff -m comment --comment "cilium: NOTRACK for proxy return traffic" -j CT --notrack
-A CILIUM_OUTPUT_raw -p tcp -m tcp --dport 21 -j CT --helper ftp
-A CILIUM_OUTPUT_raw -o eth1 -j CT --zone 7
COMMIT
`))
}

// rulesOf returns the rules of a table in their order, without marks.
func rulesOf(n *nodetest.Node, family rules.Family, table rules.TableName) []string {
	n.Helper()
	var lines []string
	t := n.Save()[family][table]
	if t == nil {
		return nil
	}
	chains := slices.Clone(t.Chains)
	slices.SortFunc(chains, func(a, b rules.Chain) int { return strings.Compare(a.Name, b.Name) })
	for _, c := range chains {
		if c.Name == canary.DefaultChain {
			continue
		}
		lines = append(lines, c.Name)
		for _, r := range c.Rules {
			if !canary.IsMark(r) {
				lines = append(lines, "  "+r.Spec)
			}
		}
	}
	return lines
}

// guarded returns the rules of a table that canaryd puts back. In raw these are
// all but the stranger's rule, in filter the rules of NodeLocal DNSCache.
func guarded(n *nodetest.Node, family rules.Family, table rules.TableName) []string {
	n.Helper()
	return slices.DeleteFunc(rulesOf(n, family, table), func(l string) bool {
		return strings.Contains(l, "eth7") || table == rules.Filter && !strings.Contains(l, "NodeLocal")
	})
}

// TestRawComesBack: a node has kube-proxy, and rules of Calico, Cilium, Docker
// and NodeLocal DNSCache in raw. After each kind of flush all must be back in
// their order, once each.
func TestRawComesBack(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Must(scenario.Load(n.Context(), n.Programs, rules.Families()...))
		addresses := map[rules.Family]string{rules.IPv4: "169.254.20.10", rules.IPv6: "fd00::20:10"}
		for f, container := range map[rules.Family]string{rules.IPv4: "172.17.0.2/32", rules.IPv6: "fd00:17::2/128"} {
			rawOwners(n, f, container)
			cacheRules(n, f, "-I", addresses[f])
		}
		flag := protects(n, "kube", "cni", "docker", "cali-*", "CILIUM_*", "node-local-dns")
		all, err := n.Programs.Save(n.Context(), rules.IPv4)
		n.Must(err)
		_, saved, _ := strings.Cut(all, "*raw\n") // on nft each table of a file is a commit of its own
		saved, _, _ = strings.Cut("*raw\n"+saved, "COMMIT\n")
		p := n.Start(flag)
		want := map[string][]string{}
		for _, f := range rules.Families() {
			for _, table := range []rules.TableName{rules.Raw, rules.Filter} {
				want[f.String()+table] = guarded(n, f, table)
			}
		}
		records := 0
		for _, c := range []struct {
			name string
			do   func(f rules.Family)
			on   iptables.Backend
			both bool // families
		}{
			{name: "iptables -t raw -F", do: func(f rules.Family) { run(n, f, rules.Raw, "-F") }},
			{name: "iptables -t raw -F, -X", do: func(f rules.Family) {
				n.Must(n.Programs.Flush(n.Context(), f, rules.Raw, ""))
				_ = n.Programs.DeleteChains(n.Context(), f, rules.Raw) // refused if canaryd was faster
			}},
			{name: "iptables -t raw -F OUTPUT", do: func(f rules.Family) { run(n, f, rules.Raw, "-F", "OUTPUT") }},
			{name: "iptables-restore of an empty raw", do: func(f rules.Family) {
				n.Must(n.Programs.Restore(n.Context(), f, "*raw\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n"))
			}},
			{name: "iptables-restore of a file", do: func(f rules.Family) { n.Must(n.Programs.Restore(n.Context(), f, saved+"COMMIT\n")) }},
			{name: "nft delete table", on: iptables.NFT, do: func(f rules.Family) { nstest.Command(n.T, "nft", "delete", "table", f.NFT(), "raw") }},
			{name: "nft flush ruleset", on: iptables.NFT, both: true, do: func(rules.Family) { nstest.Command(n.T, "nft", "flush", "ruleset") }},
		} {
			for _, f := range rules.Families() {
				if c.on != "" && c.on != n.Programs.With || strings.HasSuffix(c.name, "a file") && f == rules.IPv6 || c.both && f == rules.IPv6 {
					continue
				}
				c.do(f)
				records++
				record := n.Healed(records)
				n.Logf("%s, %s: absent for %.0f ms", c.name, f, 1000*record.AbsentSeconds)
				for _, table := range []rules.TableName{rules.Raw, rules.Filter} {
					if d := cmp.Diff(want[f.String()+table], guarded(n, f, table)); d != "" {
						n.Errorf("%s: %s %s (-want +got):\n%s", c.name, f, table, d)
					}
				}
			}
		}

		// node-cache ends, and deletes each rule by name.
		for f, address := range addresses {
			cacheRules(n, f, "-D", address)
		}
		n.Learned()
		for _, f := range rules.Families() {
			run(n, f, rules.Raw, "-F")
		}
		n.Until("raw to be back", func() error {
			for _, f := range rules.Families() {
				if !slices.ContainsFunc(rulesOf(n, f, rules.Raw), func(l string) bool { return strings.Contains(l, "cali-OUTPUT") && l != "cali-OUTPUT" }) {
					return fmt.Errorf("%s lacks Calico's jump", f)
				}
			}
			return nodetest.Ready()
		})
		for _, f := range rules.Families() {
			for _, table := range []rules.TableName{rules.Raw, rules.Filter} {
				for _, l := range rulesOf(n, f, table) {
					if strings.Contains(l, "NodeLocal") {
						n.Errorf("%s %s: a rule that its owner deleted is back: %s", f, table, l)
					}
				}
			}
		}
		p.Stop()
	})
}

// madeTables returns the existing tables of both backends.
func madeTables(n *nodetest.Node) string {
	n.Helper()
	var all []string
	for _, name := range []string{"ip", "ip6"} {
		text, err := os.ReadFile("/proc/thread-self/net/" + name + "_tables_names")
		if err == nil {
			all = append(all, "legacy "+name+" "+strings.Join(slices.Sorted(slices.Values(strings.Fields(string(text)))), " "))
		}
	}
	return strings.Join(append(all, nstest.Command(n.T, "nft", "list", "tables")), "\n")
}

// TestNoRawIsMade: a node without rules in raw and security gets neither table,
// whatever canaryd does there. If an owner leaves raw, canaryd's marks leave it
// too.
func TestNoRawIsMade(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Must(scenario.Load(n.Context(), n.Programs, rules.Families()...))
		flag := protects(n, "kube", "cni", "docker", "calico", "cali-*", "CILIUM_*", "node-local-dns")
		n.Start(flag)
		none := func(what string) {
			n.Helper()
			if made := madeTables(n); strings.Contains(made, " raw") || strings.Contains(made, "security") {
				n.Errorf("%s, these tables exist:\n%s", what, made)
			}
		}
		none("after a start")
		n.Flush()
		n.Healed(1)
		none("after a flush")
		n.Want(0, "check")
		n.Want(0, "detect")
		n.Want(0, "render")
		none("after all commands")
		if n.Programs.With == iptables.NFT {
			nstest.Command(n.T, "nft", "flush", "ruleset")
			n.Healed(2)
			none("after nft flush ruleset")
		}

		cacheRules(n, rules.IPv4, "-I", "169.254.20.10")
		marked := func(want bool) func() error {
			return func() error {
				if got := slices.ContainsFunc(n.Marks(), func(l string) bool { return strings.Contains(l, "raw") }); got != want {
					return fmt.Errorf("raw has marks: %t", got)
				}
				return nodetest.Ready()
			}
		}
		n.Until("raw to have marks", marked(true))
		cacheRules(n, rules.IPv4, "-D", "169.254.20.10")
		n.Until("raw to have no marks", marked(false))
		if n.Programs.With == iptables.NFT {
			nstest.Command(n.T, "nft", "delete", "table", "ip", "raw")
			n.Looked()
			none("after its owner has left")
		}
		n.Want(0, "cleanup")
	})
}
