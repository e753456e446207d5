package iptables

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// chainBytes returns the rules of a chain as the kernel holds them, in hexadecimal.
func chainBytes(t *testing.T, conn *nft.Conn, family rules.Family, table, chain string) []string {
	t.Helper()
	var list []string
	err := conn.EachRule(family, table, chain, func(m nft.RuleMessage) error {
		list = append(list, fmt.Sprintf("%x/%x", m.Rule.Expressions, m.Rule.Userdata))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// replayOf returns the script that makes a user's chain with these rules.
func replayOf(table rules.TableName, chain string, list []rules.Rule) Script {
	script := Script{Table: table, Declare: []string{chain}}
	for _, r := range list {
		script.Steps = append(script.Steps, Step{Verb: Append, Chain: chain, Rule: r})
	}
	return script
}

// restoreOnce writes scripts in one guarded session and returns its result.
func restoreOnce(t *testing.T, k *Kernel, family rules.Family, scripts ...Script) Written {
	t.Helper()
	s := begin(t, k)
	mustRead(t, s, family)
	w := s.Restore(t.Context(), Payload{family: scripts})[family]
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return w
}

// restoreAll is restoreOnce that must succeed.
func restoreAll(t *testing.T, k *Kernel, family rules.Family, scripts ...Script) Written {
	t.Helper()
	w := restoreOnce(t, k, family, scripts...)
	if w.Err != nil || w.Raced {
		t.Fatalf("raced %t: %v", w.Raced, w.Err)
	}
	return w
}

// A process that never read the rules, as after a restart, writes rules of two
// kinds next to each other. Some have only bytes, others only a text, such as a
// rule that names an ipset. It leaves no chain of its own behind.
func TestBytesAndTextsGoTogether(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		conn, inet := dialTest(t), map[rules.Family]string{rules.IPv4: "inet", rules.IPv6: "inet6"}[family]
		nstest.Command(t, "ipset", "create", "mine", "hash:ip", "family", inet)
		for _, line := range []string{"-N MINE", "-N GOAL", "-A MINE -p tcp --dport 80 -j GOAL", "-A MINE -m set --match-set mine src -j DROP", "-A MINE -p udp -j ACCEPT", "-A GOAL -p tcp -g MINE"} {
			iptablesCommand(t, NFT, family, line)
		}
		addOdd(t, NFT, family, "MINE", []string{"-i", "a -h", "-j", "GOAL"})
		addOdd(t, NFT, family, "GOAL", []string{"-m", "comment", "--comment", "x\ny", "-j", "DROP"})
		before := append(chainBytes(t, conn, family, "filter", "MINE"), chainBytes(t, conn, family, "filter", "GOAL")...)
		first := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		want := mustRead(t, first, family).Tables[rules.Filter]
		for _, line := range []string{"-F", "-X"} {
			iptablesCommand(t, NFT, family, line)
		}
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		script := replayOf(rules.Filter, "MINE", want.Rules("MINE"))
		goal := replayOf(rules.Filter, "GOAL", want.Rules("GOAL"))
		script.Declare, script.Steps = append(script.Declare, goal.Declare...), append(script.Steps, goal.Steps...)
		restoreAll(t, k, family, script)
		after := append(chainBytes(t, conn, family, "filter", "MINE"), chainBytes(t, conn, family, "filter", "GOAL")...)
		if diff := cmp.Diff(before, after); diff != "" {
			t.Errorf("(-before +after):\n%s", diff)
		}
		again := mustRead(t, k, family).Tables[rules.Filter]
		for _, chain := range []string{"MINE", "GOAL"} {
			if !rules.EqualRules(again.Rules(chain), want.Rules(chain)) {
				t.Errorf("%s is read as (-want +got):\n%s", chain, cmp.Diff(want.Rules(chain), again.Rules(chain)))
			}
		}
		if again.Chain(TextChain) != nil || again.Chain(TrialTarget) != nil {
			t.Error("a chain of texts is left")
		}
		restoreAll(t, k, family, script) // the genid that the session knows is still right
	})
}

// nft writes the loopback interface by its number. The replay of such a rule does
// not change it.
func TestTheLoopbackByItsNumber(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		conn := dialTest(t)
		iptablesCommand(t, NFT, family, "-N MINE")
		iptablesCommand(t, NFT, family, "-A MINE -i lo -j ACCEPT")
		nft := map[rules.Family]string{rules.IPv4: "ip", rules.IPv6: "ip6"}[family]
		for _, rule := range []string{`iif lo counter drop`, `oif lo counter return`} {
			nstest.Command(t, "nft", "add rule "+nft+" filter MINE "+rule)
		}
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		before, want := chainBytes(t, conn, family, "filter", "MINE"), mustRead(t, k, family).Tables[rules.Filter].Rules("MINE")
		var targets []string
		for _, r := range want {
			targets = append(targets, r.Target)
		}
		if diff := cmp.Diff([]string{"ACCEPT", "DROP", "RETURN"}, targets); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		iptablesCommand(t, NFT, family, "-F MINE")
		restoreAll(t, k, family, replayOf(rules.Filter, "MINE", want))
		if diff := cmp.Diff(before, chainBytes(t, conn, family, "filter", "MINE")); diff != "" {
			t.Errorf("(-before +after):\n%s", diff)
		}
	})
}

// Because of one native rule in a built-in chain iptables prints nothing of the
// chain. The replay still restores the jumps next to it, the first by its bytes
// alone.
func TestJumpsNextToANativeRuleComeBack(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		conn := dialTest(t)
		for _, line := range []string{
			"-N KUBE-SERVICES", "-N KUBE-FORWARD", "-A KUBE-SERVICES -p tcp -j RETURN",
			"-A FORWARD -m cpu --cpu 0 -m comment --comment one -j KUBE-FORWARD", "-A FORWARD -m comment --comment both -j KUBE-SERVICES", "-A OUTPUT -m comment --comment both -j KUBE-SERVICES",
		} {
			iptablesCommand(t, NFT, family, line)
		}
		nft := map[rules.Family]string{rules.IPv4: "ip", rules.IPv6: "ip6"}[family]
		nstest.Command(t, "nft", "add rule "+nft+" filter FORWARD ct mark != 0 meta mark set ct mark")
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		before, want := chainBytes(t, conn, family, "filter", "FORWARD"), mustRead(t, k, family).Tables[rules.Filter].Rules("FORWARD")
		if _, opaque := want[0].Opaque(); !opaque || want[1].Spec != "-m comment --comment both -j KUBE-SERVICES" {
			t.Errorf("FORWARD is %v", want)
		}
		iptablesCommand(t, NFT, family, "-F FORWARD")
		jumps := Script{Table: rules.Filter}
		for _, r := range want[:2] {
			jumps.Steps = append(jumps.Steps, Step{Verb: Append, Chain: "FORWARD", Rule: r})
		}
		restoreAll(t, k, family, jumps)
		if diff := cmp.Diff(before[:2], chainBytes(t, conn, family, "filter", "FORWARD")); diff != "" {
			t.Errorf("(-before +after):\n%s", diff)
		}
		if diff := cmp.Diff(want[:2], mustRead(t, k, family).Tables[rules.Filter].Rules("FORWARD")); diff != "" {
			t.Errorf("read again (-want +got):\n%s", diff)
		}
	})
}
