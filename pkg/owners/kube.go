package owners

// KubeProxys reports whether kube-proxy, and no other program, writes a chain of that name. It is
// false for KUBE-MARK-MASQ and KUBE-POSTROUTING: a kubelet before 1.28 writes them too, so they
// may remain after kube-proxy has left the node.
func KubeProxys(chain string) bool { return kubeProxy.has(chain) && !kubelet.has(chain) }

var kubeProxy, kubelet = row("kube-proxy"), row("kubelet")

// ContainerChains returns the forms of the chains that CNI plugins make for one container each;
// those of portmap are also returned alone.
func ContainerChains() (all, portmaps []Form) {
	for _, o := range Named("cni") {
		all = append(all, o.Hashed()...)
	}
	return all, row("portmap").Hashed()
}
