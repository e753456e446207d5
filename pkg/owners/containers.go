package owners

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// containers has the owners that run containers and virtual machines without Kubernetes.
var containers = []Owner{
	{
		Name: "docker", Title: "Docker 20 to 29", Preset: "docker",
		// A start flushes the chains before it fills them. DOCKER-FORWARD has three jumps as
		// long as Docker runs, and DOCKER-INGRESS a RETURN. In the others Docker adds and
		// deletes rules of networks and containers. See "cleaned" in the golden files of
		// iptabler. DOCKER-USER is the operator's.
		Source: "moby 28 and 29 daemon/libnetwork/{iptables,drivers/bridge/internal/iptabler} and its golden files; the rules in FORWARD until 28.0",
		Docs:   "https://docs.docker.com/engine/network/packet-filtering-firewalls/",
		Chains: []Chains{
			{Names: forms("DOCKER"), Piecewise: true},
			{Names: forms("DOCKER-USER"), Piecewise: true},
			{Names: forms("DOCKER-FORWARD"), In: filter, Emptied: EmptyBriefly, Piecewise: true},
			{Names: forms("DOCKER-BRIDGE"), Piecewise: true},
			{Names: forms("DOCKER-CT", "DOCKER-INTERNAL"), Piecewise: true},
			{Names: forms("DOCKER-INGRESS"), In: natFilter, Emptied: EmptyBriefly, Piecewise: true},
			{Names: forms("DOCKER-ISOLATION-STAGE-1"), Piecewise: true},
			{Names: forms("DOCKER-ISOLATION-STAGE-2"), Piecewise: true},
		},
		// For each network and, without the userland proxy, for each published port. A rule for
		// a bridge with a name that the user chose is not recognised: any program could have
		// written it.
		Straight: slices.Concat(straight("nat", "POSTROUTING",
			"-s <net> ! -o <bridge> -j MASQUERADE",
			"-s <net> ! -o <bridge> -j SNAT --to-source <ip>",
			"-o <bridge> -m addrtype --src-type LOCAL -j MASQUERADE",
			"-o <bridge> -m addrtype --src-type LOCAL -j SNAT --to-source <ip>",
			"-s <net> -d <net> -p <proto> -m <proto> --dport <port> -j MASQUERADE",
		), straight("filter", "FORWARD",
			"-o <bridge> -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
			"-i <bridge> ! -o <bridge> -j ACCEPT",
			"-i <bridge> -o <bridge> -j ACCEPT",
			"-i <bridge> -o <bridge> -j DROP",
		), straight("raw", "PREROUTING",
			// Since 28, this rule denies access to each container's address from elsewhere. The
			// next one does so for each port that is published on a loopback address.
			"-d <ip> ! -i <bridge> -j DROP",
		), unsigned(straight("raw", "PREROUTING",
			"-d <loopback> ! -i lo -p <proto> -m <proto> --dport <port> -j DROP",
		)), straight("mangle", "OUTPUT", // Swarm's encrypted overlay: VXLAN only in IPsec
			"-p udp -m udp --dport <port> -m u32 --u32 <vni> -j MARK --set-xmark 0xd0c4e3/0xffffffff",
		), straight("filter", "INPUT",
			"-p udp -m udp --dport <port> -m u32 --u32 <vni> -m policy --dir in --pol ipsec -j ACCEPT",
			"-p udp -m udp --dport <port> -m u32 --u32 <vni> -j DROP",
		)),
		Tables: []Table{{Name: "docker-bridges", Back: "each chain and map; `raw-PREROUTING` and `nat-prerouting-and-output` if the commit took nothing else", Accepted: "`nat-prerouting-and-output`, if a network has the mode `nat-unprotected`", Families: both,
			// moby 29, drivers/bridge/internal/nftabler: Docker keeps the chains and elements
			// of a bridge as long as the network. It deletes them all in one commit. It deletes
			// a port's rules from several chains at once. A network of the mode nat-unprotected
			// has rules with that comment, and a port has no other rule there.
			Habits: Habits{Known: true, Base: Keeps, Others: Keeps, Sets: Keeps, Rows: []HabitRow{
				{Pattern: "raw-PREROUTING", Habit: Together}, {Pattern: "nat-prerouting-and-output", Habit: Together, But: "UNPROTECTED"}}}}},
		Heals:     "when firewalld reports a reload on D-Bus",
		Processes: []string{"dockerd"},
		Kin:       []string{"docker*"},
		Removes:   ByName,
		Breaks:    "published ports, containers' way out, isolation of networks",
	},
	{
		Name: "podman", Title: "podman with netavark", Preset: "podman",
		// TeardownPolicy::Never keeps SETMARK's and MASQ's rule. netavark deletes the rules of
		// a network's chains before their jump. Hashes are the first 13 digits of a SHA-512
		// (src/network/core_utils.rs), one for each network.
		Source: "netavark 1.17 src/firewall/varktables/types.rs",
		Tried:  ByProgram,
		Docs:   "https://github.com/containers/netavark",
		Chains: []Chains{
			{Names: forms("NETAVARK-HOSTPORT-DNAT"), Piecewise: true},
			{Names: forms("NETAVARK-HOSTPORT-SETMARK", "NETAVARK-HOSTPORT-MASQ"), In: nat, Emptied: EmptyUnreferenced, Piecewise: true},
			{Names: forms("NETAVARK_FORWARD", "NETAVARK_INPUT", "NETAVARK_ISOLATION_1", "NETAVARK_ISOLATION_2", "NETAVARK_ISOLATION_3"), Piecewise: true},
			{Names: forms("NETAVARK-DN-<HEX:13>", "NETAVARK-<HEX:13>"), In: nat, Emptied: EmptyBriefly, Piecewise: true},
		},
		Tables: []Table{{Name: "netavark", Back: "each chain; `INPUT`, `NETAVARK-HOSTPORT-DNAT` and `NETAVARK-ISOLATION-*` if the commit took nothing else", Accepted: "", Families: []tableid.Family{tableid.Inet},
			// src/firewall/nft.rs of 1.15: netavark deletes the rules of a network with its
			// chain in one commit, and the rules of a port from two chains. Jumps to other
			// chains remain.
			Habits: Habits{Known: true, Base: Keeps, Others: Keeps, Sets: Empties, Rows: []HabitRow{
				{Pattern: "INPUT", Habit: Together}, {Pattern: "NETAVARK-HOSTPORT-DNAT", Habit: Together}, {Pattern: "NETAVARK-ISOLATION-*", Habit: Together}}}}},
		Heals:     "as Docker, or `podman network reload`",
		Processes: []string{"netavark"},
		Removes:   ByName,
		Breaks:    "published ports and containers' way out",
	},
	{
		Name: "libvirt", Title: "libvirt's networks", Preset: "libvirt",
		// libvirt adds and deletes rules of networks.
		Source: "libvirt 10 src/network/network_iptables.c",
		Docs:   "https://libvirt.org/firewall.html",
		Chains: []Chains{{
			Names:     forms("LIBVIRT_INP", "LIBVIRT_OUT", "LIBVIRT_FWO", "LIBVIRT_FWI", "LIBVIRT_FWX", "LIBVIRT_PRT"),
			Piecewise: true,
		}},
		Tables: []Table{{Name: "libvirt_network", Back: "`forward`; two rules or more of other chains", Accepted: "one rule", Families: both,
			// libvirt 11, src/network/network_nftables.c: the jumps of forward remain. A
			// separate program deletes each rule of a network.
			Habits: Habits{Known: true, KeepsHandles: true, Base: Keeps, Others: Singly, Sets: Empties, Rows: []HabitRow{{Pattern: "guest_nat", Habit: Singly}}}}},
		Heals:     "on firewalld's signal, or SIGHUP",
		Processes: []string{"libvirtd", "virtnetworkd"},
		Removes:   ByName,
		Breaks:    "guests' way out, DHCP and DNS",
	},
	{
		Name: "lxd", Title: "LXD", Preset: "lxd",
		// LXD uses iptables where other programs do, and puts its rules first.
		Source:    "lxd lxd/firewall/drivers; a network's table as LXD 6.6 writes it",
		Docs:      "https://documentation.ubuntu.com/lxd/latest/howto/network_bridge_firewalld/",
		Straight:  byComment("generated for LXD *", bridgePlaces...),
		Tables:    []Table{{Name: "lxd", Families: []tableid.Family{tableid.Inet}}},
		Processes: []string{"lxd"},
		Heals:     "at its next start",
		Removes:   ByName,
		Breaks:    "containers' way out, DHCP and DNS",
	},
	{
		Name: "incus", Title: "Incus", Preset: "incus",
		Source:    "incus internal/server/firewall/drivers, its test suite",
		Docs:      "https://linuxcontainers.org/incus/docs/main/howto/network_bridge_firewalld/",
		Straight:  byComment("generated for Incus *", bridgePlaces...),
		Tables:    []Table{{Name: "incus", Families: []tableid.Family{tableid.Inet}}},
		Processes: []string{"incusd"},
		Heals:     "at its next start",
		Removes:   ByName,
		Breaks:    "containers' way out, DHCP and DNS",
	},
	{
		Name: "networkd", Title: "systemd-networkd with IPMasquerade=, systemd-nspawn with --port=", Preset: "networkd",
		// Both add elements to a set and a map, and delete their own.
		Source:    "systemd src/shared/firewall-util-nft.c",
		Docs:      "https://www.freedesktop.org/software/systemd/man/latest/systemd.network.html",
		Tables:    []Table{{Name: "io.systemd.nat", Families: both}},
		Processes: []string{"systemd-network", "systemd-nspawn"},
		Heals:     "at its next start",
		Removes:   ByName,
		Breaks:    "the way out of its networks",
	},
	{
		Name: "fail2ban", Title: "fail2ban with iptables", Preset: "fail2ban",
		// If a ban finds its chain missing, it deletes the rest of it, and makes it again
		// without earlier bans.
		Source:    "fail2ban config/action.d/iptables.conf",
		Tried:     ByProgram,
		Docs:      "https://github.com/fail2ban/fail2ban/wiki",
		Chains:    []Chains{{Names: forms("f2b-*")}},
		Processes: []string{"fail2ban-server"},
		Heals:     "at the jail's next ban, without earlier bans",
		Removes:   ByFlush,
		Breaks:    "bans",
	},
	{
		Name: "crowdsec", Title: "CrowdSec's firewall bouncer", Preset: "crowdsec",
		// A start deletes the chain, makes it again, and fills it with the first decisions.
		// Older versions write their rules into the built-in chains.
		Source: "cs-firewall-bouncer pkg/iptables and test/backends",
		Tried:  ByProgram,
		Docs:   "https://docs.crowdsec.net/u/bouncers/firewall/",
		Chains: []Chains{{Names: forms("CROWDSEC_CHAIN", "CROWDSEC_LOG"), In: filter, Emptied: EmptyBriefly}},
		Straight: slices.Concat(
			straight("filter", "INPUT", "-m set --match-set crowdsec-blacklists src -j DROP", "-m set --match-set crowdsec6-blacklists src -j DROP"),
			straight("filter", "FORWARD", "-m set --match-set crowdsec-blacklists src -j DROP", "-m set --match-set crowdsec6-blacklists src -j DROP")),
		Tables:    []Table{{Name: "crowdsec", Families: []tableid.Family{tableid.IPv4}}, {Name: "crowdsec6", Families: []tableid.Family{tableid.IPv6}}},
		Processes: []string{"crowdsec-firewa"},
		Kin:       []string{"crowdsec*"},
		Heals:     "at its next start",
		Removes:   ByFlush,
		Breaks:    "block lists",
	},
}

// bridgePlaces are the places where LXD and Incus put the rules of a bridge.
var bridgePlaces = []string{"filter INPUT", "filter FORWARD", "filter OUTPUT", "nat PREROUTING", "nat OUTPUT", "nat POSTROUTING", "mangle POSTROUTING"}
