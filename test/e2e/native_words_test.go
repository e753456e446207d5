package e2e

import (
	"errors"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestNativeNodeIsShownInItsWords: on a node with kube-proxy in nftables mode,
// all output counts the contents and losses of native tables. Status, check,
// records, page and log must not begin with the empty tables of iptables.
func TestNativeNodeIsShownInItsWords(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "nft")
		n.LoadNative(100)
		want := listed(n)
		d := n.Launch()
		says := func(what, text string, parts ...string) {
			n.Helper()
			for _, part := range parts {
				no, isNo := strings.CutPrefix(part, "not ")
				if isNo && strings.Contains(text, no) || !isNo && !strings.Contains(text, part) {
					n.Errorf("%s: want %q in\n%s", what, part, text)
				}
			}
		}
		const guards = "189 rules, 141 chains and 221 elements of native tables"
		n.Until("canaryd to guard kube-proxy's table", func() error {
			if _, stdout, _ := n.Canaryd("status"); !strings.Contains(stdout, guards) {
				return errors.New(stdout)
			}
			return nodetest.Ready()
		})
		status, _ := n.Want(0, "status")
		says("status", status, "healthy\nmode heal, guarding "+guards+"\nbackend nft ", "iptables' 6 tables are intact and hold no protected rule",
			"not 0 rules", "not neither", "not FAMILY")
		check, _ := n.Want(0, "check")
		says("check", check, "iptables' 6 tables are intact and hold no protected rule", "not FAMILY")
		says("page", n.Get("/"), guards+" are in force.", "iptables&#39; 6 tables are intact and hold no protected rule", "not 0 rules", "not id=\"family-")

		for i, flush := range []struct {
			nft, lost, log, diff string
		}{
			{"flush map ip kube-proxy service-ips", "102 elements", "rules=0 chains=0 jumps=0 elements=102", "\n-element service-ips 172.30."},
			{"flush chain ip kube-proxy nat-prerouting", "1 rule", "rules=1 chains=0 jumps=0 elements=0", "\n-rule nat-prerouting jump services\n"},
			{"flush ruleset", "189 rules, 141 chains, 221 elements", "rules=189 chains=141 jumps=0 elements=221", "\n-map service-ips { type ipv4_addr . inet_proto . inet_service : verdict; }\n"},
		} {
			nstest.CommandInput(n.T, flush.nft+"\n", "nft", "-f", "-")
			wantNative(n, want, i+1)
			status, _ := n.Want(0, "status")
			says("status after "+flush.nft, status, "  ip kube-proxy  "+flush.lost+" ", "not jumps", "not 0 ")
			record, _ := n.Want(0, "status", "--flush", "1")
			says("record after "+flush.nft, record, "\nlost "+flush.lost+"\n", "@@ ip kube-proxy @@", "not jumps", "not ipv4 nat", "not lost 0 ", flush.diff)
			says("page after "+flush.nft, n.Get("/"), strings.Split(flush.lost, ",")[0], "not 0 rules", "not 0 jumps")
			d.WantLog("Rules were lost", flush.log)
		}
		if now := n.Metrics(); now[`flushes_total{family="ip",kind="table_deleted",table="ip kube-proxy"}`] != 1 || now[`native_table_in_force{family="ip",table="ip kube-proxy"}`] != 1 {
			n.Errorf("the metrics say %v", now)
		}
		nstest.Command(n.T, "nft", "delete", "table", "ip", "kube-proxy") // no other table
		n.Until("a report", func() error { return unready("table ip kube-proxy is deleted_by_owner_or_unknown") })
		n.Want(1, "check")
		preview, _ := n.Want(0, "restore", "--dry-run")
		says("restore --dry-run", preview, "ip kube-proxy  141 chains, 189 rules, ")
		if listed(n) != "" {
			n.Errorf("a table that was deleted alone is back unasked")
		}
		restored, _ := n.Want(0, "restore")
		says("restore", restored, "proved")
		wantNative(n, want, 4)
		d.Stop()
		check, _ = n.Want(0, "check")
		says("check without a daemon", check, "ip kube-proxy  intact", "iptables' 6 tables are intact and hold no protected rule")
	})
}
