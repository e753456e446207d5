package owners

import "github.com/canaryd/canaryd/pkg/tableid"

// networks has the owners of networks: overlays, policies and tunnels.
var networks = []Owner{
	{
		Name: "tailscale", Title: "tailscaled with iptables", Preset: "tailscale",
		// A start clears the chains, inserts the jumps, and then fills the chains.
		// --snat-subnet-routes=false deletes ts-postrouting's only rule. In nftables mode its tables have
		// the names of iptables' own.
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
		Name: "calico", Title: "Calico", Preset: "calico",
		// In iptables mode Felix reads its own rules again.
		Source: "calico 3.30 felix/nftables",
		Tables: []Table{
			{Name: "calico", Families: both, Processes: []string{"calico-node"}, Habits: felix},
			{Name: "calico-arp", Families: []tableid.Family{tableid.ARP}, Processes: []string{"calico-node"}, Habits: felix},
		},
		Heals:     "within 60 to 180 s, but not all of it",
		Processes: []string{"calico-node"},
		Kin:       []string{"calico*"},
		Removes:   ByName,
		Breaks:    "network policy, and pods' way out",
	},
	{
		Name: "flannel", Title: "flannel",
		// A restart empties the chains for seconds.
		Source: "flannel pkg/trafficmngr/iptables",
		Chains: []Chains{
			{Names: forms("FLANNEL-POSTRTG"), In: nat, Emptied: EmptyBriefly},
			{Names: forms("FLANNEL-FWD"), In: filter, Emptied: EmptyBriefly},
		},
		Heals:   "within 5 s; older ones never",
		Kin:     []string{"flannel*"},
		Removes: ByFlush,
		Breaks:  "pods' way out, and their traffic where FORWARD drops",
	},
	{
		Name: "kube-router", Title: "kube-router's network policies, those of k3s too",
		Source:  "kube-router pkg/controllers/netpol: one iptables-restore of the table filter",
		Chains:  []Chains{{Names: forms("KUBE-POD-FW-<base32:16>"), In: filter, Emptied: EmptyUnreferenced}},
		Heals:   "within 5 minutes",
		Kin:     []string{"kube-router"},
		Removes: WholeTable,
		Breaks:  "network policy: pods are open meanwhile",
	},
	{
		Name: "cilium", Title: "Cilium",
		Source:  "reports of its users",
		Kin:     []string{"cilium*"},
		Heals:   "at the agent's next start, or within 30 minutes",
		Removes: ByName,
		Breaks:  "masquerading, and proxies",
	},
	{
		Name: "antrea", Title: "Antrea",
		Source: "reports of its users",
		Kin:    []string{"antrea*"},
		Heals:  "by its own sync",
		Breaks: "pods' way out",
	},
	{
		Name: "kube-ovn", Title: "OVN's networks",
		Source: "reports of its users",
		Kin:    []string{"ovn*"},
		Heals:  "by its own sync",
		Breaks: "pods' way out",
	},
	{
		Name: "weave", Title: "Weave Net",
		Source: "reports of its users",
		Kin:    []string{"weave*"},
		Heals:  "by its own canary",
		Breaks: "pods' way out, and network policy",
	},
	{
		Name: "aws-node", Title: "AWS VPC CNI",
		Source: "reports of its users",
		Kin:    []string{"aws-*"},
		Heals:  "at its next start",
		Breaks: "pods' way out",
	},
	{
		Name: "istio", Title: "Istio",
		Source: "reports of its users",
		Kin:    []string{"istio*", "pilot-agent"},
		Heals:  "never, until istio-cni starts again",
		Breaks: "probes of kubelet in ambient mode",
	},
	{
		Name: "node-local-dns", Title: "NodeLocal DNSCache",
		Source: "reports of its users",
		Kin:    []string{"node-cache"},
		Heals:  "within a minute",
		Breaks: "DNS: its packets are tracked, and dropped where INPUT drops",
	},
	{
		Name: "ip-masq-agent", Title: "ip-masq-agent",
		Source: "reports of its users",
		Kin:    []string{"ip-masq-agent"},
		Heals:  "within a minute",
		Breaks: "pods' way out",
	},
}

// felix are Felix's habits in nftables mode: base chains keep their jumps; a chain or set loses its
// last pod.
var felix = Habits{Known: true, Resyncs: true, Base: Keeps, Others: Empties, Sets: Empties}
