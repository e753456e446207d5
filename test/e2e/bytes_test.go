package e2e

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// nftScript makes nft execute a text.
func nftScript(n *nodetest.Node, text string) {
	n.Helper()
	nstest.CommandInput(n.T, text, "nft", "-f", "-")
}

// nativeRules are nft's rules in built-in chains. Because of such a rule iptables
// prints nothing of its chain.
const nativeRules = `add rule ip nat POSTROUTING ip saddr 10.66.0.0/24 oifname "eth9" masquerade random,persistent
add rule ip filter FORWARD ct mark != 0 meta mark set ct mark
add rule ip6 filter INPUT ct mark != 0 meta mark set ct mark
`

// TestNativeRulesInBuiltInChains: native rules are in built-in chains, written
// before canaryd's start or after it. Everything protected must be restored in a
// flush while canaryd runs, after a restart, while it is down, and by canaryd
// restore. Native rules of others stay lost.
func TestNativeRulesInBuiltInChains(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		want := asListed(n)
		same := func(when string) {
			n.Helper()
			n.Same("protected rules after a flush "+when, want, asListed(n))
		}
		nftScript(n, nativeRules)
		d := n.Start()
		nftScript(n, "flush ruleset")
		n.Healed(1)
		same("with native rules from before the start")

		nftScript(n, nativeRules)
		d.Stop()
		d = n.Start()
		nftScript(n, "flush ruleset")
		n.Healed(1)
		same("after a restart next to native rules")

		nftScript(n, nativeRules)
		n.Flush()
		n.Healed(2)
		same("with native rules from after the start")
		d.Stop()

		nftScript(n, nativeRules)
		d = n.Start() // it learns the jumps by their bytes
		id := n.Status().Generation.ID
		d.Stop()
		nftScript(n, "flush ruleset")
		n.Want(0, "restore", "--generation="+id, "--yes")
		same("while canaryd was down, by canaryd restore")
		nftScript(n, nativeRules)
		d = n.Start()
		d.Stop()
		nftScript(n, "flush ruleset")
		d = n.Start()
		n.Healed(1)
		same("while canaryd was down")
		d.Stop()
	})
}

// tailscaleRules are Tailscale's rules in its mode for nftables.
const tailscaleRules = `table ip filter {
 chain ts-input {
  iifname "lo" ip saddr 100.64.0.9 counter accept
  iifname != "tailscale0" ip saddr 100.115.92.0/23 counter return
  iifname != "tailscale0" ip saddr 100.64.0.0/10 counter drop
  iifname "tailscale0" counter accept
  udp dport 41641 counter accept
 }
 chain ts-forward {
  iifname "tailscale0" counter meta mark set meta mark & 0xff00ffff | 0x00040000
  meta mark & 0x00ff0000 == 0x00040000 counter accept
  oifname "tailscale0" ip saddr 100.64.0.0/10 counter drop
  oifname "tailscale0" counter accept
 }
 chain INPUT {
  type filter hook input priority 0; policy accept;
  counter jump ts-input
 }
 chain FORWARD {
  type filter hook forward priority 0; policy accept;
  counter jump ts-forward
 }
}
table ip nat {
 chain ts-postrouting {
  meta mark & 0x00ff0000 == 0x00040000 counter masquerade
 }
 chain POSTROUTING {
  type nat hook postrouting priority 100; policy accept;
  counter jump ts-postrouting
 }
}
`

// TestTailscaleOnNftables: Tailscale's native rules must come back, whole and in
// their order, also after a restart and while canaryd was down.
func TestTailscaleOnNftables(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		nftScript(n, tailscaleRules)
		ours := func() string {
			var all strings.Builder
			for _, chain := range []string{"filter ts-input", "filter ts-forward", "nat ts-postrouting"} {
				all.WriteString(nstest.Command(n.T, "nft", slices.Concat([]string{"-s", "list", "chain", "ip"}, strings.Fields(chain))...))
			}
			for _, table := range []string{"filter", "nat"} {
				for line := range strings.Lines(nstest.Command(n.T, "nft", "-s", "list", "table", "ip", table)) {
					if strings.Contains(line, "jump ts-") {
						all.WriteString(line)
					}
				}
			}
			return all.String()
		}
		want := ours()
		same := func(when string) {
			n.Helper()
			n.Same(when, strings.Split(want, "\n"), strings.Split(ours(), "\n"))
		}
		d := n.Start("--protect=tailscale")
		for round, script := range []string{"flush ruleset", "flush table ip filter; flush table ip nat", "flush chain ip nat POSTROUTING; flush chain ip filter FORWARD"} {
			nftScript(n, script)
			n.Healed(round + 1)
			same("nft " + script)
		}
		d.Stop()
		nftScript(n, "flush ruleset")
		d = n.Start("--protect=tailscale")
		n.Healed(1)
		same("a flush while canaryd was down")
		d.Stop()
	})
}

// userlandsDir is the folder into which hack/userlands.sh unpacked Debian's
// packages.
const userlandsDir = "/var/cache/canaryd-test/userlands"

// programsOf makes a folder with the iptables programs of another suite, and
// returns it.
func programsOf(n *nodetest.Node, suite string) string {
	n.Helper()
	root := filepath.Join(userlandsDir, suite)
	nstest.NeedFile(n.T, filepath.Join(userlandsDir, suite, ".unpacked"))
	dir := n.TempDir()
	for _, name := range []string{"iptables-nft", "ip6tables-nft"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			text := fmt.Sprintf("#!/bin/sh\nexec chroot %s /usr/sbin/%s%s \"$@\"\n", root, name, suffix)
			n.Must(os.WriteFile(filepath.Join(dir, name+suffix), []byte(text), 0o755))
		}
	}
	return dir
}

// aService is a service whose endpoint listens on the loopback, as kube-proxy writes it.
const aService = `*nat
:KUBE-SVC-LOOPBACKLOOPBACK - [0:0]
:KUBE-SEP-LOOPBACKLOOPBACK - [0:0]
-A KUBE-SVC-LOOPBACKLOOPBACK -j KUBE-SEP-LOOPBACKLOOPBACK
-A KUBE-SEP-LOOPBACKLOOPBACK -p tcp -m tcp -j DNAT --to-destination 127.0.0.1:18080
-I KUBE-SERVICES -d 10.96.77.7/32 -p tcp -m comment --comment "test/loopback" -m tcp --dport 80 -j KUBE-SVC-LOOPBACKLOOPBACK
COMMIT
`

// TestRulesOfANewerIptables: a newer iptables wrote the rules, and canaryd's own
// prints some of them without a match. They must come back unchanged after any
// flush. Connections over the loopback and to a service work before and after.
func TestRulesOfANewerIptables(t *testing.T) {
	for _, owner := range []string{"bookworm", "trixie"} {
		t.Run(owner, func(t *testing.T) {
			nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
				nstest.NeedRoot(n.T)
				older, newer := programsOf(n, "bullseye"), programsOf(n, owner)
				path := os.Getenv("PATH")
				n.Must(os.Setenv("PATH", newer+":"+path)) // for this process only
				defer os.Setenv("PATH", path)
				n.Load()
				nstest.CommandInput(n.T, aService, "iptables-nft-restore", "--noflush")
				nstest.Command(n.T, "ip", "route", "add", "10.96.0.0/12", "dev", "lo")
				listener, err := net.Listen("tcp", "127.0.0.1:18080")
				n.Must(err)
				defer listener.Close()
				connects := func(when string) {
					n.Helper()
					for _, address := range []string{"127.0.0.1:18080", "10.96.77.7:80"} {
						conn, err := net.DialTimeout("tcp", address, 5*time.Second)
						if err != nil {
							n.Errorf("%s: %v", when, err)
							continue
						}
						n.Must(conn.Close())
					}
				}
				connects("before")
				want, text := asListed(n), n.Protected()
				n.Env = []string{"PATH=" + older + ":" + path}
				d := n.Start()
				flushes := map[string]func(){
					"nft flush ruleset": func() { nftScript(n, "flush ruleset") },
					"iptables -F":       n.Flush,
					"the chain KUBE-POSTROUTING": func() {
						nftScript(n, "flush chain ip nat KUBE-POSTROUTING; flush chain ip nat POSTROUTING")
					},
					"nft delete table": func() {
						for _, ip := range []string{"ip", "ip6"} {
							nftScript(n, "delete table "+ip+" nat")
						}
					},
				}
				rounds := 0
				again := func(name string) {
					n.Helper()
					n.Same(name, want, asListed(n))
					connects(name)
				}
				for name, flush := range flushes {
					flush()
					rounds++
					n.Healed(rounds)
					again(name)
				}
				d.Stop()
				nftScript(n, "flush ruleset")
				d = n.Start()
				n.Healed(1)
				// This canaryd never read the rules that have a text. Its own
				// iptables writes them, and versions write "-p sctp" as different
				// expressions.
				n.Same("flushed while canaryd was down", text, n.Protected())
				connects("flushed while canaryd was down")
				for _, f := range rules.Families() {
					for _, table := range []rules.TableName{rules.Nat, rules.Filter, rules.Mangle} {
						if chain := trialChains(n, f, table); chain != "" {
							n.Errorf("a trial chain is left in %s %s: %s", f, table, chain)
						}
					}
				}
				d.Stop()
			})
		})
	}
}

// trialChains returns the line of a trial chain in a table, "" if there is none.
func trialChains(n *nodetest.Node, f rules.Family, table rules.TableName) string {
	n.Helper()
	ip := map[rules.Family]string{rules.IPv4: "ip", rules.IPv6: "ip6"}[f]
	out, _ := exec.CommandContext(n.Context(), "nft", "list", "table", ip, table).CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "-TRIAL-") {
			return line
		}
	}
	return ""
}
