package owners

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// postUp, postDown and metadata are commands of wg-quick's PostUp and PostDown, as its users write
// them, and of kube2iam.
var (
	postUp = []string{
		"iptables -A FORWARD -i wg0 -j ACCEPT", "iptables -I FORWARD 1 -o wg0 -m state --state ESTABLISHED -j ACCEPT",
		"iptables -t nat -A POSTROUTING -s 10.66.66.0/24 -o eth0 -j MASQUERADE",
		"iptables -t mangle -A FORWARD -o wg0 -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu",
	}
	postDown = []string{
		"iptables -D FORWARD -i wg0 -j ACCEPT", "iptables -D FORWARD -o wg0 -m state --state ESTABLISHED -j ACCEPT",
		"iptables -t nat -D POSTROUTING -s 10.66.66.0/24 -o eth0 -j MASQUERADE",
		"iptables -t mangle -D FORWARD -o wg0 -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu",
	}
	metadata = "iptables -t nat -A PREROUTING -i cali+ -p tcp -d 169.254.169.254 --dport 80 -j DNAT --to-destination 192.0.2.10:8181"
	microk8s = "iptables -t filter -A FORWARD -s 10.1.0.0/16 -m comment --comment 'generated, for MicroK8s pods' -j ACCEPT"
)

// TestRulesOfBuiltInChainsThatAWordNames: wg-quick, kube2iam and MicroK8s write
// rules. After a flush of each kind they must be back, once and in their places
// among rules of others. wg-quick's PostDown is obeyed, and after its PostUp each
// rule exists once.
func TestRulesOfBuiltInChainsThatAWordNames(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Families = []rules.Family{rules.IPv4}
		sh := func(commands ...string) {
			n.Helper()
			for _, c := range commands {
				nstest.Command(n.T, "sh", "-c", strings.Replace(c, "iptables", program(n, rules.IPv4, "")+" -w 5", 1))
			}
		}
		n.Load()
		sh("iptables -A FORWARD -i eth9 -j DROP")
		sh(postUp...)
		sh(metadata, microk8s, "iptables -A FORWARD -i eth8 -j DROP", "iptables -N MY-WG", "iptables -A MY-WG -j RETURN", "iptables -A FORWARD -i wg9 -j MY-WG")
		words := []string{
			"kube", "cni", "rule:filter:FORWARD:*wg?*", "rule:nat:POSTROUTING:-s 10.66.66.0/24 *", "rule:mangle:FORWARD:-o wg0 *--clamp-mss-to-pmtu",
			"rule:nat:PREROUTING:*169.254.169.254/32*--to-destination 192.0.2.10:8181", "rule:filter:FORWARD:generated, for MicroK8s pods",
		}
		selector := selectorOf(n, words...)
		named := func() []string {
			n.Helper()
			var list []string
			for table, set := range n.Save()[rules.IPv4] {
				for _, j := range selector.Protection().Extract(set, canary.IsMark).Jumps {
					list = append(list, fmt.Sprint(table, " ", j))
				}
			}
			slices.Sort(list)
			return list
		}
		order := func() []string { // of FORWARD, without the rules that the saved file lacks
			n.Helper()
			var list []string
			for _, r := range n.Save()[rules.IPv4][rules.Filter].Rules("FORWARD") {
				if strings.Contains(r.Spec, "wg0") || strings.Contains(r.Spec, "eth") && !strings.Contains(r.Spec, "tun0") || strings.Contains(r.Spec, "MicroK8s") || strings.Contains(r.Spec, "KUBE-") {
					list = append(list, r.Spec)
				}
			}
			return list
		}
		before := named()
		if got := strings.Count(strings.Join(before, "\n"), "wg0"); got != 3 || len(before) < 6 {
			n.Fatalf("the words name %q", before)
		}
		d := n.Start("--ip-family=ipv4", "--protect="+protect.Join(words))
		d.WantLog("Rules that --protect names are NOT guarded", "-A FORWARD -i wg9 -j MY-WG")
		if stdout, _ := n.Want(0, "status"); !strings.Contains(stdout, "NOT guarded: ipv4 filter: rules of FORWARD that lead to MY-WG") {
			n.Errorf("status does not say which rule is not guarded:\n%s", stdout)
		}
		testkit.Pass(n.T, time.Second, "that marks of a new generation are renewed")
		inOrder := order()

		records := 0
		flushed := func(what string, do func()) {
			n.Helper()
			do()
			records++
			n.Healed(records)
			n.Same("rules that words name, after "+what, before, named())
		}
		flushed("a flush", n.Flush)
		flushed("a flush of FORWARD", func() { sh("iptables -F FORWARD") })
		flushed("-F and -X", func() { flush(n, true) })
		if n.Programs.With == iptables.NFT {
			flushed("nft flush ruleset", func() { n.Must(n.Programs.FlushRuleset(n.Context())) })
		}
		n.Must(n.Programs.Restore(n.Context(), rules.IPv4, "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -i eth9 -j DROP\n-A FORWARD -i eth8 -j DROP\nCOMMIT\n"))
		records++
		n.Healed(records)
		n.Same("rules that words name, after a saved file", before, named())
		n.Same("the order of FORWARD", inOrder, order())

		sh(postDown...)
		n.Until("the removal to be learned", func() error {
			if s := n.Status(); !s.LearningPendingSince.IsZero() {
				return fmt.Errorf("something is pending since %s", s.LearningPendingSince)
			}
			return nil
		})
		gone := named()
		if text := strings.Join(gone, "\n"); strings.Contains(text, "wg0") || len(gone) != len(before)-4 {
			n.Errorf("behind PostDown there are %q", gone)
		}
		n.Flush()
		records++
		n.Healed(records)
		n.Same("rules that words name, after PostDown and a flush", gone, named())
		sh(postUp...)
		testkit.Pass(n.T, time.Second, "that rules which are new are learned")
		n.Learned()
		n.Same("rules that words name, after PostUp", before, named())
	})
}
