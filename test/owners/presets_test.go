package owners

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestPresetsNameWhatIptablesPrints: the kernel and iptables accept the rules of
// each owner. The owner's preset must name all of them as they are read back.
// They survive -F and -X, and a file that was saved before the owners wrote, even
// a file of nft. All of a file's own rules stay.
func TestPresetsNameWhatIptablesPrints(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "ipset")
		n.Families = []rules.Family{rules.IPv4}
		saved := scenario.RestoreSaved()
		n.Must(saved.Prepare(n.Context(), n.Programs))
		listed := "flush ruleset\n"
		if n.Programs.With == iptables.NFT {
			listed += nstest.Command(n.T, "nft", "--stateless", "list", "ruleset") + strings.ReplaceAll(listedOnly, "COMMENT", scenario.SavedOnly)
		}
		var loaded []string
		for _, name := range scenario.TableOwners() {
			part := scenario.Owner(rules.IPv4, name)
			makeSets(n, part.Text)
			if err := n.Programs.RestoreNoflush(n.Context(), rules.IPv4, part.Text); err != nil {
				n.Logf("the rules of %s do not load here: %v", name, err)
				continue
			}
			loaded = append(loaded, name)
			named := 0
			own := selectorOf(n, scenario.Preset(name)).Protection()
			for _, table := range n.Save()[rules.IPv4] {
				named += own.Extract(table, canary.IsMark).RuleCount()
			}
			if want := strings.Count(part.Text, "\n-A ") + strings.Count(part.Text, "\n-I "); named != want {
				n.Errorf("the preset of %s names %d of %d rules", name, named, want)
			}
		}
		var words []string
		for _, name := range loaded {
			words = append(words, scenario.Preset(name))
		}
		flag := protects(n, words...)
		all := selectorOf(n, words...).Protection()
		guarded := func() []string {
			n.Helper()
			var list []string
			for table, set := range n.Save()[rules.IPv4] {
				section := all.Extract(set, canary.IsMark)
				for _, h := range section.Jumps {
					list = append(list, string(table)+" "+h.String())
				}
				for _, c := range section.Chains {
					for _, r := range c.Rules {
						list = append(list, string(table)+" "+c.Name+" "+r.Spec)
					}
				}
			}
			slices.Sort(list)
			return list
		}
		before := guarded()
		n.Start("--ip-family=ipv4", flag)
		testkit.Pass(n.T, time.Second, "that marks of a new generation are renewed")
		for _, table := range []rules.TableName{rules.Mangle, rules.Nat, rules.Filter} {
			run(n, rules.IPv4, table, "-X", "WEAVE-CANARY") // a flush deletes it, too
		}
		back := func(when string, records, files int) {
			n.Helper()
			n.Healed(records)
			n.Same(when+": the rules of "+strings.Join(loaded, ", "), before, guarded())
			text, err := n.Programs.Save(n.Context(), rules.IPv4)
			if err != nil || strings.Contains(text, "WEAVE-CANARY") {
				n.Errorf("%s: Weave's canary is back: %v", when, err)
			}
			if own := strings.Count(text, scenario.SavedOnly); own != files {
				n.Errorf("%s: %d rules of the file's own stand, want %d:\n%s", when, own, files, text)
			}
		}
		flush(n, true)
		back("after -F and -X", 1, 0)
		n.Must(saved.Do(n.Context(), n.Programs))
		back("after a saved file", 2, len(protect.Always()))
		if n.Programs.With == iptables.NFT {
			nstest.CommandInput(n.T, listed, "nft", "-f", "-")
			back("after a file of nft's", 3, 1)
		}
	})
}

// listedOnly has a rule that is in a file of nft but not on the node.
const listedOnly = `
table ip filter {
	chain INPUT { type filter hook input priority filter; policy accept; ip saddr 198.51.100.78 counter accept comment "COMMENT"; }
}
`

// makeSets makes the ipsets that rules name.
func makeSets(n *nodetest.Node, text string) {
	n.Helper()
	words := strings.Fields(text)
	for i, word := range words {
		if word != "--match-set" {
			continue
		}
		kind := "hash:net"
		if strings.Contains(words[i+2], ",") {
			kind = "hash:ip,port"
		}
		if out, err := exec.CommandContext(n.Context(), "ipset", "create", "-exist", words[i+1], kind).CombinedOutput(); err != nil {
			n.Fatalf("ipset create %s: %v: %s", words[i+1], err, out)
		}
	}
}

// TestCiliumStarts: the agent's start renames its chains, makes new ones, and
// deletes the old ones. This must not count as a flush. A flush afterwards brings
// back only the new chains.
func TestCiliumStarts(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Families = []rules.Family{rules.IPv4}
		const feeder = `-m comment --comment "cilium-feeder: CILIUM_POST_nat" -j `
		write := func(pod string) {
			n.Helper()
			n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*nat\n:CILIUM_POST_nat - [0:0]\n-A CILIUM_POST_nat -s "+pod+
				" ! -o cilium_+ -j MASQUERADE\n-I POSTROUTING 1 "+feeder+"CILIUM_POST_nat\nCOMMIT\n"))
		}
		write("10.0.0.0/24")
		n.Start("--ip-family=ipv4", "--protect=cilium", "--jump-grace=2s")
		testkit.Pass(n.T, time.Second, "that marks of a new generation are renewed")
		run(n, rules.IPv4, rules.Nat, "-E", "CILIUM_POST_nat", "OLD_CILIUM_POST_nat")
		testkit.Pass(n.T, 300*time.Millisecond, "between two steps of the agent")
		write("10.0.1.0/24")
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*nat\n-D POSTROUTING "+feeder+"OLD_CILIUM_POST_nat\n-F OLD_CILIUM_POST_nat\n-X OLD_CILIUM_POST_nat\nCOMMIT\n"))
		n.Until("the new rules to be learned", func() error {
			if s := n.Status(); !s.LearningPendingSince.IsZero() || s.Generation.Rules != 2 {
				return errors.New("the generation has other rules")
			}
			return nil
		})
		if records := n.Status().Flushes; len(records) > 0 {
			n.Errorf("the start counts as a flush: %+v", records)
		}
		flush(n, true)
		n.Healed(1)
		saved, err := n.Programs.Save(n.Context(), rules.IPv4)
		n.Must(err)
		if strings.Contains(saved, "OLD_CILIUM") || strings.Contains(saved, "10.0.0.0/24") || strings.Count(saved, "10.0.1.0/24") != 1 || strings.Count(saved, "cilium-feeder") != 1 {
			n.Errorf("behind a flush there is\n%s", saved)
		}
	})
}

// nativeOwners are native tables of owners that have them besides their rules of
// iptables, or instead.
const nativeOwners = `
table inet lxd {
	chain pstrt.lxdbr0 { type nat hook postrouting priority srcnat; ip saddr 10.18.40.0/24 ip daddr != 10.18.40.0/24 oifname != "lxdbr0" masquerade; }
	chain fwd.lxdbr0 { type filter hook forward priority filter; ip version 4 oifname "lxdbr0" accept; ip version 4 iifname "lxdbr0" accept; }
	chain in.lxdbr0 { type filter hook input priority filter; iifname "lxdbr0" udp dport 67 accept; iifname "lxdbr0" icmp type { destination-unreachable, time-exceeded, parameter-problem } accept; }
}
table inet incus {
	chain pstrt.incusbr0 { type nat hook postrouting priority srcnat; ip saddr 10.19.40.0/24 ip daddr != 10.19.40.0/24 oifname != "incusbr0" masquerade; }
	chain fwd.incusbr0 { type filter hook forward priority filter; oifname "incusbr0" accept; iifname "incusbr0" accept; }
}
table ip io.systemd.nat {
	set masq_saddr { type ipv4_addr; flags interval; elements = { 192.168.159.192/28 }; }
	map map_port_ipport { type inet_proto . inet_service : ipv4_addr . inet_service; elements = { tcp . 2222 : 192.168.159.201 . 22 }; }
	chain prerouting { type nat hook prerouting priority dstnat + 1; fib daddr type local dnat ip addr . port to meta l4proto . th dport map @map_port_ipport; }
	chain output { type nat hook output priority -99; ip daddr != 127.0.0.0/8 fib daddr type local dnat ip addr . port to meta l4proto . th dport map @map_port_ipport; }
	chain postrouting { type nat hook postrouting priority srcnat + 1; ip saddr @masq_saddr masquerade; }
}
table ip crowdsec {
	set crowdsec-blacklists-script { type ipv4_addr; flags timeout; elements = { 198.51.100.7 timeout 4h }; }
	chain crowdsec-chain-input { type filter hook input priority filter - 10; ip saddr @crowdsec-blacklists-script counter drop; }
	chain crowdsec-chain-forward { type filter hook forward priority filter - 10; ip saddr @crowdsec-blacklists-script counter drop; }
}
table ip6 crowdsec6 {
	set crowdsec6-blacklists-script { type ipv6_addr; flags timeout; }
	chain crowdsec6-chain-input { type filter hook input priority filter - 10; ip6 saddr @crowdsec6-blacklists-script counter drop; }
}
table ip aws-cni {
	chain snat-mark { ip daddr 172.16.0.0/12 counter return; counter ct mark set ct mark | 0x80; }
	chain nat-prerouting { type nat hook prerouting priority -90; fib daddr type local return; iifname "eni*" counter jump snat-mark; counter ct mark & 0x80 == 0x80 meta mark set ct mark & 0x80; }
}
table ip flannel-ipv4 {
	chain forward { type filter hook forward priority filter; ip saddr 10.244.0.0/16 accept; ip daddr 10.244.0.0/16 accept; }
	chain postrtg { type nat hook postrouting priority srcnat; meta mark 0x4000 return; ip saddr 10.244.1.0/24 ip daddr 10.244.0.0/16 return; ip saddr 10.244.0.0/16 ip daddr != 224.0.0.0/4 masquerade fully-random; }
}
table inet ovn-kubernetes {
	set mgmtport-no-snat-nodeports { type inet_proto . inet_service; elements = { tcp . 31746 }; }
	chain mgmtport-snat { type nat hook postrouting priority srcnat; oifname != "ovn-k8s-mp0" return; meta l4proto . th dport @mgmtport-no-snat-nodeports return; snat ip to 10.244.0.2; }
}
`

// TestNativeTablesOfOwners: the words lxd, incus, networkd, crowdsec, aws-node,
// flannel and ovn-kubernetes also name the native tables of these owners. The
// tables must come back after a flush of the ruleset, and after a load of an
// earlier file that flushes.
func TestNativeTablesOfOwners(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		const admin = "table inet admin {\n\tchain c {\n\t\ttype filter hook input priority filter; policy accept;\n\t\ttcp dport 22 accept\n\t}\n}\n"
		nstest.CommandInput(n.T, admin, "nft", "-f", "-")
		saved := "flush ruleset\n" + nstest.Command(n.T, "nft", "--stateless", "list", "ruleset")
		file := n.TempDir() + "/owners.nft"
		n.Must(os.WriteFile(file, []byte(nativeOwners), 0o600))
		nstest.Command(n.T, "nft", "-f", file)
		guarded := func() []string {
			n.Helper()
			var list []string
			for _, name := range []string{"inet lxd", "inet incus", "ip io.systemd.nat", "ip crowdsec", "ip6 crowdsec6", "ip aws-cni", "ip flannel-ipv4", "inet ovn-kubernetes"} {
				text, _ := exec.CommandContext(n.Context(), "nft", append([]string{"--stateless", "list", "table"}, strings.Fields(name)...)...).CombinedOutput()
				list = append(list, regexp.MustCompile(` expires [0-9a-z]+`).ReplaceAllString(string(text), ""))
			}
			return list
		}
		before := guarded()
		n.Launch("--protect=lxd,incus,networkd,crowdsec,aws-node,flannel,ovn-kubernetes")
		n.Until("the tables to be guarded", func() error {
			if code, _, trouble := n.Canaryd("status"); code > 1 { // it is starting
				return errors.New(trouble)
			}
			s := n.Status()
			for _, t := range s.Native {
				if t.Verdict != "intact" {
					return fmt.Errorf("%s is %s", t.Table, t.Verdict)
				}
			}
			if !s.Healthy || len(s.Native) != 8 {
				return fmt.Errorf("healthy %t with %d tables", s.Healthy, len(s.Native))
			}
			return nil
		})
		for i, flush := range []string{"flush ruleset\n", saved} {
			nstest.CommandInput(n.T, flush, "nft", "-f", "-")
			n.Until("the tables to be back", func() error {
				s := n.Status()
				if !s.Healthy || len(s.Flushes) != i+1 {
					return fmt.Errorf("healthy %t with %d records", s.Healthy, len(s.Flushes))
				}
				return nil
			})
			n.Same("native tables after "+flush, before, guarded())
		}
		if got := nstest.Command(n.T, "nft", "--stateless", "list", "table", "inet", "admin"); got != admin {
			n.Errorf("of the saved file there is\n%s\nwant\n%s", got, admin)
		}
	})
}

// TestTailscaleWithNftables: in nftables mode tailscaled makes iptables' own
// tables with its chains. The preset names these chains, whichever program made
// them.
func TestTailscaleWithNftables(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		file := n.TempDir() + "/tailscale.nft"
		n.Must(os.WriteFile(file, []byte(tailscaleNft), 0o600))
		nstest.Command(n.T, "nft", "-f", file)
		guarded := func() []string {
			n.Helper()
			var list []string
			for _, name := range []string{"filter ts-input", "filter ts-forward", "nat ts-postrouting", "filter INPUT", "filter FORWARD", "nat POSTROUTING"} {
				text, _ := exec.CommandContext(n.Context(), "nft", append([]string{"--stateless", "list", "chain", "ip"}, strings.Fields(name)...)...).CombinedOutput()
				for line := range strings.Lines(string(text)) {
					if !strings.HasPrefix(line, "# Warning") && strings.TrimSpace(line) != "counter" { // the latter is a witness
						list = append(list, line)
					}
				}
			}
			return list
		}
		before := guarded()
		n.Start("--ip-family=ipv4", "--protect=tailscale")
		testkit.Pass(n.T, time.Second, "that marks of a new generation are renewed")
		for i, command := range [][]string{{"flush", "ruleset"}, {"flush", "table", "ip", "filter"}, {"flush", "chain", "ip", "filter", "FORWARD"}} {
			nstest.Command(n.T, "nft", command...)
			n.Healed(i + 1)
			n.Same(strings.Join(command, " "), before, guarded())
		}
	})
}

// tailscaleNft has the rules that tailscaled writes by netlink.
const tailscaleNft = `
table ip filter {
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
	chain INPUT { type filter hook input priority 0; policy accept; counter jump ts-input; }
	chain FORWARD { type filter hook forward priority 0; policy accept; counter jump ts-forward; }
}
table ip nat {
	chain ts-postrouting { meta mark & 0x00ff0000 == 0x00040000 counter masquerade; }
	chain POSTROUTING { type nat hook postrouting priority 100; policy accept; counter jump ts-postrouting; }
}
`
