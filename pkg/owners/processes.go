package owners

import (
	"path"
	"slices"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A manager is a program that writes a whole firewall from its own files, and flushes for that.
// It is no owner: its rules are never guarded unless a word names them.
type manager struct {
	title     string
	processes []string
	units     []string // of systemd, which load a file of rules
	chains    []Form   // of iptables' tables, if their names show it
	tables    []string // native tables
	// straight are rules that the manager itself writes into built-in chains.
	straight []Straight
}

var managers = []manager{
	{
		title: "firewalld", processes: []string{"firewalld"}, tables: []string{"firewalld"},
		chains: forms("*_direct", "*_ZONES", "*_ZONES_SOURCE", "*_ZONES_IFACES", "*_POLICIES_pre", "*_POLICIES_post", "IN_*", "FWD_*", "FWDI_*", "FWDO_*", "PRE_*", "POST_*"),
		// src/firewall/core/ipXtables.py of 1.3, with FirewallBackend=iptables.
		straight: slices.Concat(firewalldStraight("INPUT"), firewalldStraight("FORWARD"), straight("filter", "OUTPUT",
			"-m conntrack --ctstate <states> -j ACCEPT", "-o lo -j ACCEPT")),
	},
	{title: "ufw", chains: forms("ufw-*", "ufw6-*")},
	{
		title:  "Shorewall",
		chains: forms("shorewall", "sha-lh-*", "sha-rh-*", "*2fw", "fw2*", "net2*", "smurfs", "smurflog", "tcpflags", "logdrop", "logreject", "logflags"),
	},
	{title: "csf", chains: forms("LOCALINPUT", "LOCALOUTPUT", "ALLOWIN", "ALLOWOUT", "DENYIN", "DENYOUT", "LOGDROPIN", "LOGDROPOUT", "INVALID", "INVDROP")},
	{title: "nftables.service", units: []string{"nftables.service"}},
	{title: "netfilter-persistent", units: []string{"netfilter-persistent.service"}},
	// The comment of each rule is the rule's name and begins with a number (docs of
	// puppetlabs-firewall).
	{title: "Puppet's firewall module", straight: byComment("[0-9][0-9][0-9] *", everyPlace...)},
}

// everyPlace lists each built-in chain of each table.
var everyPlace = []string{
	"raw PREROUTING", "raw OUTPUT", "mangle PREROUTING", "mangle INPUT", "mangle FORWARD", "mangle OUTPUT", "mangle POSTROUTING",
	"nat PREROUTING", "nat INPUT", "nat OUTPUT", "nat POSTROUTING", "filter INPUT", "filter FORWARD", "filter OUTPUT",
	"security INPUT", "security FORWARD", "security OUTPUT",
}

// firewalldStraight returns the rules that firewalld writes into a chain of filter, around its
// jumps.
func firewalldStraight(chain string) []Straight {
	return straight("filter", chain,
		"-m conntrack --ctstate <states> -j ACCEPT", "-i lo -j ACCEPT", "-m conntrack --ctstate INVALID -j DROP",
		"-m conntrack --ctstate INVALID -j LOG --log-prefix <prefix>", "-j LOG --log-prefix <prefix>", "-j REJECT --reject-with <kind>")
}

// Writes reports whether a process of that name writes, and removes, rules of its own.
func Writes(comm string) bool {
	return slices.ContainsFunc(table, func(o Owner) bool { return slices.Contains(o.Processes, comm) })
}

// WritesTable reports whether a process of that name is known to write a native table of that name.
func WritesTable(comm string, id tableid.TableID) bool {
	return slices.Contains(WritersOf(id), comm)
}

// WritesChain reports whether a process of that name is known to write a chain of that name.
func WritesChain(comm, chain string) bool {
	return slices.ContainsFunc(table, func(o Owner) bool { return slices.Contains(o.Processes, comm) && o.has(chain) })
}

// Decides reports whether a process of that name decides on rules of its own, and executes
// no jobs of others. It belongs to an owner, or is a firewall manager. pkg/watch takes such
// a process for the doer of a commit (Neighbour), and never for an agent or shell (Doer).
func Decides(comm string) bool {
	return Writes(comm) ||
		slices.ContainsFunc(table, func(o Owner) bool {
			return slices.ContainsFunc(o.Kin, func(glob string) bool {
				is, err := path.Match(glob, comm)
				return err == nil && is
			})
		}) ||
		slices.ContainsFunc(managers, func(m manager) bool { return slices.Contains(m.processes, comm) })
}

// IsCNIPlugin reports whether a process of that name is a plugin that writes rules for containers.
func IsCNIPlugin(comm string) bool {
	return slices.ContainsFunc(table, func(o Owner) bool { return o.Preset == "cni" && slices.Contains(o.Processes, comm) })
}

// LoadsFile reports whether a unit of systemd loads a file of rules, and owns no table of others.
func LoadsFile(unit string) bool {
	return slices.ContainsFunc(managers, func(m manager) bool { return slices.Contains(m.units, unit) })
}
