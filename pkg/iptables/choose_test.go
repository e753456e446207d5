package iptables

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The scenes that nodes are found in, and their neighbours. Each line
// is a shell command.
func TestChooseScenes(t *testing.T) {
	manyRules := func(program string, n int) string {
		return fmt.Sprintf("for i in $(seq 1 %d); do echo \"-A INPUT -p tcp --dport $i\"; done | (echo '*filter'; cat; echo COMMIT) | %s-restore --noflush", n, program)
	}
	hint := func(program string) string { return program + " -t mangle -N KUBE-IPTABLES-HINT" }
	for _, c := range []struct {
		name    string
		scene   []string
		backend Backend
		mixed   bool
		reason  string
	}{
		{"nothing", nil, NFT, false, "neither backend holds rules, and nft is the default"},
		{"hint in nft, legacy nat merely listed", []string{hint("iptables-nft"), "iptables-legacy -t nat -S"},
			NFT, false, "kubelet's hint chain is in nft only"},
		{"hint in nft behind a native rule", []string{hint("iptables-nft"), "nft add rule ip mangle KUBE-IPTABLES-HINT ct state vmap '{ new : accept }'", manyRules("iptables-legacy", 9)},
			NFT, true, "kubelet's hint chain is in nft only"},
		{"hint in legacy ip6 only", []string{hint("ip6tables-legacy")},
			Legacy, false, "kubelet's hint chain is in legacy only"},
		{"stale nft hint, 300 live legacy rules with a hint of their own", []string{hint("iptables-nft"), "iptables-legacy -t mangle -N KUBE-KUBELET-CANARY", "iptables-nft -N OLD", "iptables-nft -A OLD", manyRules("iptables-legacy", 300)},
			Legacy, true, "legacy holds more rules: nft 1, legacy 300"},
		{"5 legacy rules, no hints", []string{manyRules("iptables-legacy", 5)},
			Legacy, false, "legacy holds more rules: nft 0, legacy 5"},
		{"legacy hint, 50 foreign nft rules", []string{hint("iptables-legacy"), manyRules("iptables-nft", 50)},
			Legacy, false, "kubelet's hint chain is in legacy only"},
		{"a tie", []string{manyRules("iptables-legacy", 2), manyRules("ip6tables-nft", 2)},
			NFT, true, "both backends hold 2 rules, and nft is the default"},
		{"jumps do not count twice", []string{"iptables-nft -N X", "iptables-nft -A INPUT -j X", "iptables-nft -A X", manyRules("iptables-legacy", 3)},
			Legacy, true, "legacy holds more rules: nft 2, legacy 3"},
		{"foreign nft tables", []string{"nft add table ip own", "nft add chain ip own KUBE-IPTABLES-HINT", "nft add rule ip own KUBE-IPTABLES-HINT accept"},
			NFT, false, "neither backend holds rules, and nft is the default"},
		{"only our own", []string{
			"iptables-nft -t nat -N " + canary, "iptables-nft -t nat -A " + canary + " -m comment --comment canaryd-1", "iptables-nft -A INPUT -m comment --comment canaryd-1",
			"iptables-legacy -t nat -N " + canary, "iptables-legacy -t nat -A " + canary, "iptables-legacy -A INPUT -m comment --comment canaryd-1"},
			NFT, false, "neither backend holds rules, and nft is the default"},
	} {
		t.Run(c.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy", "nft")
				nstest.Command(t, "sh", "-ec", strings.Join(c.scene, "\n"))
				before := tablesOf(t, NFT) + tablesOf(t, Legacy)
				got, err := Choose(t.Context(), ChooseConfig{Canary: canary})
				if err != nil {
					t.Fatal(err)
				}
				if got.Backend != c.backend || got.Mixed != c.mixed || got.Reason != c.reason {
					t.Errorf("got %s, mixed %t, %q; want %s, %t, %q", got.Backend, got.Mixed, got.Reason, c.backend, c.mixed, c.reason)
				}
				if diff := cmp.Diff(before, tablesOf(t, NFT)+tablesOf(t, Legacy)); diff != "" {
					t.Errorf("looking created tables (-before +after):\n%s", diff)
				}
			})
		})
	}
}

func TestDecide(t *testing.T) {
	counts := func(nft, legacy Count) map[rules.Family]map[Backend]Count {
		return map[rules.Family]map[Backend]Count{rules.IPv4: {NFT: nft, Legacy: legacy}}
	}
	for _, c := range []struct {
		name   string
		counts map[rules.Family]map[Backend]Count
		hasNFT bool
		want   Evidence
	}{
		{"neither, no nf_tables", counts(Count{}, Count{}), false, Evidence{Backend: Legacy, Reason: "the kernel has no nf_tables"}},
		{"stale nft hint wins over 300 rules", counts(Count{Hint: true}, Count{Rules: 300}), true, Evidence{Backend: NFT, Reason: "kubelet's hint chain is in nft only"}},
		{"both hints", counts(Count{Hint: true, Rules: 9}, Count{Hint: true, Rules: 8}), true, Evidence{Backend: NFT, Mixed: true, Reason: "nft holds more rules: nft 9, legacy 8"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := Evidence{Counts: c.counts}
			got.decide(c.hasNFT)
			c.want.Counts = c.counts
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
