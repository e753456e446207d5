package limits

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// comments returns comment matches with that number of characters, the blank before each
// included.
func comments(size int) (words []string) {
	const frame, most = len(" -m comment --comment "), 255
	for left := size; left > 0; {
		n := min(left-frame, most)
		if rest := left - frame - n; 0 < rest && rest <= frame {
			n -= frame // leaves room for another comment
		}
		words = append(words, "-m", "comment", "--comment", strings.Repeat("x", n))
		left -= frame + n
	}
	return words
}

// TestLongestRules: canaryd restores a rule of the greatest length that iptables-restore reads
// after a flush. It restores longer rules by their bytes, and no other rule is affected.
func TestLongestRules(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		specs := map[string]int{"the longest": rules.MaxSpec, "one more": rules.MaxSpec + 1, "much more": 24_000}
		d := n.Start()
		rulesBefore := n.Status().Generation.Rules
		for name, size := range specs {
			words := append(comments(size-len(" -j RETURN")+1), "-j", "RETURN")
			if got := len(strings.Join(words, " ")); got != size {
				n.Fatalf("%s: %d characters, want %d", name, got, size)
			}
			if out, err := exec.CommandContext(n.Context(), program(n, rules.IPv4, ""), append([]string{"-w", "5", "-A", "KUBE-FIREWALL"}, words...)...).CombinedOutput(); err != nil {
				n.Fatalf("%s: %v: %.200s", name, err, out)
			}
		}
		n.Until("the rules to be known", func() error {
			text, _ := n.Want(0, "status")
			if strings.Contains(text, "not put back if it is lost") || n.Status().Generation.Rules != rulesBefore+3 {
				return fmt.Errorf("not all rules are put back:\n%s", text)
			}
			return nil
		})
		n.Flush()
		n.Healed(1)
		left := map[int]int{}
		for line := range strings.Lines(saved(n, rules.Filter)) {
			if spec, ok := strings.CutPrefix(strings.TrimSpace(line), "-A KUBE-FIREWALL "); ok && len(spec) > 5000 {
				left[len(spec)]++
			}
		}
		if len(left) != 3 || left[rules.MaxSpec] != 1 {
			n.Errorf("long rules that stand, by their length: %v, want one of each of %v", left, specs)
		}
		n.Logf("ipv6 nat was back %s after its flush", othersAreRepaired(n).Round(time.Millisecond))
		d.Stop()
	})
}

// TestNames: chains have the longest names of iptables, or names that only nft can make, and a
// glob protects them. canaryd restores all names that iptables takes, also after a restart.
// Another name affects only its own chain.
func TestNames(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		good := []string{"CORP-" + strings.Repeat("x", 23), "CORP-%s%n", "CORP-;reboot", "CORP-$(reboot)", "CORP-`reboot`", "CORP-'", "CORP-\\n", "CORP-*", "CORP-<b>", "CORP-a:b", "CORP-=#"}
		text := "*nat\n"
		for _, name := range good {
			text += ":" + name + " - [0:0]\n"
		}
		for _, name := range good {
			text += "-A " + name + " -d 192.0.2.7/32 -j ACCEPT\n"
		}
		n.Must(write(n, text+"COMMIT\n"))
		if err := write(n, "*nat\n:CORP-"+strings.Repeat("x", 24)+" - [0:0]\nCOMMIT\n"); err == nil {
			n.Error("iptables takes a name of 29 characters")
		}
		if onNFT(n) {
			for _, name := range []string{"CORP-" + strings.Repeat("x", 24), "CORP-" + strings.Repeat("x", 120)} {
				for _, words := range [][]string{{"add", "chain", "ip", "nat", name}, {"add", "rule", "ip", "nat", name, "accept"}} {
					if out, err := exec.CommandContext(n.Context(), "nft", words...).CombinedOutput(); err != nil {
						n.Fatalf("nft %q: %v: %s", words, err, out)
					}
				}
			}
		}
		for round := range 2 { // the second run continues from disk
			d := n.Launch("--protect=kube,cni,CORP-*")
			n.Until("canaryd to be ready", nodetest.Ready)
			n.Flush()
			n.Healed(1)
			now := saved(n, rules.Nat)
			for _, name := range good {
				if !strings.Contains(now, "-A "+name+" -d 192.0.2.7/32 -j ACCEPT\n") {
					n.Errorf("round %d: the rule of %q is not back:\n%s", round, name, now)
				}
			}
			n.Logf("ipv6 nat was back %s after its flush", othersAreRepaired(n).Round(time.Millisecond))
			d.Stop()
			if log := d.Log(); strings.Contains(log, "is not used") || round == 1 && !strings.Contains(log, "Took up the stored generation") {
				n.Errorf("round %d:\n%s", round, log)
			}
		}
	})
}
