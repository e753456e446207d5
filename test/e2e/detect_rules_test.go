package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// strangers are rules of many nodes that no preset of auto names. They are PostUp
// of wg-quick, kube2iam's DNAT, Docker's port of a loopback address, a blocklist
// and a person's own. ufw itself writes its rules again. auto guards fail2ban's,
// with the chain to which they lead.
var strangers = []string{
	"-t filter -A FORWARD -i wg0 -j ACCEPT",
	"-t filter -A FORWARD -o wg0 -j ACCEPT",
	"-t nat -A POSTROUTING -s 10.66.66.0/24 -o eth0 -j MASQUERADE",
	"-t nat -A PREROUTING -d 169.254.169.254/32 -i cali+ -p tcp -m tcp --dport 80 -j DNAT --to-destination 192.0.2.10:8181",
	"-t raw -A PREROUTING -d 127.0.0.1/32 ! -i lo -p tcp -m tcp --dport 8080 -j DROP",
	"-t mangle -A OUTPUT -p tcp -m multiport --dports 22,80 -j ACCEPT",
	"-N ufw-before-input", "-A INPUT -j ufw-before-input", "-A ufw-before-input -i lo -j ACCEPT",
	"-N f2b-sshd", "-N corp-ban", "-A INPUT -p tcp -m tcp --dport 22 -j f2b-sshd", "-A f2b-sshd -s 198.51.100.7/32 -j corp-ban", "-A corp-ban -s 198.51.100.0/24 -j DROP",
	"-N mine", "-A INPUT -j mine", "-A mine -p udp -j ACCEPT",
	"-A INPUT -j corp-ban",
	"-A INPUT -p tcp -m tcp --dport 443 -m comment --comment my,shop -j ACCEPT",
}

// TestDetectNamesRules: detect lists each unguarded chain and rule, with its
// owner and a word. The status counts the same. With the words all of these must
// come back after a flush. Then detect may only list a firewall manager's chain,
// whose rules stay lost.
func TestDetectNamesRules(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Families = []rules.Family{rules.IPv4}
		for _, s := range strangers {
			tool(n, rules.IPv4, strings.Fields(s)...)
		}
		for i := range 8 {
			tool(n, rules.IPv4, "-A", "INPUT", "-s", fmt.Sprintf("203.0.113.%d/32", i), "-j", "DROP")
		}
		const bound = "--ip-family=ipv4"
		stdout, _ := n.Want(0, "detect", bound)
		golden.Compare(n.T, "detect-rules-"+string(n.Programs.With)+".golden", []byte(stdout))
		alone := detect(n, bound)
		before := ofOthers(n)

		d := n.Start(bound)
		var status api.Status
		n.Until("the status to count the rules of others", func() error { // after canaryd is ready
			stdout, _ = n.Want(0, "status", "-o", "json")
			if status = (api.Status{}); json.Unmarshal([]byte(stdout), &status) != nil || status.Unguarded == nil {
				return errors.New("it does not")
			}
			return nil
		})
		if len(status.LedTo) != 1 {
			n.Fatalf("chains that protected rules lead to: %+v", status.LedTo)
		}
		status.Unguarded.Names = nil
		for who, counts := range map[string]api.Unguarded{"the status": *status.Unguarded, "detect next to a daemon": detect(n, bound).NotGuarded} {
			if diff := cmp.Diff(alone.NotGuarded, counts); diff != "" {
				n.Errorf("%s counts other rules (-detect without a daemon +now):\n%s", who, diff)
			}
		}
		d.Stop()

		words := []string{protect.Auto}
		for _, u := range slices.Concat(alone.Unguarded, alone.UnguardedRules) {
			if u.Manager == "" && !slices.Contains(words, u.Word) {
				words = append(words, u.Word)
			}
		}
		d = n.Start(bound, "--protect="+strings.Join(words, ",")) // as detect prints them
		left := detect(n, bound)
		if len(left.UnguardedRules) > 0 || len(left.Unguarded) != 1 || left.Unguarded[0].Manager != "ufw" || !cmp.Equal(left.NotGuarded, api.Unguarded{}) {
			n.Errorf("with %q there are left %+v", words, left)
		}
		n.Renewed()
		for _, table := range protect.Tables()[:4] {
			n.Must(n.Programs.Flush(n.Context(), rules.IPv4, table, ""))
		}
		n.Healed(1)
		want := slices.DeleteFunc(before, func(line string) bool { return strings.Contains(line, "ufw-") })
		n.Same("rules after a flush", want, ofOthers(n))
		d.Stop()
	})
}

// ofOthers returns all rules but canaryd's marks, by table and chain and in their order.
func ofOthers(n *nodetest.Node) (lines []string) {
	n.Helper()
	set := n.Save()[rules.IPv4]
	for _, t := range protect.Tables() {
		var chains [][]string
		for _, c := range tableChains(set[t]) {
			var list []string
			for _, r := range c.Rules {
				if !canary.IsMark(r) {
					list = append(list, fmt.Sprint(t, " ", c.Name, " ", r.Spec))
				}
			}
			chains = append(chains, list)
		}
		slices.SortFunc(chains, slices.Compare)
		lines = append(lines, slices.Concat(chains...)...)
	}
	return lines
}

func tableChains(t *rules.Table) []rules.Chain {
	if t == nil {
		return nil
	}
	return t.Chains
}
