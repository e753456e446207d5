package protect

import (
	"slices"
	"strings"
	"sync"
)

// kubeChains is the preset kube, made once: KubeProxys is asked for each of 16,000 chains.
var kubeChains = sync.OnceValue(kubePreset)

// KubeProxys reports whether kube-proxy, and no other program, writes a chain of that
// name. KUBE-MARK-MASQ and KUBE-POSTROUTING are not among them: a kubelet before 1.28
// writes these too, so they may outlive a kube-proxy that has left.
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
