package kube

import "github.com/canaryd/canaryd/pkg/rules"

// The chains that every node has.
const (
	servicesChain         = "KUBE-SERVICES"
	externalServicesChain = "KUBE-EXTERNAL-SERVICES"
	nodePortsChain        = "KUBE-NODEPORTS"
	postrouting           = "KUBE-POSTROUTING"
	markMasq              = "KUBE-MARK-MASQ"
	markDrop              = "KUBE-MARK-DROP"
	forward               = "KUBE-FORWARD"
	proxyFirewall         = "KUBE-PROXY-FIREWALL"
	kubeletFirewall       = "KUBE-FIREWALL"
)

// A jump is a rule of a built-in chain that leads into a chain of kube-proxy.
type jump struct{ chain, target, match string }

const newOnly = " -m conntrack --ctstate NEW"

// The jumps in the order of the chains. kube-proxy prepends each jump, so the order is the
// reverse of iptablesJumpChains. kubelet's jumps are first.
var (
	natJumps = []jump{
		{"PREROUTING", servicesChain, comment + `kubernetes service portals"`},
		{"OUTPUT", servicesChain, comment + `kubernetes service portals"`},
		{"POSTROUTING", postrouting, comment + `kubernetes postrouting rules"`},
	}
	filterJumps = []jump{
		{"INPUT", kubeletFirewall, ""},
		{"INPUT", proxyFirewall, newOnly + comment + `kubernetes load balancer firewall"`},
		{"INPUT", nodePortsChain, comment + `kubernetes health check service ports"`},
		{"INPUT", externalServicesChain, newOnly + comment + `kubernetes externally-visible service portals"`},
		{"FORWARD", proxyFirewall, newOnly + comment + `kubernetes load balancer firewall"`},
		{"FORWARD", forward, comment + `kubernetes forwarding rules"`},
		{"FORWARD", servicesChain, newOnly + comment + `kubernetes service portals"`},
		{"FORWARD", externalServicesChain, newOnly + comment + `kubernetes externally-visible service portals"`},
		{"OUTPUT", kubeletFirewall, ""},
		{"OUTPUT", proxyFirewall, newOnly + comment + `kubernetes load balancer firewall"`},
		{"OUTPUT", servicesChain, newOnly + comment + `kubernetes service portals"`},
	}
)

// jumps returns the section's jumps into kube-proxy's chains, each at the top of its
// built-in chain, where kube-proxy inserts it.
func (w *writer) jumps(all []jump) []rules.Jump {
	made := make([]rules.Jump, len(all))
	for i, h := range all {
		made[i] = rules.Jump{Chain: h.chain, Rule: w.jump(h.target, h.match), Anchor: rules.Anchor{Position: rules.Top}}
	}
	return made
}

// natChains returns the chains of nat for sections: first the shared ones, for which
// newWriter left room, then the services' chains.
func (w *writer) natChains() []rules.Chain {
	bit := mark(w.IPTablesMasqueradeBit)
	masquerade := []string{comment, `kubernetes service traffic requiring SNAT" -j MASQUERADE`}
	if w.RandomFully {
		masquerade = append(masquerade, " --random-fully")
	}
	all := []rules.Chain{
		{Name: servicesChain, Rules: append(w.services, w.toNodePorts()...)},
		{Name: postrouting, Rules: []rules.Rule{
			w.jump("RETURN", " -m mark ! --mark ", bit, "/", bit),
			// Clear the bit: the packet may pass here again, and must not be masqueraded twice.
			w.rule("MARK", " -j MARK --set-xmark ", bit, "/0x0"),
			w.rule("MASQUERADE", masquerade...),
		}},
		{Name: nodePortsChain, Rules: w.nodePorts},
		{Name: markMasq, Rules: []rules.Rule{w.setMark(w.IPTablesMasqueradeBit)}},
	}
	if w.MakeIPTablesUtilChains {
		all = append(all, rules.Chain{Name: markDrop, Rules: []rules.Rule{w.setMark(w.IPTablesDropBit)}})
	}
	copy(w.own, all)
	return w.own
}

func (w *writer) setMark(bit int) rules.Rule {
	return w.rule("MARK", " -j MARK --set-xmark ", mark(bit), "/", mark(bit))
}

// toNodePorts returns the last rules of KUBE-SERVICES, which lead to KUBE-NODEPORTS: one
// rule, or one for each address on which node ports are open.
func (w *writer) toNodePorts() []rules.Rule {
	const last = comment + `kubernetes service nodeports; NOTE: this must be the last rule in this chain"`
	if w.everywhere {
		// Node ports never work on ::1. On 127.0.0.0/8 they only work with the sysctl
		// route_localnet, which kube-proxy sets.
		not := ""
		switch {
		case w.family == rules.IPv6:
			not = " ! -d ::1/128"
		case !w.localhost:
			not = " ! -d 127.0.0.0/8"
		}
		return []rules.Rule{w.jump(nodePortsChain, not, last, " -m addrtype --dst-type LOCAL")}
	}
	var all []rules.Rule
	for _, ip := range w.node.nodePorts {
		all = append(all, w.jump(nodePortsChain, " -d ", ip.String(), w.hostBits, last))
	}
	return all
}

// filterChains returns the chains of filter; all of them are shared.
func (w *writer) filterChains() []rules.Chain {
	bit := mark(w.IPTablesMasqueradeBit)
	var forwarded []rules.Rule
	if !w.ConntrackTCPBeLiberal {
		// Without this rule the kernel resets connections: kubernetes issue 74839.
		forwarded = append(forwarded, w.jump("DROP", " -m conntrack --ctstate INVALID"))
	}
	forwarded = append(forwarded,
		w.jump("ACCEPT", comment, `kubernetes forwarding rules" -m mark --mark `, bit, "/", bit),
		w.jump("ACCEPT", comment, `kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED`))
	return []rules.Chain{
		{Name: externalServicesChain, Rules: w.refusedOutside},
		{Name: nodePortsChain, Rules: w.healthPorts},
		{Name: servicesChain, Rules: w.refused},
		{Name: forward, Rules: forwarded},
		{Name: proxyFirewall, Rules: w.notFromRanges},
		{Name: kubeletFirewall, Rules: w.localnet()},
	}
}

// localnet returns the rules of KUBE-FIREWALL, which kube-proxy and kubelet share. The first
// rule closes a hole that route_localnet opens (kubernetes issue 90259). The second drops
// packets that KUBE-MARK-DROP has marked, in the order of kubelet 1.25 to 1.27.
func (w *writer) localnet() []rules.Rule {
	var all []rules.Rule
	if w.family == rules.IPv4 && (w.localhost || w.MakeIPTablesUtilChains) {
		all = append(all, w.jump("DROP", " ! -s 127.0.0.0/8 -d 127.0.0.0/8",
			comment, `block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT`))
	}
	if w.MakeIPTablesUtilChains {
		bit := mark(w.IPTablesDropBit)
		all = append(all, w.jump("DROP", comment, `kubernetes firewall for dropping marked packets" -m mark --mark `, bit, "/", bit))
	}
	return all
}
