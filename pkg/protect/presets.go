package protect

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A preset is what one owner writes with iptables: its chains, and its rules in built-in chains.
// See presetTables for what it writes with nftables.
type preset struct {
	exact  []string
	hashed []hashedName
	rules  []namedRule
	// piecewise says that many containers or networks share each of the exact chains, and that
	// the owner writes the rules of one at a time. piecewiseHashed says so of the hashed ones.
	piecewise, piecewiseHashed bool
}

// PresetNames returns the names of all presets, as --protect takes them.
func PresetNames() []string {
	return []string{"kube", "cni", "docker", "podman", "libvirt", "tailscale", "calico"}
}

// presetOf returns the preset of that name.
//
// It lists the chains of an owner by their exact names: a glob such as KUBE-* would include
// kube-router's chains and every canary. Names that an owner generates, from a hash, are
// recognised by their form.
//
// Sources of the lists, read in 2026:
//
//	kube       k8s.io/kubernetes 1.36 pkg/proxy/{iptables,ipvs}, pkg/kubelet;
//	           KUBE-XLB-* until 1.23, KUBE-MARK-DROP until 1.27
//	cni        containernetworking/plugins 1.9 plugins/meta/{portmap,firewall}, pkg/ip/ipmasq;
//	           CNI-SN-* until 0.7
//	docker     moby 28 and 29 daemon/libnetwork/{iptables,drivers/bridge/internal/iptabler} and
//	           its golden files; the rules in FORWARD until 28.0
//	podman     netavark 1.17 src/firewall/varktables/types.rs; hashes are the first 13 digits
//	           of a SHA-512 (src/network/core_utils.rs)
//	libvirt    libvirt 10 src/network/network_iptables.c
//	tailscale  tailscale 1.80 util/linuxfw/iptables_runner.go
func presetOf(name string) (preset, bool) {
	switch name {
	case "kube":
		return kubePreset(), true
	case "kube-proxy": // for the subcommand cleanup only: PresetNames does not list it
		return kubeProxyPreset(), true
	case "cni":
		return preset{
			exact: []string{
				"CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ", "CNI-HOSTPORT-SNAT",
				"CNI-FORWARD", "CNI-ADMIN", "CNI-ISOLATION-STAGE-1", "CNI-ISOLATION-STAGE-2",
			},
			hashed:    cniHashed(),
			piecewise: true,
		}, true
	case "docker":
		return dockerPreset(), true
	case "podman":
		return preset{
			exact: []string{
				"NETAVARK-HOSTPORT-DNAT", "NETAVARK-HOSTPORT-SETMARK", "NETAVARK-HOSTPORT-MASQ",
				"NETAVARK_FORWARD", "NETAVARK_INPUT", "NETAVARK_ISOLATION_1", "NETAVARK_ISOLATION_2", "NETAVARK_ISOLATION_3",
			},
			hashed:    []hashedName{{"NETAVARK-DN-", 13, hexUp}, {"NETAVARK-", 13, hexUp}}, // one for each network
			piecewise: true, piecewiseHashed: true,
		}, true
	case "libvirt":
		return preset{exact: []string{"LIBVIRT_INP", "LIBVIRT_OUT", "LIBVIRT_FWO", "LIBVIRT_FWI", "LIBVIRT_FWX", "LIBVIRT_PRT"}, piecewise: true}, true
	case "tailscale":
		return preset{exact: []string{"ts-input", "ts-forward", "ts-postrouting"}}, true
	case "calico": // native tables only: in iptables mode Felix reads its own rules again
		return preset{}, true
	default:
		return preset{}, false
	}
}

// cniHashed has the forms of the chains that CNI plugins make for one container each. ipMasq's is
// CNI- and 24 digits. portmap's fill the 28 characters that a chain's name may have.
func cniHashed() []hashedName {
	return []hashedName{{"CNI-DN-", 0, hexLow}, {"CNI-SN-", 0, hexLow}, {"CNI-", 24, hexLow}}
}

func kubePreset() preset {
	p := preset{exact: []string{
		"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING",
		"KUBE-MARK-MASQ", "KUBE-MARK-DROP", "KUBE-FORWARD", "KUBE-PROXY-FIREWALL", "KUBE-FIREWALL",
		"KUBE-IPTABLES-HINT", "KUBE-LOAD-BALANCER", "KUBE-NODE-PORT", "KUBE-SOURCE-RANGES-FIREWALL",
		"KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
	}}
	for _, prefix := range []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-FW-", "KUBE-XLB-"} {
		p.hashed = append(p.hashed, hashedName{prefix, 16, base32})
	}
	return p
}

// kubeProxyPreset is kubePreset without the chains that only kubelet writes. kubelet does not
// write them again as long as its own canary stands.
func kubeProxyPreset() preset {
	p := kubePreset()
	p.exact = slices.DeleteFunc(p.exact, func(chain string) bool {
		return slices.Contains([]string{"KUBE-FIREWALL", "KUBE-MARK-DROP", "KUBE-IPTABLES-HINT"}, chain)
	})
	return p
}

// dockerPreset has Docker's chains, and the rules that Docker writes into built-in chains: for
// each network and, with the userland proxy turned off, for each published port. A rule for a
// bridge whose name the user chose is not recognised: any program could have written it.
func dockerPreset() preset {
	p := preset{exact: []string{
		"DOCKER", "DOCKER-USER", "DOCKER-FORWARD", "DOCKER-BRIDGE", "DOCKER-CT", "DOCKER-INTERNAL", "DOCKER-INGRESS",
		"DOCKER-ISOLATION-STAGE-1", "DOCKER-ISOLATION-STAGE-2",
	}, piecewise: true}
	for _, spec := range []string{
		"-s <net> ! -o <bridge> -j MASQUERADE",
		"-s <net> ! -o <bridge> -j SNAT --to-source <ip>",
		"-o <bridge> -m addrtype --src-type LOCAL -j MASQUERADE",
		"-o <bridge> -m addrtype --src-type LOCAL -j SNAT --to-source <ip>",
		"-s <net> -d <net> -p <proto> -m <proto> --dport <port> -j MASQUERADE",
	} {
		p.rules = append(p.rules, nameRule(rules.Nat, "POSTROUTING", spec))
	}
	for _, spec := range []string{
		"-o <bridge> -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
		"-i <bridge> ! -o <bridge> -j ACCEPT",
		"-i <bridge> -o <bridge> -j ACCEPT",
		"-i <bridge> -o <bridge> -j DROP",
	} {
		p.rules = append(p.rules, nameRule(rules.Filter, "FORWARD", spec))
	}
	return p
}
