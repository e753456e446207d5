package protect

import (
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A preset is what one owner writes: with iptables its chains, and its rules in built-in chains;
// with nftables, where it uses that itself, its native tables.
type preset struct {
	exact  []string
	hashed []hashedName
	rules  []namedRule
	// piecewise says that many containers or networks share each of the exact chains, and that
	// the owner writes the rules of one at a time. piecewiseHashed says so of the hashed ones.
	piecewise, piecewiseHashed bool
	native                     []nativeGlob
}

// PresetNames returns the names of all presets, as --protect takes them.
func PresetNames() []string {
	return []string{"kube", "cni", "docker", "podman", "libvirt", "tailscale", "calico"}
}

// presets are the presets by name. They list the chains of an owner by their exact names: a glob
// such as KUBE-* would include kube-router's chains and every canary. Names that an owner
// generates, from a hash, are recognised by their form.
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
//
// The native tables are those of kubernetes 1.36.3, and of the CNI plugins, moby, netavark, libvirt
// and Calico as of 2026.
var presets = map[string]preset{
	"kube": kubePreset("KUBE-FIREWALL", "KUBE-MARK-DROP", "KUBE-IPTABLES-HINT"),
	// For the subcommand cleanup only: PresetNames does not list it. It lacks the chains that only
	// kubelet writes, which does not write them again as long as its own canary stands.
	"kube-proxy": kubePreset(),
	"cni": {
		exact: []string{
			"CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ", "CNI-HOSTPORT-SNAT",
			"CNI-FORWARD", "CNI-ADMIN", "CNI-ISOLATION-STAGE-1", "CNI-ISOLATION-STAGE-2",
		},
		hashed:    cniHashed,
		piecewise: true,
		native:    append(inBoth("cni_hostport"), nativeGlob{tableid.Inet, "cni_plugins_masquerade"}),
	},
	"docker": dockerPreset(),
	"podman": {
		exact: []string{
			"NETAVARK-HOSTPORT-DNAT", "NETAVARK-HOSTPORT-SETMARK", "NETAVARK-HOSTPORT-MASQ",
			"NETAVARK_FORWARD", "NETAVARK_INPUT", "NETAVARK_ISOLATION_1", "NETAVARK_ISOLATION_2", "NETAVARK_ISOLATION_3",
		},
		hashed:    []hashedName{{"NETAVARK-DN-", 13, hexUp}, {"NETAVARK-", 13, hexUp}}, // one for each network
		piecewise: true, piecewiseHashed: true,
		native: []nativeGlob{{tableid.Inet, "netavark"}},
	},
	"libvirt": {
		exact:     []string{"LIBVIRT_INP", "LIBVIRT_OUT", "LIBVIRT_FWO", "LIBVIRT_FWI", "LIBVIRT_FWX", "LIBVIRT_PRT"},
		piecewise: true,
		native:    inBoth("libvirt_network"),
	},
	"tailscale": {exact: []string{"ts-input", "ts-forward", "ts-postrouting"}},
	// native tables only: in iptables mode Felix reads its own rules again
	"calico": {native: append(inBoth("calico"), nativeGlob{tableid.ARP, "calico-arp"})},
}

// cniHashed are the forms of the chains that CNI plugins make for one container each. ipMasq's is
// CNI- and 24 digits. portmap's fill the 28 characters that a chain's name may have.
var cniHashed = []hashedName{{"CNI-DN-", 0, hexLow}, {"CNI-SN-", 0, hexLow}, {"CNI-", 24, hexLow}}

func kubePreset(kubelets ...string) preset {
	p := preset{exact: append(kubelets,
		"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING",
		"KUBE-MARK-MASQ", "KUBE-FORWARD", "KUBE-PROXY-FIREWALL", "KUBE-LOAD-BALANCER", "KUBE-NODE-PORT",
		"KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
	), native: inBoth("kube-proxy")}
	for _, prefix := range []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-FW-", "KUBE-XLB-"} {
		p.hashed = append(p.hashed, hashedName{prefix, 16, base32})
	}
	return p
}

// KubeProxys reports whether kube-proxy, and no other program, writes a chain of that name. It is
// false for KUBE-MARK-MASQ and KUBE-POSTROUTING: a kubelet before 1.28 writes them too, so they
// may remain after kube-proxy has left the node.
func KubeProxys(chain string) bool {
	if !strings.HasPrefix(chain, "KUBE-") || chain == "KUBE-MARK-MASQ" || chain == "KUBE-POSTROUTING" {
		return false
	}
	own := presets["kube-proxy"]
	return slices.Contains(own.exact, chain) || anyMatches(own.hashed, chain)
}

// dockerPreset has Docker's chains, and the rules that Docker writes into built-in chains: for
// each network and, with the userland proxy turned off, for each published port. A rule for a
// bridge whose name the user chose is not recognised: any program could have written it.
func dockerPreset() preset {
	p := preset{exact: []string{
		"DOCKER", "DOCKER-USER", "DOCKER-FORWARD", "DOCKER-BRIDGE", "DOCKER-CT", "DOCKER-INTERNAL", "DOCKER-INGRESS",
		"DOCKER-ISOLATION-STAGE-1", "DOCKER-ISOLATION-STAGE-2",
	}, piecewise: true, native: inBoth("docker-bridges")}
	for _, spec := range []string{
		"-s <net> ! -o <bridge> -j MASQUERADE",
		"-s <net> ! -o <bridge> -j SNAT --to-source <ip>",
		"-o <bridge> -m addrtype --src-type LOCAL -j MASQUERADE",
		"-o <bridge> -m addrtype --src-type LOCAL -j SNAT --to-source <ip>",
		"-s <net> -d <net> -p <proto> -m <proto> --dport <port> -j MASQUERADE",
	} {
		p.rules = append(p.rules, namedRule{rules.Nat, "POSTROUTING", strings.Fields(spec)})
	}
	for _, spec := range []string{
		"-o <bridge> -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
		"-i <bridge> ! -o <bridge> -j ACCEPT",
		"-i <bridge> -o <bridge> -j ACCEPT",
		"-i <bridge> -o <bridge> -j DROP",
	} {
		p.rules = append(p.rules, namedRule{rules.Filter, "FORWARD", strings.Fields(spec)})
	}
	return p
}
