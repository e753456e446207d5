package protect_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	hash16 = "XPGD46QRK7WJZT7O"         // 16 digits of base32, as kube-proxy's
	hash24 = "46d5e6e569f30aa7e18e02f1" // 24 hex digits, as the bridge plugin's
)

func selector(t *testing.T, list ...string) protect.Selector {
	t.Helper()
	s, err := protect.NewSelector(list)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSelectorProtectsExactlyWhatWasNamed(t *testing.T) {
	tests := []struct {
		name    string
		list    []string
		yes, no []string
	}{
		{
			name: "kube is kube-proxy and kubelet, and not kube-router",
			list: []string{"kube"},
			yes: []string{
				"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-MARK-DROP",
				"KUBE-FORWARD", "KUBE-PROXY-FIREWALL", "KUBE-FIREWALL", "KUBE-IPTABLES-HINT", "KUBE-LOAD-BALANCER", "KUBE-NODE-PORT",
				"KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
				"KUBE-SVC-" + hash16, "KUBE-SVL-" + hash16, "KUBE-SEP-" + hash16, "KUBE-EXT-" + hash16, "KUBE-FW-" + hash16, "KUBE-XLB-" + hash16,
			},
			no: []string{
				"KUBE-ROUTER-INPUT", "KUBE-ROUTER-FORWARD", "KUBE-ROUTER-OUTPUT", "KUBE-ROUTER-SERVICES", "KUBE-POD-FW-" + hash16,
				"KUBE-NWPLCY-" + hash16, "KUBE-NWPLCY-DEFAULT", "KUBE-SRC-" + hash16, "KUBE-DST-" + hash16,
				"KUBE-PROXY-CANARY", "KUBE-KUBELET-CANARY", "KUBE-CANARYD-CANARY",
				"KUBE-SVC-", "KUBE-SVC-" + hash16[1:], "KUBE-SVC-" + hash16 + "A", "KUBE-SVC-" + hash16[1:] + "1", "KUBE-SVC-" + strings.ToLower(hash16),
				"XKUBE-SERVICES", "KUBE-SERVICES2", "kube-services", "CNI-FORWARD", "DOCKER", "cali-FORWARD", "INPUT", "",
			},
		},
		{
			name: "cni is portmap, bridge and firewall",
			list: []string{"cni"},
			yes: []string{
				"CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ", "CNI-HOSTPORT-SNAT", "CNI-FORWARD", "CNI-ADMIN",
				"CNI-ISOLATION-STAGE-1", "CNI-ISOLATION-STAGE-2", "CNI-" + hash24, "CNI-DN-46d5e6e569f30aa7e18e0", "CNI-SN-46d5",
			},
			no: []string{
				"CNI-", "CNI-DN-", "CNI-DN-xyz", "CNI-DN-46D5", "CNI-" + hash24[1:], "CNI-" + hash24 + "0", "CNI-OTHER", "CNI-CANARY",
				"KUBE-SERVICES", "POSTROUTING",
			},
		},
		{
			name: "presets and globs add up",
			list: []string{"cni", " DOCKER ", "ts-*", `NETAVARK[\-_]*`},
			yes:  []string{"CNI-ADMIN", "DOCKER", "ts-input", "NETAVARK-ABC", "NETAVARK_FORWARD"},
			no:   []string{"DOCKER-USER", "KUBE-SERVICES", "tsx", "NETAVARK"},
		},
		{
			name: "a glob for everything still spares canaries and built-in chains",
			list: []string{"*"},
			yes:  []string{"A", "KUBE-ROUTER-INPUT", "INPUT2"},
			no: []string{
				"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING",
				"KUBE-PROXY-CANARY", "KUBE-KUBELET-CANARY", "KUBE-CANARYD-CANARY", "ANY-CANARY", "",
			},
		},
		{name: "nothing", list: nil, no: []string{"KUBE-SERVICES", "CNI-ADMIN", "A"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := selector(t, test.list...)
			for _, chain := range test.yes {
				if !s.Protects(chain) {
					t.Errorf("%s is not protected", chain)
				}
			}
			for _, chain := range test.no {
				if s.Protects(chain) {
					t.Errorf("%q is protected", chain)
				}
			}
		})
	}
}

func TestTheZeroSelectorProtectsNothing(t *testing.T) {
	if (protect.Selector{}).Protects("KUBE-SERVICES") {
		t.Error("it protects KUBE-SERVICES")
	}
}

func TestSelectorNamesTheBadWord(t *testing.T) {
	for _, word := range []string{"kubee", "dockers", "", "  ", "KUBE-[", "KUBE-[a-", `A\`} {
		_, err := protect.NewSelector([]string{"kube", word})
		if err == nil || !strings.Contains(err.Error(), strings.Trim(strings.TrimSpace(word), `\`)) {
			t.Errorf("%q: error is %v, want one that names it", word, err)
		}
	}
}

// TestAChainNamedLikeAPreset: a word that looks like a mistyped preset is refused, and the
// error has the glob that protects a chain of just that name.
func TestAChainNamedLikeAPreset(t *testing.T) {
	for _, word := range []string{"foo1", "kubee", "1abc", "µ"} {
		_, err := protect.NewSelector([]string{word})
		_, glob, _ := strings.Cut(fmt.Sprint(err), "a chain of just that name is protected by the glob '")
		glob, ok := strings.CutSuffix(glob, "'")
		if err == nil || !ok {
			t.Errorf("%q: the error is %v, want one that names the glob", word, err)
			continue
		}
		if s := selector(t, glob); !s.Protects(word) || s.Protects(word+"x") || s.Protects("x"+word) {
			t.Errorf("%s does not protect just %s", glob, word)
		}
	}
	for _, word := range []string{"", "^"} {
		if _, err := protect.NewSelector([]string{word}); err == nil || strings.Contains(err.Error(), "glob '") {
			t.Errorf("%q: the error is %v, want one without a glob, for there is none", word, err)
		}
	}
}

// TestPresetsTakeTheirOwnersChainsFromANode: in a node's output of iptables-save, the presets
// must protect all chains of kube-proxy, kubelet and the CNI plugins, and no other chain.
func TestPresetsTakeTheirOwnersChainsFromANode(t *testing.T) {
	text, err := os.ReadFile("../rules/testdata/node.nft.save")
	if err != nil {
		t.Fatal(err)
	}
	set := savefile.Tables(t, string(text))
	s := selector(t, "kube", "cni")
	var left []string
	for _, table := range set {
		for _, c := range table.Chains {
			if !rules.Builtin(table.Name, c.Name) && !s.Protects(c.Name) && !slices.Contains(left, c.Name) {
				left = append(left, c.Name)
			}
		}
	}
	slices.Sort(left)
	if d := cmp.Diff([]string{"KUBE-KUBELET-CANARY", "KUBE-PROXY-CANARY", "corp-input"}, left); d != "" {
		t.Errorf("chains that are not protected (-want +got):\n%s", d)
	}
}

// TestPiecewise: chains whose rules are written for one container at a time, and chains that
// are written as a whole.
func TestPiecewise(t *testing.T) {
	s, err := protect.NewSelector([]string{"kube", "cni", "docker", "podman", "libvirt", "tailscale", "MY-*"})
	if err != nil {
		t.Fatal(err)
	}
	for chain, want := range map[string]bool{
		"CNI-HOSTPORT-DNAT": true, "CNI-FORWARD": true, "CNI-DN-31c7af326e67a1a733e30": false, "CNI-31c7af326e67a1a733e30223": false,
		"DOCKER": true, "DOCKER-USER": true, "NETAVARK-HOSTPORT-DNAT": true, "NETAVARK-1D8721804F16F": true, "NETAVARK-DN-1D8721804F16F": true,
		"LIBVIRT_FWI": true, "KUBE-SERVICES": false, "KUBE-SEP-3DTMUHKBFODYJGNI": false, "ts-input": false, "MY-CHAIN": false,
	} {
		if got := s.Piecewise(chain); got != want {
			t.Errorf("%s: %t, want %t", chain, got, want)
		}
	}
}
