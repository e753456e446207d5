package e2e

import (
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// generations returns the IDs that status lists for kube-proxy's native table, the newest first.
func generations(n *nodetest.Node) (ids []string) {
	n.Helper()
	stdout, _ := n.Want(0, "status")
	for _, row := range regexp.MustCompile(`(?m)^ip kube-proxy  +([0-9a-f]{12})  .*$`).FindAllStringSubmatch(stdout, -1) {
		ids = append(ids, row[1])
	}
	return ids
}

// afterHeading returns a rendered generation without the line that has its time.
func afterHeading(text string) string {
	_, rest, _ := strings.Cut(text, "\n")
	return rest
}

// TestNativeGenerations: an owner's update breaks chains of a native table. An
// earlier generation can be shown and restored, through the daemon and without
// one.
func TestNativeGenerations(t *testing.T) {
	onNative(t, func(n *nodetest.Node) {
		d := n.Start(guardNative)
		want := listed(n)
		n.Until("the first generation", func() error {
			if len(generations(n)) != 1 {
				return errors.New("it is not stored")
			}
			return nil
		})
		first := generations(n)[0]
		nstest.CommandInput(n.T, `flush chain ip kube-proxy services
add rule ip kube-proxy services ip daddr 172.30.0.1 tcp dport 443 drop
add element ip kube-proxy cluster-ips { 172.30.99.99 }
`, "nft", "-f", "-") // in one commit: its owner's decision
		n.Until("the second generation", func() error {
			if len(generations(n)) != 2 {
				return errors.New("it is not stored")
			}
			return nil
		})
		broken := listed(n)

		rendered, _ := n.Want(0, "render", "--generation="+first)
		for _, part := range []string{"# generation " + first + " of table ip kube-proxy, learned ", "\nchain nat-prerouting type nat hook prerouting priority -100 policy accept\n",
			"\nelement cluster-ips 172.30.0.", "\nrule services "} {
			if !strings.Contains(rendered, part) {
				n.Errorf("canaryd render does not print %q:\n%.3000s", part, rendered)
			}
		}
		if stdout, _ := n.Want(0, "restore", "--generation="+first, "--dry-run"); !strings.Contains(stdout, "\n-element cluster-ips 172.30.99.99\n") || listed(n) != broken {
			n.Errorf("a dry run prints\n%s", stdout)
		}
		if _, stderr := n.Want(2, "restore", "--generation="+first); !strings.Contains(stderr, "it would remove 1 protected rule, 0 chains and 1 element; --dry-run shows them") || listed(n) != broken {
			n.Errorf("without --yes it says\n%s", stderr)
		}
		stdout, _ := n.Want(0, "restore", "--generation="+first, "--yes")
		if !strings.Contains(stdout, "proved") {
			n.Errorf("canaryd restore prints\n%s", stdout)
		}
		undo := regexp.MustCompile(`canaryd restore --generation ([0-9a-f]{12})`).FindStringSubmatch(stdout)
		if got := listed(n); got != want || undo == nil {
			n.Fatalf("the table is\n%.3000s\nand the reply\n%s", got, stdout)
		}
		if stdout, _ := n.Want(0, "status", "--flush", "1"); !strings.Contains(stdout, "-element cluster-ips 172.30.99.99") || !strings.Contains(stdout, "canaryd restore --generation "+first) {
			n.Errorf("the record of what was removed says\n%s", stdout)
		}

		d.Stop()
		nstest.Command(n.T, "nft", "flush", "ruleset")
		n.Want(0, "restore")
		if listed(n) != want {
			n.Errorf("without a daemon a flush is not undone")
		}
		if stdout, _ := n.Want(0, "render", "--generation="+first); afterHeading(stdout) != afterHeading(rendered) {
			n.Errorf("without a daemon canaryd render prints\n%.3000s", stdout)
		}
		n.Want(2, "restore", "--generation="+undo[1])
		n.Want(0, "restore", "--generation="+undo[1], "--yes")
		if got := listed(n); got != broken {
			n.Errorf("without a daemon the table is\n%.3000s", got)
		}
	})
}
