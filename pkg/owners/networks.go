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
		// its tables have the names of iptables' own.
		Source: "tailscale 1.80 util/linuxfw/iptables_runner.go",
		Chains: []Chains{
			{Names: forms("ts-input", "ts-forward"), In: filter, Emptied: EmptyBriefly},
			{Names: forms("ts-postrouting")},
		},
		Heals:     "never, until tailscaled restarts",
		Processes: []string{"tailscaled"},
		Removes:   ByFlush,
		Breaks:    "subnet routes and exit nodes, and the DROP of forged addresses",
	},
	{
		Name: "calico", Title: "Calico in both modes, Canal", Preset: "calico",
		// In iptables mode each comment has a hash of the rule. Felix inserts its jumps
		// first, in raw too, and appends two rules to FORWARD. It corrects the chains
		// that it reads again.
		Source: "calico 3.30 felix/nftables; rules of 3.30 in iptables mode",
		Chains: []Chains{{Names: forms("cali-*")}},
		Straight: straight("filter", "FORWARD",
			`-m comment --comment <cali> -m comment --comment "Policy explicitly accepted packet." -m mark --mark <mark> -j ACCEPT`,
			`-m comment --comment <cali> -j MARK --set-xmark <mark>`,
		),
		Tables: []Table{
			{Name: "calico", Back: "base chains", Accepted: "other chains, and sets", Families: both, Processes: []string{"calico-node"}, Habits: felix},
			{Name: "calico-arp", Back: "base chains", Accepted: "other chains, and sets", Families: []tableid.Family{tableid.ARP}, Processes: []string{"calico-node"}, Habits: felix},
		},
		Processes: []string{"calico-node"},
		Kin:       []string{"calico*"},
		Heals:     "within 60 to 180 s; in nftables mode not all of it",
		Removes:   ByName,
		Breaks:    "network policy, and pods' way out",
	},
	{
		Name: "flannel", Title: "flannel, that of k3s too", Preset: "flannel",
		// A restart empties the chains for seconds. FLANNEL-POSTRTG is to be first in POSTROUTING.
		Source: "flannel pkg/trafficmngr/iptables",
		Chains: []Chains{
			{Names: forms("FLANNEL-POSTRTG"), In: nat, Emptied: EmptyBriefly},
			{Names: forms("FLANNEL-FWD"), In: filter, Emptied: EmptyBriefly},
		},
		Processes: []string{"flanneld", "k3s", "k3s-server", "k3s-agent"},
		Kin:       []string{"flannel*"},
		Heals:     "within 5 s; older ones never",
		Removes:   ByFlush,
		Breaks:    "pods' way out, and their traffic where FORWARD drops",
	},
	{
		Name: "kube-router", Title: "kube-router's network policies, those of k3s too", Preset: "kube-router",
		// It saves the table filter, edits it and restores it as a whole: what other programs wrote
		// between save and restore is lost.
		Source: "kube-router pkg/controllers/netpol: one iptables-restore of the table filter, without --noflush",
		Chains: []Chains{
			{Names: forms("KUBE-ROUTER-INPUT", "KUBE-ROUTER-FORWARD", "KUBE-ROUTER-OUTPUT", "KUBE-NWPLCY-DEFAULT", "KUBE-NWPLCY-<base32:16>")},
			{Names: forms("KUBE-POD-FW-<base32:16>"), In: filter, Emptied: EmptyUnreferenced},
		},
		Straight: straight("filter", "FORWARD",
			`-i kube-bridge -m comment --comment "allow outbound traffic from pods" -j ACCEPT`,
			`-o kube-bridge -m comment --comment "allow inbound traffic to pods" -j ACCEPT`,
		),
		Processes: []string{"kube-router", "k3s", "k3s-server", "k3s-agent"},
		Heals:     "within 5 minutes",
		Removes:   WholeTable,
		Breaks:    "network policy: pods are open meanwhile",
	},
	{
		Name: "aws-node", Title: "AWS VPC CNI", Preset: "aws-node",
		Source: "rules as aws-node writes them",
		Chains: []Chains{{Names: forms("AWS-SNAT-CHAIN-<digits>", "AWS-CONNMARK-CHAIN-<digits>")}},
		Straight: append(straight("nat", "PREROUTING",
			`-m comment --comment "AWS, CONNMARK" -j CONNMARK --restore-mark --nfmask <mark> --ctmask <mark>`,
		), straight("mangle", "PREROUTING",
			`-i <interface> -m comment --comment "AWS, primary ENI" -m addrtype --dst-type LOCAL --limit-iface-in -j CONNMARK --set-xmark <value>`,
			`-i <interface> -m comment --comment "AWS, primary ENI" -j CONNMARK --restore-mark --nfmask <mark> --ctmask <mark>`,
		)...),
		Kin:    []string{"aws-*"},
		Heals:  "at its next start",
		Breaks: "pods' way out",
	},
	{
		Name: "istio", Title: "Istio in ambient mode", Preset: "istio",
		// istio-cni writes the chain once. Its ipset has the pods' addresses.
		Source: "rules as istio-cni writes them",
		Chains: []Chains{{Names: forms("ISTIO_POSTRT")}},
		Kin:    []string{"istio*", "pilot-agent"},
		Heals:  "never, until istio-cni starts again",
		Breaks: "kubelet's probes of pods under strict mTLS",
	},
	{
		Name: "cilium", Title: "Cilium",
		// A start renames the chains (-E CILIUM_X OLD_CILIUM_X), writes new ones, and
		// deletes the old ones rule by rule.
		Source:  "reports of its users",
		Chains:  []Chains{{Names: forms("CILIUM_*")}},
		Kin:     []string{"cilium*"},
		Heals:   "at the agent's next start, or within 30 minutes",
		Removes: ByName,
		Breaks:  "masquerading",
	},
	{
		Name: "weave", Title: "Weave Net",
		Source:  "weave net and npc/constants.go",
		Chains:  []Chains{{Names: forms("WEAVE", "WEAVE-*")}},
		Kin:     []string{"weave*"},
		Canary:  "WEAVE-CANARY",
		Heals:   "when its canary is gone",
		Removes: ByName,
		Breaks:  "pods' way out, and network policy",
	},
	{
		Name: "kube-ovn", Title: "kube-ovn",
		Source: "kube-ovn pkg/util/const.go",
		Chains: []Chains{{Names: forms("OVN-PREROUTING", "OVN-POSTROUTING", "OVN-OUTPUT", "OVN-MASQUERADE", "OVN-NAT-POLICY", "OVN-NAT-PSUBNET-*")}},
		Kin:    []string{"ovn*"},
		Heals:  "not known",
		Breaks: "pods' way out",
	},
	{
		Name: "antrea", Title: "Antrea",
		Source: "reports of its users", // no chain of it was read yet
		Kin:    []string{"antrea*"},
		Heals:  "not known",
		Breaks: "pods' way out",
	},
	{
		Name: "ip-masq-agent", Title: "ip-masq-agent, that of GKE too",
		Source: "reports of its users",
		Chains: []Chains{{Names: forms("IP-MASQ", "IP-MASQ-AGENT")}},
		Kin:    []string{"ip-masq-agent"},
		Heals:  "within a minute",
		Breaks: "pods' way out",
	},
	{
		Name: "node-local-dns", Title: "NodeLocal DNSCache", Preset: "node-local-dns",
		// For each of its addresses: DNS and, behind it, kubelet's questions to the health
		// port. It inserts each rule first where -C does not find it. Its end deletes each
		// until -C does not find it either. Images before 1.22.19 write no comments: such a
		// rule is not recognised, because any program could have written it.
		Source: "kubernetes/dns 1.26 cmd/node-cache/app/cache_app.go",
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
		Breaks:    "NOTRACK of DNS, and DNS itself where INPUT drops",
	},
}

// felix are Felix's habits in nftables mode: base chains keep their jumps; a chain or set loses its
// last pod.
var felix = Habits{Known: true, Resyncs: true, Base: Keeps, Others: Empties, Sets: Empties}
