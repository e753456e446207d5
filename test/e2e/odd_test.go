package e2e

import (
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// tool executes iptables or ip6tables of the node's backend.
func tool(n *nodetest.Node, f rules.Family, args ...string) string {
	n.Helper()
	program := map[rules.Family]string{rules.IPv4: "iptables-", rules.IPv6: "ip6tables-"}[f] + string(n.Programs.With)
	out, err := exec.CommandContext(n.Context(), program, append([]string{"-w", "5"}, args...)...).CombinedOutput()
	if err != nil {
		n.Fatalf("%s %q: %v: %s", program, args, err, out)
	}
	return string(out)
}

// TestOddRulesOfOthers: iptables prints some rules over several lines, or as
// options of its own. They are in chains of others, in an unguarded table and in
// protected chains. Some name ipsets of odd names; nft also has a native rule.
// They make no table unknown. After a flush everything must be back, odd rules in
// protected chains by their bytes, each in its place.
func TestOddRulesOfOthers(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) { oddRulesOfOthers(n) })
}

// TestOddRulesAsText: other tables are written as text only.
func TestOddRulesAsText(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) { oddRulesOfOthers(n, "--replay=text") })
}

func oddRulesOfOthers(n *nodetest.Node, flags ...string) {
	n.Load()
	for _, f := range rules.Families() {
		tool(n, f, "-A", "OUTPUT", "-m", "comment", "--comment", "x\ny", "-j", "ACCEPT")
		tool(n, f, "-t", "raw", "-A", "OUTPUT", "-m", "comment", "--comment", "x\nCOMMIT\n*nat\n:KUBE-SERVICES - [0:0]", "-j", "ACCEPT")
		tool(n, f, "-A", "FORWARD", "-i", "a -h", "-j", "ACCEPT")
		for _, name := range []string{"a -h", "a -M /run/evil", "+ -j ACCEPT\n#"} {
			tool(n, f, "-A", "KUBE-FORWARD", "-i", name, "-j", "ACCEPT")
		}
		set, inet := map[rules.Family]string{rules.IPv4: "a b", rules.IPv6: "a\nb"}[f], map[rules.Family]string{rules.IPv4: "inet", rules.IPv6: "inet6"}[f]
		if out, err := exec.CommandContext(n.Context(), "ipset", "create", set, "hash:ip", "family", inet).CombinedOutput(); err != nil {
			n.Fatalf("ipset: %v: %s", err, out)
		}
		tool(n, f, "-A", "KUBE-FORWARD", "-m", "set", "--match-set", set, "src", "-j", "ACCEPT")
		if n.Programs.With == iptables.NFT {
			ip := map[rules.Family]string{rules.IPv4: "ip", rules.IPv6: "ip6"}[f]
			if out, err := exec.CommandContext(n.Context(), "nft", "add", "rule", ip, "filter", "OUTPUT", "ct", "mark", "set", "meta", "mark").CombinedOutput(); err != nil {
				n.Fatalf("nft: %v: %s", err, out)
			}
		}
	}
	whole := asListed(n) // iptables-save prints odd rules as others, or not at all
	d := n.Start(flags...)
	n.Until("every table to be intact", func() error { return allIntact(n) })
	text, _ := n.Want(0, "status")
	if !strings.HasPrefix(text, "healthy\n") {
		n.Errorf("status says\n%s", text)
	}
	for round := range 2 {
		for _, f := range rules.Families() {
			for _, table := range append(protect.Always(), rules.Raw) {
				tool(n, f, "-t", string(table), "-F")
			}
		}
		n.Until("the repair", func() error {
			if records := len(n.Status().Flushes); records <= round {
				return fmt.Errorf("%d flush records", records)
			}
			return allIntact(n)
		})
		n.Same(fmt.Sprintf("protected rules, round %d", round), whole, asListed(n))
	}
	n.Want(0, "status")
	d.Stop()
}

// asListed returns nft's list of the protected chains and the jumps into them,
// without counters: chains by name, and their rules in order. On legacy it
// returns the lines of iptables.
func asListed(n *nodetest.Node) []string {
	n.Helper()
	if n.Programs.With == iptables.Legacy {
		var all []string
		for _, f := range rules.Families() {
			for _, table := range protect.Always() {
				ours := false // whether the present rule, which may have begun earlier, is protected
				for line := range strings.Lines(tool(n, f, "-t", string(table), "-S")) {
					if words := strings.Fields(line); strings.HasPrefix(line, "-") && len(words) > 1 {
						ours = n.Protects(words[1]) || n.Protects(words[len(words)-1])
					}
					if ours {
						all = append(all, fmt.Sprint(f, table, line))
					}
				}
			}
		}
		return all
	}
	byChain := map[string][]string{}
	for _, ip := range []string{"ip", "ip6"} {
		for _, table := range protect.Always() {
			out, _ := exec.CommandContext(n.Context(), "nft", "-s", "list", "table", ip, table).CombinedOutput()
			chain := ""
			for line := range strings.Lines(string(out)) {
				if rest, begins := strings.CutPrefix(line, "\tchain "); begins {
					chain = strings.TrimSuffix(rest, " {\n")
				}
				_, target, _ := strings.Cut(strings.TrimSpace(line), "jump ")
				if where := strings.Join([]string{ip, table, chain}, " "); n.Protects(chain) || n.Protects(target) {
					byChain[where] = append(byChain[where], where+line)
				}
				if line == "\t}\n" {
					chain = ""
				}
			}
		}
	}
	var all []string
	for _, where := range slices.Sorted(maps.Keys(byChain)) {
		all = append(all, byChain[where]...)
	}
	return all
}

// allIntact returns an error unless every table of both families is intact, also
// after another look.
func allIntact(n *nodetest.Node) error {
	for _, status := range []func() scenario.Status{n.Status, n.Looked} {
		for f, tables := range status().Families {
			for table, verdict := range tables {
				if verdict != "intact" {
					return fmt.Errorf("%s %s is %s", f, table, verdict)
				}
			}
		}
	}
	return nil
}

// TestANativeRuleOfOthers: an unprotected chain has a native rule. canaryd must
// still restore the emptied chains of that table.
func TestANativeRuleOfOthers(t *testing.T) {
	t.Run("directly", func(t *testing.T) { nodetest.On(t, iptables.NFT, func(n *nodetest.Node) { besideANativeRule(n) }) })
	t.Run("as text", func(t *testing.T) {
		nodetest.On(t, iptables.NFT, func(n *nodetest.Node) { besideANativeRule(n, "--replay=text") })
	})
}

func besideANativeRule(n *nodetest.Node, flags ...string) {
	n.Load()
	whole := n.Protected()
	for _, ip := range []string{"ip", "ip6"} {
		if out, err := exec.CommandContext(n.Context(), "nft", "add", "rule", ip, "filter", "OUTPUT", "ct", "mark", "set", "meta", "mark").CombinedOutput(); err != nil {
			n.Fatalf("nft: %v: %s", err, out)
		}
	}
	d := n.Start(flags...)
	for _, f := range rules.Families() {
		for _, chain := range []string{"FORWARD", "INPUT", "KUBE-FORWARD", "KUBE-FIREWALL"} {
			tool(n, f, "-F", chain)
		}
	}
	n.Healed(1)
	for _, ip := range []string{"ip", "ip6"} {
		list, err := exec.CommandContext(n.Context(), "nft", "-a", "list", "chain", ip, "filter", "OUTPUT").Output()
		n.Must(err)
		line := slices.IndexFunc(strings.Split(string(list), "\n"), func(l string) bool { return strings.Contains(l, "ct mark set") })
		if line < 0 {
			n.Fatalf("the native rule is gone:\n%s", list)
		}
		_, handle, _ := strings.Cut(strings.Split(string(list), "\n")[line], "# handle ")
		n.Must(exec.CommandContext(n.Context(), "nft", "delete", "rule", ip, "filter", "OUTPUT", "handle", handle).Run())
	}
	n.Same("protected rules", whole, n.Protected())
	d.Stop()
}
