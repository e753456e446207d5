package kube

import "github.com/canaryd/canaryd/pkg/rules"

// A writer writes the rules of one family.
type writer struct {
	node
	text
	large bool // leave out the comments in the chains of endpoints

	hostBits string   // the prefix length of a single address
	refusal  string   // the option of REJECT
	mask     string   // the mask that recent applies to a client's address
	odds     []string // results of probability, by n

	// The chains that all services share.
	services, nodePorts                                 []rules.Rule // nat
	refused, refusedOutside, healthPorts, notFromRanges []rules.Rule // filter

	own []rules.Chain // in nat: room for the shared chains, then the services' chains
}

// newWriter returns a writer for one family's rules, with room for these numbers of ports
// and endpoints. large: there are so many endpoints that kube-proxy leaves out comments.
func newWriter(n node, large bool, ports, endpoints int) *writer {
	w := &writer{node: n, large: large, hostBits: "/32",
		refusal: " --reject-with icmp-port-unreachable", mask: "255.255.255.255"}
	if n.family == rules.IPv6 {
		w.hostBits, w.refusal = "/128", " --reject-with icmp6-port-unreachable"
		w.mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	}
	w.services = make([]rules.Rule, 0, ports+1)
	shared := 4 // see natChains
	if n.MakeIPTablesUtilChains {
		shared++
	}
	w.own = make([]rules.Chain, shared, shared+2*ports+endpoints)
	return w
}

// servicePort writes the rules that kube-proxy's syncProxyRules writes for one port of a
// service. node.sections calls it for each.
func (w *writer) servicePort(p *servicePort) {
	c := w.choose(p)
	o := outcome{
		servicePort: p, choice: c,
		internal:     c.any && (!p.internalLocal || len(c.local) > 0),
		outside:      c.any && (!p.externalLocal || len(c.local) > 0),
		firewall:     c.any && len(p.lbIPs) > 0 && len(p.ranges) > 0,
		clusterChain: w.chain(clusterPrefix, p.name, p.protocol),
	}
	// All chains of a port have the same hash.
	id := o.clusterChain[len(clusterPrefix):]
	o.localChain = w.join(localPrefix, id)
	o.externalChain = w.join(externalPrefix, id)
	o.firewallChain = w.join(firewallPrefix, id)

	w.capture(&o)
	w.refuse(&o)
	if p.healthPort != "" {
		w.healthPorts = append(w.healthPorts, w.jump("ACCEPT",
			" -p tcp", comment, p.name, ` health check node port" -m tcp --dport `, p.healthPort))
	}
	if !c.any {
		return // no chains in nat
	}
	for _, e := range c.reachable {
		e.chain = w.chain(endpointPrefix, p.name, p.protocol, e.address)
	}
	if p.external() {
		w.add(o.externalChain, w.external(&o))
	}
	if o.firewall {
		w.add(o.firewallChain, w.firewall(&o))
	}
	if p.usesCluster() && len(c.cluster) > 0 {
		w.add(o.clusterChain, w.policy(&o, !p.internalLocal, c.cluster))
	}
	if p.usesLocal() && len(c.local) > 0 {
		w.add(o.localChain, w.policy(&o, p.internalLocal, c.local))
	}
	for _, e := range c.reachable {
		w.add(e.chain, w.endpoint(&o, e))
	}
}

// An outcome is the effect of the rules of a service's port on this node.
type outcome struct {
	*servicePort
	choice
	internal bool // the cluster IP leads to an endpoint
	outside  bool // external destinations lead to an endpoint, for all clients
	firewall bool // only the source ranges may use load balancer addresses

	clusterChain, localChain, externalChain, firewallChain string // the names of its chains
}

func (w *writer) add(name string, all []rules.Rule) {
	w.own = append(w.own, rules.Chain{Name: name, Rules: all})
}

// capture writes the rules that lead traffic for the service into its chains, and the DROPs
// of traffic from other sources than its ranges. servicePort calls it.
func (w *writer) capture(o *outcome) {
	to := func(target, address, what string) {
		w.services = append(w.services, w.jump(target, " -d ", address, w.hostBits, " -p ", o.protocol,
			comment, o.name, what, `" -m `, o.protocol, " --dport ", o.port))
	}
	switch {
	case o.internal && o.internalLocal:
		to(o.localChain, o.clusterIP, " cluster IP")
	case o.internal:
		to(o.clusterChain, o.clusterIP, " cluster IP")
	}
	if !o.any {
		return
	}
	for _, ip := range o.externalIPs {
		to(o.externalChain, ip, " external IP")
	}
	for _, ip := range o.lbIPs {
		if !o.firewall {
			to(o.externalChain, ip, " loadbalancer IP")
			continue
		}
		to(o.firewallChain, ip, " loadbalancer IP")
		w.notFromRanges = append(w.notFromRanges, w.jump("DROP", " -d ", ip, w.hostBits, " -p ", o.protocol,
			comment, o.name, " traffic not accepted by ", o.firewallChain, `" -m `, o.protocol, " --dport ", o.port))
	}
	if o.nodePort != "" {
		w.nodePorts = append(w.nodePorts, w.jump(o.externalChain,
			" -p ", o.protocol, comment, o.name, `" -m `, o.protocol, " --dport ", o.nodePort))
	}
}

// refuse writes the rules for destinations without an endpoint, for servicePort. They are
// REJECT where no node has an endpoint, and DROP where policy is Local and this node has
// none.
func (w *writer) refuse(o *outcome) {
	target, options, why := "REJECT", w.refusal, " has no endpoints"
	if o.any {
		target, options, why = "DROP", "", " has no local endpoints"
	}
	to := func(address string) rules.Rule {
		return w.rule(target, " -d ", address, w.hostBits, " -p ", o.protocol, comment, o.name, why,
			`" -m `, o.protocol, " --dport ", o.port, " -j ", target, options)
	}
	if !o.internal {
		w.refused = append(w.refused, to(o.clusterIP))
	}
	if o.outside {
		return
	}
	for _, ip := range o.externalIPs {
		w.refusedOutside = append(w.refusedOutside, to(ip))
	}
	for _, ip := range o.lbIPs {
		w.refusedOutside = append(w.refusedOutside, to(ip))
	}
	if o.nodePort != "" {
		w.refusedOutside = append(w.refusedOutside, w.rule(target, " -p ", o.protocol, comment, o.name, why,
			`" -m addrtype --dst-type LOCAL -m `, o.protocol, " --dport ", o.nodePort, " -j ", target, options))
	}
}

// external returns the rules of the chain KUBE-EXT-HASH, for traffic to external
// destinations. Policy Local keeps the source address. Traffic from this node and its pods
// follows policy Cluster even then.
func (w *writer) external(o *outcome) []rules.Rule {
	all := w.list(4)
	if !o.externalLocal {
		all = append(all, w.jump(markMasq, comment, "masquerade traffic for ", o.name, ` external destinations"`))
	} else {
		if w.local.implemented() {
			all = append(all, w.jump(o.clusterChain, w.local.local, comment, "pod traffic for ", o.name, ` external destinations"`))
		}
		all = append(all,
			w.jump(markMasq, comment, "masquerade LOCAL traffic for ", o.name, ` external destinations" -m addrtype --src-type LOCAL`),
			w.jump(o.clusterChain, comment, "route LOCAL traffic for ", o.name, ` external destinations" -m addrtype --src-type LOCAL`))
	}
	switch {
	case !o.outside:
	case o.externalLocal:
		all = append(all, w.jump(o.localChain))
	default:
		all = append(all, w.jump(o.clusterChain))
	}
	return all
}

// firewall returns the rules of the chain KUBE-FW-HASH of a service with
// loadBalancerSourceRanges. servicePort calls it. They accept the source ranges. If a range
// contains this node, they also accept the load balancer's addresses: the node's own traffic
// to them loops back with such a source. Other traffic is dropped in filter.
func (w *writer) firewall(o *outcome) []rules.Rule {
	all := w.list(len(o.ranges) + len(o.lbIPs) + 1)
	fromHere := false
	for _, cidr := range o.ranges {
		all = append(all, w.jump(o.externalChain, " -s ", cidr.String(), comment, o.name, ` loadbalancer IP"`))
		fromHere = fromHere || cidr.Contains(w.ip)
	}
	if fromHere {
		for _, ip := range o.lbIPs {
			all = append(all, w.jump(o.externalChain, " -s ", ip, w.hostBits, comment, o.name, ` loadbalancer IP"`))
		}
	}
	return append(all, w.rule("", comment, "other traffic to ", o.name, ` will be dropped by KUBE-PROXY-FIREWALL"`))
}

// policy returns the rules of KUBE-SVC-HASH or KUBE-SVL-HASH, which spread traffic over
// endpoints. internal: the cluster IP leads to this chain, so it masquerades traffic from
// outside the cluster.
func (w *writer) policy(o *outcome, internal bool, endpoints []*endpoint) []rules.Rule {
	length := 1 + len(endpoints)
	if o.affinity != "" {
		length += len(endpoints)
	}
	all := w.list(length)
	if internal && o.internal && (w.MasqueradeAll || w.local.implemented()) {
		notSource, notInterface := w.local.notSource, w.local.notInterface
		if w.MasqueradeAll {
			notSource, notInterface = "", ""
		}
		all = append(all, w.jump(markMasq, notSource, " -d ", o.clusterIP, w.hostBits, notInterface, " -p ", o.protocol,
			comment, o.name, ` cluster IP" -m `, o.protocol, " --dport ", o.port))
	}
	if o.affinity != "" {
		for _, e := range endpoints {
			all = append(all, w.jump(e.chain, w.endpointComment(o, " -> ", e.address), " -m recent --rcheck --seconds ", o.affinity,
				" --reap --name ", e.chain, " --mask ", w.mask, " --rsource"))
		}
	}
	for i, e := range endpoints {
		odds := ""
		if left := len(endpoints) - i; left > 1 {
			odds = w.probability(left)
		}
		all = append(all, w.jump(e.chain, w.endpointComment(o, " -> ", e.address), odds))
	}
	return all
}

// endpoint returns the rules of KUBE-SEP-HASH, which translate to one endpoint. If an
// endpoint calls its own service, it must not see its own source address, so the rules
// masquerade that traffic.
func (w *writer) endpoint(o *outcome, e *endpoint) []rules.Rule {
	note := w.endpointComment(o)
	recent := ""
	if o.affinity != "" {
		recent = w.join(" -m recent --set --name ", e.chain, " --mask ", w.mask, " --rsource")
	}
	return append(w.list(2),
		w.jump(markMasq, " -s ", e.ip, w.hostBits, note),
		w.rule("DNAT", " -p ", o.protocol, note, recent, " -m ", o.protocol, " -j DNAT --to-destination ", e.address))
}

// endpointComment returns the comment of a rule in the chains of endpoints: the service's name,
// and more. It is empty in large clusters.
func (w *writer) endpointComment(o *outcome, more ...string) string {
	if w.large {
		return ""
	}
	var all [6]string
	words := append(append(all[:0], comment, o.name), more...)
	return w.join(append(words, `"`)...)
}

// probability returns the words of a rule that takes one of n connections; it keeps them for
// the next call.
func (w *writer) probability(n int) string {
	for len(w.odds) <= n {
		w.odds = append(w.odds, probability(max(len(w.odds), 1)))
	}
	return w.odds[n]
}
