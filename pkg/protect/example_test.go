package protect_test

import (
	"fmt"

	"github.com/canaryd/canaryd/pkg/protect"
)

// A selector accepts presets and globs. It protects no owner's canary, even if a glob matches.
func ExampleNewSelector() {
	selector, err := protect.NewSelector([]string{"cni", "MY-*"})
	if err != nil {
		panic(err)
	}
	for _, chain := range []string{"CNI-HOSTPORT-DNAT", "MY-FIREWALL", "MY-CANARY", "KUBE-SERVICES", "INPUT"} {
		fmt.Println(chain, selector.Protects(chain))
	}
	_, err = protect.NewSelector([]string{"kubernetes"})
	fmt.Println(err)
	// Output:
	// CNI-HOSTPORT-DNAT true
	// MY-FIREWALL true
	// MY-CANARY false
	// KUBE-SERVICES false
	// INPUT false
	// "kubernetes" is no preset (kube, cni, crio, docker, podman, libvirt, lxd, incus, networkd, fail2ban, crowdsec, tailscale, calico, flannel, kube-router, aws-node, istio, cilium, weave, kube-ovn, ovn-kubernetes, openshift-sdn, antrea, ip-masq-agent, microk8s, kube2iam, node-local-dns); a chain of just that name is protected by the glob '[k]ubernetes'
}
