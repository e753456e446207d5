package owners

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// networks has the owners of networks: overlays, policies and tunnels.
var networks = []Owner{
	{
		Name: "tailscale", Title: "tailscaled with iptables", Preset: "tailscale",
		// A start clears the chains, inserts the jumps, and then fills the chains.
		// --snat-subnet-routes=false deletes ts-postrouting's only rule. In nftables mode
		// tailscaled's tables have the names of iptables' own.
		Source: "tailscale 1.80 util/linuxfw/iptables_runner.go",
		Docs:   "https://tailscale.com/kb/1294/firewall-mode",
		Chains: []Chains{
			{Names: forms("ts-input", "ts-forward"), In: filter, Emptied: EmptyBriefly},
			{Names: forms("ts-postrouting")},
		},
		Heals:     "at its next start",
		Processes: []string{"tailscaled"},
		Removes:   ByFlush,
		Breaks:    "subnet routes, exit nodes, the DROP of forged addresses",
	},
	{
		Name: "calico", Title: "Calico in both modes, Canal", Preset: "calico",
		// In iptables mode each comment has a hash of the rule. Felix inserts its jumps first,
		// in raw too, and appends two rules to FORWARD. It corrects the chains that it reads
		// again.
		Source: "calico 3.30 felix/nftables; rules of 3.30 in iptables mode",
		Tried:  BySaved,
		Docs:   "https://docs.tigera.io/calico/latest/reference/felix/configuration",
		Chains: []Chains{{Names: forms("cali-*")}},
		Straight: straight("filter", "FORWARD",
			`-m comment --comment <cali> -m comment --comment "Policy explicitly accepted packet." -m mark --mark <mark> -j ACCEPT`,
			`-m comment --comment <cali> -j MARK --set-xmark <mark>`,
		),
		Tables: []Table{
			{Name: "calico", Back: "base chains", Accepted: "other chains, and sets", Families: both, Habits: felix},
			{Name: "calico-arp", Back: "base chains", Accepted: "other chains, and sets", Families: []tableid.Family{tableid.ARP}, Habits: felix},
		},
		Processes: []string{"calico-node"},
		Kin:       []string{"calico*"},
		Heals:     "within 60 to 180 s; in nftables mode partly",
		Removes:   ByName,
		Breaks:    "network policy, and pods' way out",
	},
	{
		Name: "flannel", Title: "flannel, also of k3s", Preset: "flannel",
		// A restart empties the chains for seconds. FLANNEL-POSTRTG ought to be first in
		// POSTROUTING, but 0.28 appends its jump. If a rule is missing, flannel writes all of
		// them again, in one iptables-restore.
		Source: "flannel 0.28 pkg/trafficmngr/{iptables,nftables}",
		Tried:  ByProgram,
		Docs:   "https://github.com/flannel-io/flannel/tree/master/Documentation",
		Chains: []Chains{
			{Names: forms("FLANNEL-POSTRTG"), In: nat, Emptied: EmptyBriefly},
			{Names: forms("FLANNEL-FWD"), In: filter, Emptied: EmptyBriefly},
		},
		Tables: []Table{
			// With EnableNFTables. A start flushes a chain and fills it in one commit. In
			// iptables mode a start deletes both tables.
			{Name: "flannel-ipv4", Back: "each chain", Families: []tableid.Family{tableid.IPv4}, Habits: flannelNative},
			{Name: "flannel-ipv6", Back: "each chain", Families: []tableid.Family{tableid.IPv6}, Habits: flannelNative},
		},
		Processes: []string{"flanneld", "k3s", "k3s-server", "k3s-agent"},
		Kin:       []string{"flannel*"},
		Heals:     "within 5 s; older versions and nftables mode never",
		Removes:   ByFlush,
		Breaks:    "pods' way out, and their traffic if FORWARD drops",
	},
	{
		Name: "kube-router", Title: "kube-router's policies, also of k3s", Preset: "kube-router",
		// kube-router saves the table filter, edits it and restores it as a whole. It loses all
		// rules that other programs write between save and restore.
		Source: "kube-router pkg/controllers/netpol: one iptables-restore of the table filter, without --noflush",
		Docs:   "https://www.kube-router.io/docs/",
		Chains: []Chains{
			{Names: forms("KUBE-ROUTER-INPUT", "KUBE-ROUTER-FORWARD", "KUBE-ROUTER-OUTPUT", "KUBE-NWPLCY-DEFAULT", "KUBE-NWPLCY-<base32:16>")},
			{Names: forms("KUBE-POD-FW-<base32:16>"), In: filter, Emptied: EmptyUnreferenced},
		},
		Straight: straight("filter", "FORWARD",
			`-i kube-bridge -m comment --comment "allow outbound traffic from pods" -j ACCEPT`,
			`-o kube-bridge -m comment --comment "allow inbound traffic to pods" -j ACCEPT`,
			`-o <interface> -m comment --comment "allow outbound node port traffic on node interface with which node ip is associated" -j ACCEPT`,
		),
		Processes: []string{"kube-router", "k3s", "k3s-server", "k3s-agent"},
		Heals:     "within 5 minutes",
		Removes:   WholeTable,
		Breaks:    "network policy: pods are open",
	},
	{
		Name: "aws-node", Title: "AWS VPC CNI", Preset: "aws-node",
		Source: "rules as aws-node writes them",
		Tried:  BySaved,
		Docs:   "https://github.com/aws/amazon-vpc-cni-k8s",
		Chains: []Chains{{Names: forms("AWS-SNAT-CHAIN-<digits>", "AWS-CONNMARK-CHAIN-<digits>")}},
		Straight: append(straight("nat", "PREROUTING",
			`-m comment --comment "AWS, CONNMARK" -j CONNMARK --restore-mark --nfmask <mark> --ctmask <mark>`,
		), straight("mangle", "PREROUTING",
			`-i <interface> -m comment --comment "AWS, primary ENI" -m addrtype --dst-type LOCAL --limit-iface-in -j CONNMARK --set-xmark <value>`,
			`-i <interface> -m comment --comment "AWS, primary ENI" -j CONNMARK --restore-mark --nfmask <mark> --ctmask <mark>`,
		)...),
		// For the mark, where aws-node uses nftables. The table has its rules of nat
		// PREROUTING.
		Tables:    []Table{{Name: "aws-cni", Families: []tableid.Family{tableid.IPv4}}},
		Processes: []string{"aws-k8s-agent"},
		Kin:       []string{"aws-*"},
		Heals:     "at its next start",
		Breaks:    "pods' way out",
	},
	{
		Name: "istio", Title: "Istio in ambient mode", Preset: "istio",
		// istio-cni writes the chain once. Its ipset has the pods' addresses.
		Source: "rules as istio-cni writes them",
		Tried:  BySaved,
		Docs:   "https://istio.io/latest/docs/ambient/architecture/traffic-redirection/",
		Chains: []Chains{{Names: forms("ISTIO_POSTRT")}},
		Kin:    []string{"istio*", "pilot-agent"},
		Heals:  "at istio-cni's next start",
		Breaks: "kubelet's probes of pods under strict mTLS",
	},
	{
		Name: "cilium", Title: "Cilium", Preset: "cilium",
		// A start renames the chains (-E CILIUM_X OLD_CILIUM_X), makes new ones and their
		// jumps, and deletes the old ones. A renamed chain counts as removed by its owner.
		Source:    "cilium pkg/datapath/iptables/iptables.go; rules of 1.11 to 1.17",
		Tried:     BySaved,
		Docs:      "https://docs.cilium.io/en/stable/network/concepts/masquerading/",
		Chains:    []Chains{{Names: forms("CILIUM_*")}},
		Processes: []string{"cilium-agent"},
		Kin:       []string{"cilium*"},
		Heals:     "at its next start, or within 30 minutes",
		Removes:   ByName,
		Breaks:    "masquerading, and traffic to Cilium's proxy",
	},
	{
		Name: "weave", Title: "Weave Net", Preset: "weave",
		// Weave's rules of FORWARD have this order: a DROP behind a lost jump closes all pods.
		Source: "weave net and npc, docs/fastdp-crypto.md; rules of 2.5 to 2.8",
		Tried:  BySaved,
		Docs:   "https://github.com/weaveworks/weave",
		Chains: []Chains{{Names: forms("WEAVE", "WEAVE-*")}},
		Straight: slices.Concat(straight("filter", "INPUT",
			`-d 127.0.0.1/32 -p tcp -m tcp --dport 6784 -m addrtype ! --src-type LOCAL -m conntrack ! --ctstate RELATED,ESTABLISHED -m comment --comment "Block non-local access to Weave Net control port" -j DROP`,
		), straight("filter", "FORWARD",
			"-o weave -m state --state NEW -j NFLOG --nflog-group 86",
			"-o weave -j DROP",
			"-i weave ! -o weave -j ACCEPT",
			"-o weave -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
		), straight("filter", "OUTPUT",
			"! -p esp -m policy --dir out --pol none -m mark --mark 0x20000/0x20000 -j DROP",
		)),
		Processes: []string{"weaver", "weave-npc", "weave-kube"},
		Kin:       []string{"weave*"},
		Canary:    "WEAVE-CANARY",
		Heals:     "once it finds its canary gone",
		Removes:   ByName,
		Breaks:    "pods' way out, and network policy",
	},
	{
		Name: "kube-ovn", Title: "kube-ovn", Preset: "kube-ovn",
		Source: "kube-ovn pkg/util/const.go, pkg/daemon/gateway_linux.go, dist/images/uninstall.sh",
		Docs:   "https://kubeovn.github.io/docs/stable/en/",
		Chains: []Chains{{Names: forms("OVN-PREROUTING", "OVN-POSTROUTING", "OVN-OUTPUT", "OVN-MASQUERADE", "OVN-NAT-POLICY", "OVN-NAT-PSUBNET-*")}},
		Straight: slices.Concat(ovnAccepts("INPUT"), ovnAccepts("FORWARD"), straight("filter", "OUTPUT",
			"-p udp -m udp --dport 6081 -j MARK --set-xmark 0x0/0xffffffff",
			"-p udp -m udp --dport 4789 -j MARK --set-xmark 0x0/0xffffffff",
		)),
		Processes: []string{"kube-ovn-daemon"},
		Kin:       []string{"ovn*", "kube-ovn*"},
		Heals:     "within seconds",
		Removes:   ByName,
		Breaks:    "pods' way out, and their traffic if FORWARD drops",
	},
	{
		Name: "ovn-kubernetes", Title: "OVN-Kubernetes, also of OpenShift", Preset: "ovn-kubernetes",
		Source:    "ovn-kubernetes go-controller/pkg/node, docs/design",
		Docs:      "https://ovn-kubernetes.io/",
		Chains:    []Chains{{Names: forms("OVN-KUBE-*")}},
		Tables:    []Table{{Name: "ovn-kubernetes", Families: []tableid.Family{tableid.Inet}}},
		Kin:       []string{"ovnkube*"},
		Processes: []string{"ovnkube"},
		Heals:     "node ports within minutes, the rest at its next start",
		Removes:   ByName,
		Breaks:    "node ports, external addresses and egress addresses",
	},
	{
		Name: "openshift-sdn", Title: "OpenShift SDN, until 4.16", Preset: "openshift-sdn",
		Source:    "openshift/sdn pkg/network/node/iptables.go; rules of 3.9 to 4",
		Tried:     BySaved,
		Docs:      "https://github.com/openshift/sdn",
		Chains:    []Chains{{Names: forms("OPENSHIFT-*")}},
		Kin:       []string{"openshift-sdn*"},
		Processes: []string{"openshift-sdn-n"},
		Heals:     "within 30 s",
		Removes:   ByName,
		Breaks:    "pods' way out, VXLAN from other nodes, egress addresses",
	},
	{
		Name: "antrea", Title: "Antrea", Preset: "antrea",
		// A sync declares and fills each of its chains, in one restore for each family.
		Source:    "antrea pkg/agent/route/route_linux.go, and its tests",
		Docs:      "https://antrea.io/docs/main/docs/design/architecture/",
		Chains:    []Chains{{Names: forms("ANTREA-*")}},
		Processes: []string{"antrea-agent"},
		Kin:       []string{"antrea*"},
		Heals:     "within a minute",
		Removes:   ByName,
		Breaks:    "pods' way out, and policies of nodes",
	},
	{
		Name: "ip-masq-agent", Title: "ip-masq-agent, also of GKE", Preset: "ip-masq-agent",
		// A sync declares and fills its chain in one restore. The last rule is MASQUERADE.
		Source:    "ip-masq-agent cmd/ip-masq-agent/ip-masq-agent.go and its tests; --masq-chain names the chain",
		Docs:      "https://kubernetes.io/docs/tasks/administer-cluster/ip-masq-agent/",
		Chains:    []Chains{{Names: forms("IP-MASQ", "IP-MASQ-AGENT"), In: nat, Emptied: EmptyNever}},
		Processes: []string{"ip-masq-agent"},
		Kin:       []string{"ip-masq-agent"},
		Heals:     "within a minute",
		Removes:   ByName,
		Breaks:    "pods' way out",
	},
	{
		Name: "microk8s", Title: "MicroK8s", Preset: "microk8s",
		Source:   "microk8s-resources/wrappers; reports of its users",
		Tried:    BySaved,
		Docs:     "https://microk8s.io/docs",
		Straight: byComment("generated for MicroK8s pods", "filter FORWARD"),
		Heals:    "at its next start",
		Breaks:   "pods' traffic if FORWARD drops",
	},
	{
		Name: "kube2iam", Title: "kube2iam and kiam", Preset: "kube2iam",
		Source:    "kube2iam iptables/iptables.go; kiam",
		Docs:      "https://github.com/jtblin/kube2iam",
		Straight:  unsigned(straight("nat", "PREROUTING", "-d 169.254.169.254/32 -i <interface> -p tcp -m tcp --dport 80 -j DNAT --to-destination <address>")),
		Processes: []string{"kube2iam", "kiam"},
		Heals:     "at its next start",
		Breaks:    "cloud roles: pods get the node's",
	},
	{
		Name: "node-local-dns", Title: "NodeLocal DNSCache", Preset: "node-local-dns",
		// For each of its addresses: DNS and, behind it, kubelet's requests to the health port.
		// It inserts each rule first if -C does not find it. At its end it deletes each rule
		// until -C no longer finds it. Images before 1.22.19 write no comments. Such a rule is
		// not recognised, because any program could have written it.
		Source: "kubernetes/dns 1.26 cmd/node-cache/app/cache_app.go",
		Docs:   "https://kubernetes.io/docs/tasks/administer-cluster/nodelocaldns/",
		Straight: slices.Concat(straight("raw", "PREROUTING",
			`-d <address> -p <proto> -m <proto> --dport <port> -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j NOTRACK`,
		), straight("raw", "OUTPUT",
			`-s <address> -p <proto> -m <proto> --sport <port> -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j NOTRACK`,
			`-d <address> -p <proto> -m <proto> --dport <port> -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j NOTRACK`,
		), straight("filter", "INPUT",
			`-d <address> -p <proto> -m <proto> --dport <port> -m comment --comment "NodeLocal DNS Cache: allow DNS traffic" -j ACCEPT`,
		), straight("filter", "OUTPUT",
			`-s <address> -p <proto> -m <proto> --sport <port> -m comment --comment "NodeLocal DNS Cache: allow DNS traffic" -j ACCEPT`,
		)),
		Processes: []string{"node-cache"},
		Kin:       []string{"node-cache"},
		Heals:     "within a minute",
		Removes:   ByName,
		Breaks:    "NOTRACK of DNS, and DNS if INPUT drops",
	},
	{
		Name: "wg-quick", Title: "wg-quick and its PostUp",
		// Its own rules have a comment, by which its end removes them. PostUp's rules have the
		// form of most guides.
		Source: "wireguard-tools src/wg-quick/linux.bash; configurations of its users",
		Docs:   "https://git.zx2c4.com/wireguard-tools/about/src/man/wg-quick.8",
		Straight: slices.Concat(
			byComment("wg-quick(8) rule for *", "raw PREROUTING", "mangle PREROUTING", "mangle POSTROUTING"),
			unsigned(straight("filter", "INPUT", "-i <wg> -j ACCEPT")),
			unsigned(straight("filter", "FORWARD", "-i <wg> -j ACCEPT", "-o <wg> -j ACCEPT", "-i <wg> -o <interface> -j ACCEPT", "-i <interface> -o <wg> -j ACCEPT",
				"-o <wg> -m state --state <states> -j ACCEPT", "-o <wg> -m conntrack --ctstate <states> -j ACCEPT")),
		),
		Heals:   "at its next `up`",
		Removes: ByName,
		Breaks:  "traffic through the tunnel",
	},
}

// felix are Felix's habits in nftables mode. Base chains keep their jumps; a chain or set may
// lose its last pod.
var felix = Habits{Known: true, Resyncs: true, Base: Keeps, Others: Empties, Sets: Empties}

// flannelNative are flannel's habits in nftables mode: it has no sets, and two base chains.
var flannelNative = Habits{Known: true, Base: Keeps, Others: Keeps, Sets: Keeps}

// ovnAccepts returns the rules that kube-ovn puts into a built-in chain, for both families.
func ovnAccepts(chain string) []Straight {
	var specs []string
	for _, set := range []string{"ovn40subnets", "ovn40services", "ovn60subnets", "ovn60services"} {
		specs = append(specs, "-m set --match-set "+set+" src -j ACCEPT", "-m set --match-set "+set+" dst -j ACCEPT")
	}
	return straight("filter", chain, specs...)
}
