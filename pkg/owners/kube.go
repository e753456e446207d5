package owners

// Chains of kube-proxy and kubelet with a known role.
const (
	// ProxyCanary is the chain that kube-proxy keeps in every table that it writes. If it is
	// missing from mangle, kube-proxy assumes a flush and does a full sync (k8s.io/kubernetes
	// pkg/util/iptables Monitor, since 1.17).
	ProxyCanary = "KUBE-PROXY-CANARY"
	// KubeletCanary is kubelet's canary, in mangle.
	KubeletCanary = "KUBE-KUBELET-CANARY"
	// HintChain holds no rule, and no rule leads to it. It shows which iptables kubelet uses.
	// kubelet makes it in mangle at its start, since 1.24, and never deletes it (1.36).
	HintChain = "KUBE-IPTABLES-HINT"
	// ServicesChain is the chain in which packets enter kube-proxy's rules.
	ServicesChain = "KUBE-SERVICES"
	// ProxyTable is the name of kube-proxy's tables in nftables mode.
	ProxyTable = "kube-proxy"
	// ProxyServices is the map in these tables that leads from the address, protocol and port of a
	// service to its chain (k8s.io/kubernetes/pkg/proxy/nftables, since 1.29).
	ProxyServices = "service-ips"
)

// KubeProxys reports whether kube-proxy, and no other program, writes a chain of that name. It
// is false for KUBE-MARK-MASQ and KUBE-POSTROUTING. A kubelet before 1.28 writes them too, so
// they may remain after kube-proxy has left the node.
func KubeProxys(chain string) bool { return kubeProxy.has(chain) && !kubelet.has(chain) }

// Kubelets reports whether kubelet writes a chain of that name, with any proxy, or did so until
// 1.27.
func Kubelets(chain string) bool { return chain == kubelet.Canary || kubelet.has(chain) }

// KubeRules reports whether kubelet, or kube-proxy in iptables mode, writes rules into a chain
// of that name. A manifest claims these chains even if it does not declare them now, so the
// chains of a deleted service are recognised. It is false for canaries and the hint.
func KubeRules(chain string) bool {
	for _, o := range []Owner{kubeProxy, kubelet} {
		for _, c := range o.Chains {
			if c.Mode == "" && !c.Hint && c.matches(chain) {
				return true
			}
		}
	}
	return false
}

var kubeProxy, kubelet = row("kube-proxy"), row("kubelet")

// ContainerChains returns the forms of the chains that CNI plugins make for single
// containers, and also portmap's forms separately. Package protect recognizes by them the
// chains of containers that are gone.
func ContainerChains() (all, portmaps []Form) {
	for _, o := range Named("cni") {
		all = append(all, o.Hashed()...)
	}
	return all, row("portmap").Hashed()
}
