package native

import (
	"path"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Habit is how an owner empties one of its chains or sets, while packets still come to it. A
// commit that empties it in another way is not the owner's.
type Habit uint8

// The habits.
const (
	// Empties: it takes the last rules or elements, and does nothing else in that commit.
	Empties Habit = iota
	// Keeps: it never leaves a chain empty, nor takes the elements of a set and nothing else.
	Keeps
	// Together: with the last rule of the chain it takes rules of other chains, or deletes chains.
	Together
	// Singly: it takes one rule in each commit.
	Singly
	// ByComment: it takes all rules of a comment, which names a pod, from all chains at once.
	ByComment
	// OneAlone: it may take the only element of a set and nothing else, but never several.
	OneAlone
)

// Habits are an owner's ways in its own tables that look like a flush of a part.
type Habits struct {
	// Known: the program that writes the table is known. Of others each deletion by name counts as
	// its owner's.
	Known bool
	// KeepsHandles: it deletes rules by the handles that it remembers.
	KeepsHandles bool

	// resyncs: it reads its tables again by itself, and writes what they lack.
	resyncs bool

	base, others Habit // of chains that have no row
	sets         Habit // of sets that have no row
	rows         []habitRow
}

// A habitRow is the habit of the chains or sets whose names match a pattern.
type habitRow struct {
	pattern string
	habit   Habit
}

// unknownHabits are of a table that a word names: each may be a person's. A commit that takes one
// rule may have deleted that rule by its handle.
var unknownHabits = Habits{base: Singly, others: Empties, sets: Empties}

// habits are the owners' by the names of their tables. Each row is a fact of the owner's source.
var habits = map[string]Habits{
	// kubernetes 1.36.3, pkg/proxy/nftables/proxier.go. Its base chains and those that they jump to
	// have rules that it writes in setupNFTables. It empties a service's chain with the commit that
	// takes the elements that lead there. It takes elements with rules of the service's chains, and
	// those of a service without endpoints alone, where one port of several goes.
	"kube-proxy": {Known: true, base: Keeps, others: Keeps, sets: Keeps, rows: []habitRow{
		{"no-endpoint-services", OneAlone}, {"no-endpoint-nodeports", OneAlone}}},
	// moby 29, daemon/libnetwork/drivers/bridge/internal/nftabler. The chains and elements of a
	// bridge stand as long as the network, and go with its chains in one commit. A port's rules go
	// from several chains at once.
	"docker-bridges": {Known: true, base: Keeps, others: Keeps, sets: Keeps, rows: []habitRow{
		{"raw-PREROUTING", Together}, {dockerPorts, Together}}},
	// netavark 1.15, src/firewall/nft.rs. The rules of a network go with its chain in one commit,
	// and those of a port from two chains. What leads to other chains stays.
	"netavark": {Known: true, base: Keeps, others: Keeps, sets: Empties, rows: []habitRow{
		{"INPUT", Together}, {"NETAVARK-HOSTPORT-DNAT", Together}, {"NETAVARK-ISOLATION-*", Together}}},
	// CNI plugins 1.6, plugins/meta/portmap/portmap_nftables.go. The jumps of prerouting and output
	// stay, and each rule of a pod has the container's ID as its comment.
	"cni_hostport": {Known: true, base: Keeps, others: ByComment, sets: Empties, rows: []habitRow{{"masquerading", ByComment}}},
	// CNI plugins 1.6, pkg/ip/ipmasq_nftables_linux.go. The three rules of postrouting stay.
	"cni_plugins_masquerade": {Known: true, base: Keeps, others: Empties, sets: Empties},
	// libvirt 11, src/network/network_nftables.c. The jumps of forward stay. Each rule of a network
	// is deleted by a program of its own.
	"libvirt_network": {Known: true, KeepsHandles: true, base: Keeps, others: Singly, sets: Empties, rows: []habitRow{{"guest_nat", Singly}}},
	// Calico 3.30, felix/nftables. Its base chains keep their jumps; a chain or set loses its last
	// pod.
	"calico":     {Known: true, resyncs: true, base: Keeps, others: Empties, sets: Empties},
	"calico-arp": {Known: true, resyncs: true, base: Keeps, others: Empties, sets: Empties},
}

// HabitsOf returns the habits of the owner that is known to write a table of that name.
func HabitsOf(id tableid.TableID) Habits {
	if h, known := habits[id.Name]; known {
		return h
	}
	return unknownHabits
}

// chain returns the habit for a chain.
func (h Habits) chain(c *Chain) Habit {
	if c.Base {
		return h.of(c.Name, h.base)
	}
	return h.of(c.Name, h.others)
}

// set returns the habit for a set.
func (h Habits) set(name string) Habit { return h.of(name, h.sets) }

func (h Habits) of(name string, other Habit) Habit {
	for _, r := range h.rows {
		if is, err := path.Match(r.pattern, name); err == nil && is {
			return r.habit
		}
	}
	return other
}

const (
	// dockerPorts is the chain of Docker's that translates published ports.
	dockerPorts = "nat-prerouting-and-output"
	// dockerUnprotected is the comment of a rule that a network of the mode nat-unprotected has:
	// there a port has no other rule.
	dockerUnprotected = "UNPROTECTED"
)

// comment returns a rule's comment, "" if it has none.
func (r Rule) comment() string { return comment(attrOf(r.Attrs, unix.NFTA_RULE_USERDATA)) }
