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
		Heals:   "never, until tailscaled restarts",
		Removes: ByFlush,
		Breaks:  "subnet routes and exit nodes, and the DROP of forged addresses",
	},
	{
		Name: "calico", Title: "Calico", Preset: "calico",
		// In iptables mode Felix reads its own rules again.
		Source: "calico 3.30 felix/nftables",
		Tables: []Table{
			{Name: "calico", Families: both},
			{Name: "calico-arp", Families: []tableid.Family{tableid.ARP}},
		},
		Heals:   "within 60 to 180 s, but not all of it",
		Removes: ByName,
		Breaks:  "network policy, and pods' way out",
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
		Removes: ByFlush,
		Breaks:  "pods' way out, and their traffic where FORWARD drops",
	},
	{
		Name: "kube-router", Title: "kube-router's network policies, those of k3s too",
		Source:  "kube-router pkg/controllers/netpol: one iptables-restore of the table filter",
		Chains:  []Chains{{Names: forms("KUBE-POD-FW-<base32:16>"), In: filter, Emptied: EmptyUnreferenced}},
		Heals:   "within 5 minutes",
		Removes: WholeTable,
		Breaks:  "network policy: pods are open meanwhile",
	},
}
