package protect

import (
	"slices"
	"strings"
	"sync"
)

// kubeChains is the preset kube, made once: a replay asks KubeProxys about each of 16,000 chains.
var kubeChains = sync.OnceValue(kubePreset)

// KubeProxys reports whether kube-proxy, and no other program, writes a chain of that name. It is
// false for KUBE-MARK-MASQ and KUBE-POSTROUTING: a kubelet before 1.28 writes them too, so they
// may remain after kube-proxy has left the node.
func KubeProxys(chain string) bool {
	if !strings.HasPrefix(chain, "KUBE-") {
		return false
	}
	switch chain {
	case "KUBE-MARK-MASQ", "KUBE-POSTROUTING", "KUBE-MARK-DROP", "KUBE-FIREWALL", "KUBE-IPTABLES-HINT":
		return false
	}
	return slices.Contains(kubeChains().exact, chain) ||
		slices.ContainsFunc(kubeChains().hashed, func(h hashedName) bool { return h.matches(chain) })
}
