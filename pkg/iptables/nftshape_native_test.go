package iptables

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestNativeRulesHaveNoOtherText: iptables prints a rule of nft, but leaves a
// condition out. That text must not count as the rule's, because a replay would
// accept more than the rule did.
func TestNativeRulesHaveNoOtherText(t *testing.T) {
	natives := map[string]string{
		"tcp dport 80 accept":                     "--dport 80",
		"ip saddr { 1.2.3.4, 5.6.7.8 } accept":    "a set",
		"tcp dport { 80, 443 } accept":            "a set",
		"tcp flags syn accept":                    "--tcp-flags",
		"tcp dport 80-90 accept":                  "--dport 80:90",
		"meta mark 5 accept":                      "--mark 0x5",
		"meta pkttype broadcast accept":           "--pkt-type broadcast",
		"icmp type echo-request accept":           "--icmp-type 8",
		"meta skuid 5 accept":                     "--uid-owner 5",
		"ip saddr 10.0.0.0/8 counter accept":      "-s 10.0.0.0/8",
		"iifname \"eth*\" tcp dport 1 accept":     "--dport 1",
		"ip daddr 10.0.0.1 meta cpu 1 accept":     "cpu",
		"ct state new accept":                     "state",
		"th dport 53 accept":                      "--dport 53",
		"meta mark set 1":                         "--set",
		"ip saddr 10.0.0.1 udp dport 53 accept":   "--dport 53",
		"ip saddr 10.0.0.1-10.0.0.9 accept":       "--src-range 10.0.0.1-10.0.0.9",
		"ip daddr > 10.0.0.1 accept":              "--dst-range",
		"ip ttl 64 accept":                        "--ttl-eq 64",
		"ip ttl < 5 accept":                       "--ttl-lt 5",
		"ip dscp 8 accept":                        "dscp",
		"ip length 100 accept":                    "--length 100",
		"meta length 100 accept":                  "--length 100",
		"meta length > 100 accept":                "--length 101",
		"ip daddr 10.0.0.1 ip saddr set 10.0.0.2": "an address that is set",
		"ip daddr 10.0.0.1 meta priority set 5":   "a priority that is set",
		"ip protocol > 5 accept":                  "a range of protocols",
		"ip frag-off & 0x4000 != 0 accept":        "a flag of fragments",
		"meta l4proto 6-17 accept":                "a range of protocols",
		"meta mark 5-9 accept":                    "a range of marks",
		"meta mark > 5 accept":                    "a range of marks",
		"ether saddr 02:00:00:00:00:01 accept":    "--mac-source",
		"ip6 hoplimit 64 accept":                  "--hl-eq 64",
		"ip6 saddr fd00::1-fd00::9 accept":        "--src-range fd00::1-fd00::9",
		"ip6 flowlabel 5 accept":                  "a flow label",
	}
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft", "iptables-nft", "ip6tables-nft")
		chains, families := map[string]string{}, map[string]rules.Family{}
		for native := range natives {
			chains[native], families[native] = fmt.Sprint("A", len(chains)), rules.IPv4
			if strings.HasPrefix(native, "ip6 ") {
				families[native] = rules.IPv6
			}
			iptablesCommand(t, NFT, families[native], "-N "+chains[native])
		}
		k := openKernel(t, Config{Backend: NFT})
		for native, chain := range chains {
			nstest.Command(t, "nft", "add rule "+families[native].NFT()+" filter "+chain+" "+native)
		}
		for native, conditions := range natives {
			list := mustRead(t, k, families[native]).Tables[rules.Filter].Chain(chains[native]).Rules
			if len(list) == 0 {
				t.Errorf("%s is not read", native)
			}
			for _, r := range list {
				if _, opaque := r.Opaque(); !opaque && !strings.Contains(r.Spec, conditions) {
					t.Errorf("the text of %s is %q, without %s", native, r.Spec, conditions)
				}
			}
		}
	})
}

// TestPlainRulesKeepTheirText: rules that iptables itself writes without a match
// have the text that it prints, for all prefixes.
func TestPlainRulesKeepTheirText(t *testing.T) {
	for family, specs := range map[rules.Family][]string{
		rules.IPv4: {"-s 10.0.0.0/8 -j ACCEPT", "! -d 10.1.0.0/16 -j ACCEPT", "-s 10.1.2.0/25 -d 10.0.0.1/32 -j ACCEPT", "-f -j ACCEPT", "! -f -j ACCEPT", "! -p tcp -j ACCEPT"},
		rules.IPv6: {"-s fd00::/8 -j ACCEPT", "! -d fd00::/16 -j ACCEPT", "-s fd00::1/128 -d fd00::/97 -j ACCEPT", "! -p udp -j ACCEPT"},
	} {
		t.Run(family.String(), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-nft", "ip6tables-nft")
				iptablesCommand(t, NFT, family, "-N A")
				for _, spec := range specs {
					iptablesCommand(t, NFT, family, "-A A "+spec)
				}
				var got []string
				for _, r := range mustRead(t, openKernel(t, Config{Backend: NFT}), family).Tables[rules.Filter].Chain("A").Rules {
					got = append(got, r.Spec)
				}
				if diff := cmp.Diff(specs, got); diff != "" {
					t.Errorf("rules (-want +got):\n%s", diff)
				}
			})
		})
	}
}
