package iptables

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestNativeRulesHaveNoOtherText: what iptables prints of a rule that nft wrote is no text of it
// if it leaves a condition out; else a replay would accept more than the rule did.
func TestNativeRulesHaveNoOtherText(t *testing.T) {
	for native, conditions := range map[string]string{
		"tcp dport 80 accept":                   "--dport 80",
		"ip saddr { 1.2.3.4, 5.6.7.8 } accept":  "a set",
		"tcp dport { 80, 443 } accept":          "a set",
		"tcp flags syn accept":                  "--tcp-flags",
		"tcp dport 80-90 accept":                "--dport 80:90",
		"meta mark 5 accept":                    "--mark 0x5",
		"meta pkttype broadcast accept":         "--pkt-type broadcast",
		"icmp type echo-request accept":         "--icmp-type 8",
		"meta skuid 5 accept":                   "--uid-owner 5",
		"ip saddr 10.0.0.0/8 counter accept":    "-s 10.0.0.0/8",
		"iifname \"eth*\" tcp dport 1 accept":   "--dport 1",
		"ip daddr 10.0.0.1 meta cpu 1 accept":   "cpu",
		"ct state new accept":                   "state",
		"th dport 53 accept":                    "--dport 53",
		"meta mark set 1":                       "--set",
		"ip saddr 10.0.0.1 udp dport 53 accept": "--dport 53",
	} {
		t.Run(native, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft", "iptables-nft")
				iptablesCommand(t, NFT, rules.IPv4, "-N A")
				k := openKernel(t, Config{Backend: NFT})
				nstest.Command(t, "nft", "add rule ip filter A "+native)
				for _, r := range mustRead(t, k, rules.IPv4).Tables[rules.Filter].Chain("A").Rules {
					if _, opaque := r.Opaque(); !opaque && !strings.Contains(r.Spec, conditions) {
						t.Errorf("its text is %q, without %s", r.Spec, conditions)
					}
				}
			})
		})
	}
}
