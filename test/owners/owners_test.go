// Package owners tries the built canaryd on nodes with working owners of rules:
// CNI plugins, kube-proxy, Docker and others. Rules that they wrote once must
// come back after a flush.
//
// Events that only look like a flush have a story each (TestNeverAFalseFlush), on
// the real kernel. The test counts canaryd's reactions. A false flush is a
// superfluous replay: it brings back rules that their owner has given up.
package owners

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

func selectorOf(n *nodetest.Node, words ...string) protect.Selector {
	n.Helper()
	selector, err := protect.NewSelector(words)
	n.Must(err)
	return selector
}

// protects makes the node's canaryd protect the words of list.
func protects(n *nodetest.Node, list ...string) (flag string) {
	n.Helper()
	s, err := protect.NewSelector(list)
	n.Must(err)
	n.Protects = s.Protects
	return "--protect=" + strings.Join(list, ",")
}

// flush executes iptables -F, and with chains also -X, in every table.
func flush(n *nodetest.Node, chains bool) {
	n.Helper()
	n.Flush()
	if !chains {
		return
	}
	for _, f := range n.Families {
		for _, t := range protect.Always() {
			_ = n.Programs.DeleteChains(n.Context(), f, t) // refused if canaryd was faster
		}
	}
}

// TestOwners: the rules of Docker, podman, libvirt and tailscaled must be back
// after a flush, in built-in chains at their places. A network that Docker
// deletes must stay deleted.
func TestOwners(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		list := append([]string{"kube", "cni"}, scenario.Owners()...)
		n.Must(scenario.LoadOwners(n.Context(), n.Programs, n.Families...))
		flag := protects(n, list...)
		s, err := protect.NewSelector(list)
		n.Must(err)
		before := map[rules.Family]rules.Ruleset{}
		keep := func() {
			for f, set := range n.Save() {
				before[f] = set
			}
		}
		keep()
		n.Start(flag)
		back := func(what string) {
			n.Helper()
			for f, set := range n.Save() {
				want := scenario.Want{Protected: before[f], Foreign: set, Protects: s.Protects, MatchesPreset: s.MatchesPreset}
				for _, line := range scenario.Compare(want, set) {
					n.Errorf("%s: %s %s", what, f, line)
				}
			}
		}
		for i, chains := range []bool{false, true} {
			flush(n, chains)
			n.Healed(i + 1)
			back("after a flush")
		}
		const bridge = "br-4f5a6b7c8d9e"
		for f, set := range n.Save() { // docker network rm
			for t, table := range set {
				for _, c := range table.Chains {
					for _, r := range c.Rules {
						if strings.Contains(r.Spec, bridge) {
							n.Must(n.Programs.RestoreNoflush(n.Context(), f, "*"+string(t)+"\n-D "+c.Name+" "+r.Spec+"\nCOMMIT\n"))
						}
					}
				}
			}
		}
		n.Until("the removal to be learned", func() error {
			if !n.Status().LearningPendingSince.IsZero() {
				return errors.New("something is not captured yet")
			}
			return nil
		})
		keep()
		flush(n, false)
		n.Healed(3)
		back("after a flush without the network")
		if saved, err := n.Programs.Save(n.Context(), rules.IPv4); err != nil || strings.Contains(saved, bridge) {
			n.Errorf("the deleted network is back: %v\n%s", err, saved)
		}
	})
}

const ipvs = `*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-SERVICES -m comment --comment "Kubernetes service cluster ip" -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
-A INPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL -m conntrack --ctstate INVALID -m nfacct --nfacct-name canaryd_test -j DROP
-A KUBE-FIREWALL -m set --match-set nobody-keeps src -j DROP
-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
COMMIT
`

// TestSets: a flusher deletes rules and ipsets. canaryd must restore both,
// including the members. It names a rule whose set cannot be made, and the DROP
// behind it waits for that rule.
func TestSets(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Families = []rules.Family{rules.IPv4}
		ipset := func(args ...string) string {
			n.Helper()
			out, err := exec.CommandContext(n.Context(), "ipset", args...).CombinedOutput()
			if err != nil {
				n.Fatalf("ipset %q: %v: %s", args, err, out)
			}
			return string(out)
		}
		ipset("create", "KUBE-CLUSTER-IP", "hash:ip,port", "comment")
		ipset("add", "KUBE-CLUSTER-IP", "10.96.0.1,tcp:443", "comment", "default/kubernetes:https")
		ipset("create", "nobody-keeps", "hash:ip", "comment")
		ipset("add", "nobody-keeps", "192.0.2.1", "comment", "a\nnewline")
		n.Must(iptables.NewSets().Account(n.Context(), "canaryd_test"))
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, ipvs))
		before, members := n.Protected(), ipset("save", "KUBE-CLUSTER-IP")
		p := n.Start("--ip-family=ipv4")
		n.Until("the sets to be captured", func() error {
			text, err := os.ReadFile("/run/state/sets.json")
			if err == nil && !strings.Contains(string(text), "10.96.0.1,tcp:443") {
				err = errors.New(string(text))
			}
			if err == nil && !strings.Contains(p.Log(), "nobody-keeps") { // it is logged after the file
				err = errors.New("the log names no set that is not kept")
			}
			return err
		})
		p.WantLog("Some ipsets that protected rules name are not stored", "nobody-keeps")
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Nat, ""))
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Filter, ""))
		// Meanwhile canaryd may have put back a rule that names the set.
		_ = exec.CommandContext(n.Context(), "ipset", "destroy", "KUBE-CLUSTER-IP").Run()
		n.Healed(1)
		// If a set is deleted between canaryd's look and its restore, its rule
		// spends one round in quarantine.
		n.Until("every rule to be back", func() error {
			if after := n.Protected(); len(after) != len(before) {
				return errors.New(strings.Join(after, "\n"))
			}
			return nil
		})
		n.Same("after a flush", before, n.Protected())

		p.Stop() // so that sets can be destroyed before the next look
		for _, table := range []rules.TableName{rules.Nat, rules.Filter} {
			n.Must(n.Programs.Flush(n.Context(), rules.IPv4, table, ""))
		}
		ipset("destroy", "KUBE-CLUSTER-IP")
		ipset("destroy", "nobody-keeps")
		p = n.Launch("--ip-family=ipv4") // it does not become ready
		n.Until("the rules to be back", func() error {
			if after := n.Protected(); len(after) != len(before)-2 {
				return errors.New(strings.Join(after, "\n"))
			}
			return nil
		})
		n.PartlyHealed(1)
		if got := ipset("save", "KUBE-CLUSTER-IP"); got != members {
			n.Errorf("the set came back as\n%s\nwas\n%s", got, members)
		}
		p.WantLog("A part of a table is in quarantine", "nobody-keeps")
		if metrics := n.Get("/metrics"); !strings.Contains(metrics, `canaryd_quarantined_rules{family="ipv4",table="filter"} 2`) {
			n.Error("the gauge does not show the rule in quarantine, and the rule that waits")
		}
		stdout, _ := n.Want(1, "status")
		for _, line := range []string{
			`quarantined: ipv4 filter: rule KUBE-FIREWALL -m set --match-set nobody-keeps src -j DROP (ipset nobody-keeps is missing`,
			`waiting: ipv4 filter KUBE-FIREWALL: 1 rule waits behind "-m set --match-set nobody-keeps src -j DROP" of KUBE-FIREWALL, which cannot be put back`,
		} {
			if !strings.Contains(stdout, line) {
				n.Errorf("status lacks %q:\n%s", line, stdout)
			}
		}
		ipset("create", "nobody-keeps", "hash:ip") // by its owner
		n.Until("the last rule to come back", func() error {
			if after := n.Protected(); len(after) != len(before) {
				return errors.New(strings.Join(after, "\n"))
			}
			return nil
		})
		n.Same("at the end", before, n.Protected())
	})
}
