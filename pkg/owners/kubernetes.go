package owners

import "github.com/canaryd/canaryd/pkg/tableid"

// kubernetes has the owners that each Kubernetes node may have, with any network.
var kubernetes = []Owner{
	{
		Name: "kube-proxy", Title: "kube-proxy in its three modes", Preset: "kube", Alone: true,
		// A sync rewrites each chain that it touches, and deletes stale chains, in one
		// iptables-restore of all tables. filter's chains hold rules for some services only,
		// and so does nat's KUBE-NODEPORTS. ipvs mode does the same.
		Source: "k8s.io/kubernetes 1.36.3 pkg/proxy/{iptables,ipvs,nftables}",
		Tried:  ByProgram,
		Docs:   "https://kubernetes.io/docs/reference/networking/virtual-ips/",
		Chains: []Chains{
			{Names: forms("KUBE-SERVICES", "KUBE-MARK-MASQ", "KUBE-POSTROUTING"), In: nat, Emptied: EmptyNever},
			{Names: forms("KUBE-FORWARD"), In: filter, Emptied: EmptyNever},
			{Names: forms("KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-PROXY-FIREWALL")},
			{
				Names: forms("KUBE-LOAD-BALANCER", "KUBE-NODE-PORT", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER"),
				Mode:  "ipvs mode",
			},
			{
				Names: forms("KUBE-SVC-<base32:16>", "KUBE-SVL-<base32:16>", "KUBE-SEP-<base32:16>", "KUBE-EXT-<base32:16>", "KUBE-FW-<base32:16>"),
				In:    nat, Emptied: EmptyUnreferenced,
			},
			{Names: forms("KUBE-XLB-<base32:16>"), In: nat, Emptied: EmptyUnreferenced, Mode: "until 1.23"},
		},
		Tables: []Table{{Name: "kube-proxy", Back: "each chain that packets come to; each set and map", Accepted: "the only element of `no-endpoint-services` or `no-endpoint-nodeports`", Families: both,
			// setupNFTables writes the rules of base chains and of the chains that they jump
			// to. kube-proxy empties a service's chain in the commit that deletes the elements
			// that lead there. It deletes elements together with rules of the service's chains.
			// Only a service without endpoints that loses some of its ports loses elements
			// alone.
			Habits: Habits{Known: true, Base: Keeps, Others: Keeps, Sets: Keeps, Rows: []HabitRow{
				{Pattern: "no-endpoint-services", Habit: OneAlone}, {Pattern: "no-endpoint-nodeports", Habit: OneAlone}}}}},
		Heals: "within 30 s if its canary in mangle is gone; in nftables mode within an hour",
		// Distributions run it inside their own program.
		Processes: []string{"kube-proxy", "k3s", "k3s-server", "k3s-agent", "rke2", "k0s"},
		Kin:       []string{"k3s*", "rke2*"},
		Canary:    ProxyCanary,
		Removes:   ByName,
		Breaks:    "Services, and masquerading out of the cluster",
	},
	{
		Name: "kubelet", Title: "kubelet", Preset: "kube",
		// EnsureRule: kubelet deletes nothing.
		Source: "k8s.io/kubernetes 1.36.3 pkg/kubelet/kubelet_network_linux.go; KUBE-MARK-DROP, KUBE-MARK-MASQ and KUBE-POSTROUTING until 1.27",
		Tried:  ByProgram,
		Docs:   "https://kubernetes.io/docs/reference/command-line-tools-reference/kubelet/",
		Chains: []Chains{
			{Names: forms("KUBE-FIREWALL"), In: filter, Emptied: EmptyNever},
			{Names: forms("KUBE-MARK-MASQ", "KUBE-POSTROUTING"), In: nat, Emptied: EmptyNever},
			{Names: forms("KUBE-MARK-DROP"), In: nat, Emptied: EmptyUnreferenced},
			{Names: forms(HintChain), Hint: true},
		},
		Canary: KubeletCanary,
		Heals:  "within 60 s if its canary in mangle is gone",
		Breaks: "the DROP of others' packets to 127.0.0.0/8",
	},
	{
		Name: "portmap", Title: "the CNI plugin portmap", Preset: "cni",
		// portmap never deletes SETMARK's and MASQ's rule. teardown flushes the container's
		// chain, deletes its jump, and then the chain. Containers' chains have names of 28
		// characters, the longest that iptables allows.
		Source: "containernetworking/plugins 1.9 plugins/meta/portmap; CNI-SN-HASH until 0.7",
		Tried:  ByProgram,
		Docs:   "https://www.cni.dev/plugins/current/meta/portmap/",
		Chains: []Chains{
			{Names: forms("CNI-HOSTPORT-DNAT"), Piecewise: true},
			{Names: forms("CNI-HOSTPORT-SNAT"), Piecewise: true},
			{Names: forms("CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ"), In: nat, Emptied: EmptyUnreferenced, Piecewise: true},
			{Names: forms("CNI-DN-<hex>", "CNI-SN-<hex>"), In: nat, Emptied: EmptyBriefly},
		},
		Tables: []Table{{Name: "cni_hostport", Back: "`prerouting`, `output`; others if a rule of the same container is left", Accepted: "the rules of whole containers", Families: both,
			// portmap_nftables.go of 1.6: the jumps of prerouting and output remain, and each
			// rule of a pod has the container's ID as its comment.
			Habits: Habits{Known: true, Base: Keeps, Others: ByComment, Sets: Empties, Rows: []HabitRow{{Pattern: "masquerading", Habit: ByComment}}}}},
		Heals:     "for a new pod only",
		Processes: []string{"portmap"},
		Removes:   ByFlush,
		Breaks:    "host ports",
	},
	{
		Name: "ipmasq", Title: "the CNI plugins bridge and ptp", Preset: "cni",
		// The jump is deleted first. With a second address, its jump is still present when the
		// chain is flushed.
		Source: "containernetworking/plugins 1.9 pkg/ip/ipmasq",
		Tried:  ByProgram,
		Docs:   "https://www.cni.dev/plugins/current/main/bridge/",
		Chains: []Chains{{Names: forms("CNI-<hex:24>"), In: nat, Emptied: EmptyBriefly}},
		Tables: []Table{{Name: "cni_plugins_masquerade", Back: "`postrouting`", Accepted: "`masq_checks`", Families: []tableid.Family{tableid.Inet},
			// ipmasq_nftables_linux.go of 1.6: the three rules of postrouting remain.
			Habits: Habits{Known: true, Base: Keeps, Others: Empties, Sets: Empties}}},
		Heals:     "for a new pod only",
		Processes: []string{"bridge", "ptp"},
		Removes:   ByFlush,
		Breaks:    "pods' traffic out of the cluster",
	},
	{
		Name: "firewall", Title: "the CNI plugin firewall", Preset: "cni",
		// CNI-FORWARD begins with a jump to CNI-ADMIN, and the isolation chains end with
		// RETURN. The plugin never deletes these rules.
		Source: "containernetworking/plugins 1.9 plugins/meta/firewall",
		Docs:   "https://www.cni.dev/plugins/current/meta/firewall/",
		Chains: []Chains{
			{Names: forms("CNI-FORWARD", "CNI-ISOLATION-STAGE-1", "CNI-ISOLATION-STAGE-2"), In: filter, Emptied: EmptyUnreferenced, Piecewise: true},
			{Names: forms("CNI-ADMIN"), Piecewise: true},
		},
		Heals:     "for a new pod only",
		Processes: []string{"firewall"},
		Removes:   ByName,
		Breaks:    "pods' traffic if FORWARD drops, isolation of bridges",
	},
	{
		Name: "crio", Title: "CRI-O's host ports, also of OpenShift and MicroShift", Preset: "crio",
		// A single iptables-restore writes or deletes a container's chains. It keeps the rules
		// of other containers in the shared chains.
		Source: "cri-o internal/hostport",
		Docs:   "https://cri-o.io/",
		Chains: []Chains{
			{Names: forms("KUBE-HOSTPORTS", "CRIO-HOSTPORTS-MASQ"), Piecewise: true},
			{Names: forms("KUBE-HP-<base32:16>", "CRIO-MASQ-<base32:16>"), In: nat, Emptied: EmptyUnreferenced},
		},
		Tables:    []Table{{Name: "crio-hostports", Families: both}},
		Processes: []string{"crio"},
		Heals:     "for a new pod only",
		Removes:   ByName,
		Breaks:    "host ports",
	},
}

// The tables of iptables in which a habit holds.
var (
	nat       = []string{"nat"}
	filter    = []string{"filter"}
	natFilter = []string{"nat", "filter"}
)
