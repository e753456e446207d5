package native

import "github.com/canaryd/canaryd/pkg/tableid"

// Habits are what an owner does in its own tables that else looks like a flush of a part. Where
// an owner has a habit, such a part counts as lost only if the process that took it is known not
// to be the owner, or if the whole table lost its rules.
type Habits struct {
	EmptiesBase   bool // it removes the last rule of a base chain
	EmptiesChains bool // it removes the last rule of a chain that others still jump to
	EmptiesSets   bool // it removes all elements of a set, and does nothing else
	// KeepsHandles: it deletes rules by the handles that it remembers.
	KeepsHandles bool
}

// HabitsOf returns the habits of the owner that is known to write a table of that name. Sources:
// kubernetes 1.36.3, moby, netavark, CNI plugins, libvirt and Calico as of 2026.
func HabitsOf(id tableid.TableID) Habits {
	switch id.Name {
	case "kube-proxy":
		// Its base chains and those that they lead to keep their rules. It takes elements
		// together with rules, or some of a set.
		return Habits{}
	case "cni_plugins_masquerade", "libvirt_network", "netavark":
		// One base chain with a rule for each container or network, and no other.
		return Habits{EmptiesBase: true, EmptiesChains: true, EmptiesSets: true, KeepsHandles: id.Name == "libvirt_network"}
	}
	// Docker and portmap keep the jumps of their base chains; a chain of port mappings loses its
	// last rule with the last container, and Calico's sets lose their last pod. Of an owner that
	// is not known the same is assumed.
	return Habits{EmptiesChains: true, EmptiesSets: true}
}
