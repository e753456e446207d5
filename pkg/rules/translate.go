package rules

import (
	"net/netip"
	"slices"
)

// The protocols whose flows live on in conntrack without a connection that
// would end them, by their numbers.
const (
	UDP  uint8 = 17
	SCTP uint8 = 132
)

// A Flow is the first packet of a flow as it came: before any translation.
type Flow struct {
	Protocol            uint8 // IP's number of it
	Source, Destination netip.AddrPort
}

// A Site tells of a node what rules ask about addresses.
type Site interface {
	// Local reports whether an address is one of the node's own.
	Local(netip.Addr) bool
	// Beyond reports whether an address may be of the network that an
	// interface leads to.
	Beyond(iface string, a netip.Addr) bool
}

// Translations tells which flows of UDP and SCTP a family's nat rules send
// somewhere else: those to cluster IPs, external and load-balancer IPs, node
// ports and host ports. It is a value, and safe for concurrent use.
//
// It knows less than the kernel, and errs on one side only: a flow that it
// tells of is translated for sure. A rule with a match that it cannot answer
// for an address and a port (a mark, a probability, an interface) translates
// nothing for it; kube-proxy's last endpoint of each service has none.
type Translations struct {
	ways map[service][]way
	wide []way // those of many ports, or of all
	// backends are where flows are sent. Who asks for one of them may have
	// been translated to the address that it asked for anyway.
	backends map[service]bool
}

// A service is one port of a protocol; as a backend, of one address too.
type service struct {
	protocol uint8
	addr     netip.Addr
	port     uint16
}

// A way leads from a built-in chain to a DNAT. All of its tests must hold, and
// not all of any exemption's.
type way struct {
	hook       string
	tests      []test
	exemptions []exemption
}

// An exemption is a rule before the way that keeps flows from it. Of a rule
// that cannot be read in full it has the tests that can, and so exempts more.
type exemption []test

// Translates reports whether the rules surely send flow somewhere else.
func (t Translations) Translates(flow Flow, site Site) bool {
	to := flow.Destination
	if t.backends[service{flow.Protocol, to.Addr(), to.Port()}] || t.backends[service{flow.Protocol, to.Addr(), 0}] {
		return false
	}
	hook := "PREROUTING"
	if site.Local(flow.Source.Addr()) {
		hook = "OUTPUT"
	}
	takes := func(w way) bool {
		return w.hook == hook && all(w.tests, flow, site) &&
			!slices.ContainsFunc(w.exemptions, func(e exemption) bool { return all(e, flow, site) })
	}
	return slices.ContainsFunc(t.ways[service{protocol: flow.Protocol, port: to.Port()}], takes) ||
		slices.ContainsFunc(t.wide, takes)
}

// Empty reports whether no flow at all is translated.
func (t Translations) Empty() bool { return len(t.ways) == 0 && len(t.wide) == 0 }

func all(tests []test, flow Flow, site Site) bool {
	return !slices.ContainsFunc(tests, func(x test) bool { return !x.holds(flow, site) })
}

// Translations reads the family's nat rules.
func (g Generation) Translations(f Family) Translations {
	s := g[f][Nat]
	r := translationReader{
		chains: make(map[string][]Rule, len(s.Chains)),
		read:   map[string][]natRule{},
		open:   map[string]bool{},
		into:   Translations{ways: map[service][]way{}, backends: map[service]bool{}},
	}
	for _, c := range s.Chains {
		r.chains[c.Name] = c.Rules
		for _, rule := range c.Rules {
			if rule.Target == "DNAT" {
				r.backend(rule)
			}
		}
	}
	for _, hook := range []string{"PREROUTING", "OUTPUT"} {
		var hooks []natRule
		for _, h := range s.Hooks {
			if h.Chain == hook {
				if h.Rule.Target == "DNAT" {
					r.backend(h.Rule)
				}
				hooks = append(hooks, readNatRule(h.Rule))
			}
		}
		r.hook, r.accepted = hook, nil
		r.walk(hooks, nil, nil, 0)
	}
	return r.into
}

// These bound what strange rules may cost; real ones come nowhere near.
const (
	deepest   = 16      // jumps in a row
	mostSteps = 1000000 // rules looked at; 5,000 services are 20,000
	fewPorts  = 64      // a range of more is looked through for every flow
)

// A translationReader walks the chains as a packet would, and notes each way
// to a DNAT.
type translationReader struct {
	chains map[string][]Rule
	read   map[string][]natRule
	open   map[string]bool // chains that are being walked
	hook   string
	// accepted are the rules met so far that end the hook without a DNAT.
	accepted []exemption
	steps    int
	into     Translations
}

// walk goes through one chain, which is reached by packets that pass tests and
// that none of the exemptions keeps away.
func (r *translationReader) walk(chain []natRule, tests []test, exemptions []exemption, depth int) {
	exemptions = slices.Clip(exemptions)
	for _, rule := range chain {
		if r.steps++; r.steps > mostSteps {
			return
		}
		if rule.never(r.hook) {
			continue
		}
		here := slices.Concat(tests, rule.tests)
		switch {
		case rule.target == "DNAT":
			if rule.sure {
				r.note(way{r.hook, here, slices.Concat(exemptions, r.accepted)})
			}
		case rule.target == "RETURN":
			exemptions = append(exemptions, here)
		case slices.Contains([]string{"ACCEPT", "REDIRECT", "NETMAP", "DROP", "QUEUE", "NFQUEUE"}, rule.target):
			r.accepted = append(r.accepted, here)
		default:
			next, known := r.chains[rule.target]
			if !known || r.open[rule.target] || depth == deepest || notOurs(here) {
				continue
			}
			if !rule.sure {
				// What is behind it happens to some of the packets only;
				// but if it accepts them, they may be any.
				r.exempt(next, here, depth)
				continue
			}
			r.open[rule.target] = true
			r.walk(r.parsed(rule.target, next), here, exemptions, depth+1)
			delete(r.open, rule.target)
			if rule.goes {
				exemptions = append(exemptions, here) // it does not come back
			}
		}
	}
}

// exempt notes what a chain that only some packets come to keeps from
// translation for good. It looks no further than that chain: rules that accept
// in nat are rare, and behind two unsure jumps unheard of.
func (r *translationReader) exempt(chain []Rule, tests []test, depth int) {
	for _, rule := range chain {
		if rule.Target == "ACCEPT" && depth < deepest {
			n := readNatRule(rule)
			r.accepted = append(r.accepted, slices.Concat(tests, n.tests))
		}
	}
}

func (r *translationReader) parsed(name string, chain []Rule) []natRule {
	if known, ok := r.read[name]; ok {
		return known
	}
	list := make([]natRule, 0, len(chain))
	for _, rule := range chain {
		list = append(list, readNatRule(rule))
	}
	r.read[name] = list
	return list
}

// note files a way under the ports that it is for.
func (r *translationReader) note(w way) {
	if notOurs(w.tests) {
		return
	}
	protocols := []uint8{UDP, SCTP}
	var ports []portSpan
	for _, t := range w.tests {
		switch {
		case t.kind == ofProtocol && !t.not:
			protocols = slices.DeleteFunc(protocols, func(p uint8) bool { return p != t.protocol })
		case t.kind == toPorts && !t.not && ports == nil:
			ports = t.ports
		}
	}
	count := 0
	for _, s := range ports {
		count += int(s.last) - int(s.first) + 1
	}
	if count == 0 || count > fewPorts {
		r.into.wide = append(r.into.wide, w)
		return
	}
	for _, p := range protocols {
		for _, s := range ports {
			for port := int(s.first); port <= int(s.last); port++ {
				key := service{protocol: p, port: uint16(port)}
				r.into.ways[key] = append(r.into.ways[key], w)
			}
		}
	}
}

// backend notes where a DNAT sends flows.
func (r *translationReader) backend(rule Rule) {
	n := readNatRule(rule)
	if n.to.port == 0 && !n.to.addr.IsValid() || notOurs(n.tests) {
		return
	}
	for _, p := range []uint8{UDP, SCTP} {
		n.to.protocol = p
		r.into.backends[n.to] = true
	}
}

// notOurs reports whether neither UDP nor SCTP passes the tests.
func notOurs(tests []test) bool {
	passes := func(protocol uint8) bool {
		return !slices.ContainsFunc(tests, func(t test) bool {
			return t.kind == ofProtocol && (t.protocol == protocol) == t.not
		})
	}
	return !passes(UDP) && !passes(SCTP)
}
