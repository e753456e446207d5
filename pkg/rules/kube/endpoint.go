package kube

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An endpoint is an address and port behind a port of a service.
type endpoint struct {
	ip      string
	address string // with the port, in the form of DNAT
	chain   string // empty for an endpoint without a chain

	local, ready, serving, terminating bool
	hints                              *EndpointHints
}

// A key names a service.
type key struct{ namespace, name string }

// An index holds the slices of each service in one family.
type index map[key][]*EndpointSlice

// index groups the slices by service, for node.ports. It leaves out slices that kube-proxy
// ignores: those with the headless label, of another family, or without a name or service. r
// records them, and slices that are declared twice.
func (all *Objects) index(n node, r *report) index {
	found := make(index, len(all.Services))
	for _, s := range all.Slices {
		if s.AddressType != familyName(n.family) {
			if s.AddressType != IPv4 && s.AddressType != IPv6 {
				r.slice(s).skip("addressType", "is "+strconv.Quote(s.AddressType)+", which kube-proxy does not know")
			}
			continue
		}
		_, headless := s.Labels[labelHeadless]
		of := key{s.Namespace, s.Labels[LabelServiceName]}
		switch {
		case headless:
			r.slice(s).skip("", "belongs to a headless service")
		case of.name == "":
			r.slice(s).broken("metadata.labels", "has no label %s", LabelServiceName)
		case s.Namespace == "" || s.Name == "":
			r.slice(s).broken("metadata", "has no name or no namespace")
		default:
			found[of] = append(found[of], s)
		}
	}
	for _, list := range found {
		if len(list) == 1 {
			continue
		}
		slices.SortFunc(list, func(a, b *EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
		for i, s := range list[1:] {
			if s.Name == list[i].Name {
				r.slice(s).refuse("metadata.name", "is declared twice")
			}
		}
	}
	return found
}

// endpoints returns the endpoints behind one port of a service, sorted by their text as in
// kube-proxy. If several have the same address, an endpoint that is not terminating is
// preferred, then the endpoint in the last slice. In kube-proxy that is random.
func (read *reader) endpoints(list []*EndpointSlice, port *ServicePort) []endpoint {
	r := read.report
	var all []endpoint
	for _, s := range list {
		for i := range s.Ports {
			p := &s.Ports[i]
			if p.Name == nil || p.Port == nil || *p.Port == 0 {
				r.slice(s).broken("ports["+strconv.Itoa(i)+"]", "has no name or no port")
				continue
			}
			if *p.Name != port.Name || !sameProtocol(p.Protocol, port.Protocol) {
				continue
			}
			if !validPort(*p.Port) {
				r.slice(s).refuse("ports["+strconv.Itoa(i)+"].port", "%d is not a port", *p.Port)
				continue
			}
			all = read.addEndpoints(all, s, strconv.Itoa(int(*p.Port)))
		}
	}
	sorting.Stable(all, func(a, b endpoint) int { return cmp.Compare(a.address, b.address) })
	kept := all[:0]
	for _, e := range all {
		switch last := len(kept) - 1; {
		case last < 0 || kept[last].address != e.address:
			kept = append(kept, e)
		case !e.terminating:
			kept[last] = e
		}
	}
	return kept
}

// addEndpoints appends the endpoints of one slice with that port to all, for endpoints. The
// report records those that it leaves out.
func (read *reader) addEndpoints(all []endpoint, s *EndpointSlice, port string) []endpoint {
	n, r := &read.node, read.report
	all = slices.Grow(all, len(s.Endpoints))
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		if len(e.Addresses) == 0 {
			r.slice(s).broken("endpoints["+strconv.Itoa(i)+"].addresses", "is empty")
			continue
		}
		ip, ok := parseIP(e.Addresses[0]) // the API allows several; kube-proxy uses the first
		if !ok || familyOf(ip) != n.family {
			r.slice(s).refuse("endpoints["+strconv.Itoa(i)+"].addresses[0]",
				"%q is not an %s address", e.Addresses[0], familyName(n.family))
			continue
		}
		made := endpoint{
			ip:          spelled(ip, e.Addresses[0]),
			local:       e.NodeName != nil && n.name != "" && *e.NodeName == n.name,
			ready:       isTrue(e.Conditions.Ready, true),
			serving:     isTrue(e.Conditions.Serving, true),
			terminating: isTrue(e.Conditions.Terminating, false),
			hints:       e.Hints,
		}
		if n.family == rules.IPv6 {
			made.address = read.join("[", made.ip, "]:", port)
		} else {
			made.address = read.join(made.ip, ":", port)
		}
		all = append(all, made)
	}
	return all
}

// isTrue returns an endpoint's condition; unset is its value where the slice does not give
// it.
func isTrue(condition *bool, unset bool) bool {
	if condition == nil {
		return unset
	}
	return *condition
}

// sameProtocol reports whether a slice's port has the protocol of a service's port. For a
// slice nil means TCP, for a service "" does.
func sameProtocol(have *string, want string) bool {
	if want == "" {
		want = TCP
	}
	return have == nil && want == TCP || have != nil && *have == want
}

// A choice holds the endpoints that the rules of a service's port use. It follows kube-proxy's
// CategorizeEndpoints.
type choice struct {
	cluster, local []*endpoint // by traffic policy
	reachable      []*endpoint // the endpoints of both
	any            bool        // an endpoint on some node takes traffic
}

// choose returns the endpoints that take the traffic for a port, as kube-proxy's
// CategorizeEndpoints does, for servicePort. Where no endpoint is ready, those that are
// about to end take it.
func (n *node) choose(p *servicePort) choice {
	var c choice
	if len(p.endpoints) == 0 {
		return c
	}
	by := func(keep func(*endpoint) bool) []*endpoint {
		kept := make([]*endpoint, 0, len(p.endpoints))
		for i := range p.endpoints {
			if keep(&p.endpoints[i]) {
				kept = append(kept, &p.endpoints[i])
			}
		}
		return kept
	}
	topology := anywhere
	if p.usesCluster() {
		topology = n.topology(p.endpoints)
		c.cluster = by(func(e *endpoint) bool {
			return e.ready && (topology == anywhere || topology == sameNode && n.hinted(e) || topology == sameZone && n.zoneHinted(e))
		})
		if len(c.cluster) == 0 {
			c.cluster = by((*endpoint).leaving)
		}
		c.any = len(c.cluster) > 0
	}
	if !p.usesLocal() {
		c.reachable = c.cluster
		return c
	}
	for i := range p.endpoints {
		c.any = c.any || p.endpoints[i].ready || p.endpoints[i].leaving()
	}
	c.local = by(func(e *endpoint) bool { return e.local && e.ready })
	leaving := false
	if len(c.local) == 0 {
		c.local = by(func(e *endpoint) bool { return e.local && e.leaving() })
		leaving = len(c.local) > 0
	}
	switch {
	case !p.usesCluster():
		c.reachable = c.local
	case topology == anywhere && !leaving:
		c.reachable = c.cluster // it includes all local endpoints
	default:
		c.reachable = by(func(e *endpoint) bool { return slices.Contains(c.cluster, e) || slices.Contains(c.local, e) })
	}
	return c
}

// leaving reports whether the endpoint is terminating but still serves. It is used if no
// endpoint is ready.
func (e *endpoint) leaving() bool { return e.serving && e.terminating }

// A topology is the kind of hints of endpoints that counts on this node.
type topology int

const (
	anywhere topology = iota // none
	sameNode
	sameZone
)

// topology returns the kind of hints that counts in choose. Hints for nodes count if each
// ready endpoint has a hint and at least one hint is for this node. Otherwise hints for
// zones count, by the same rule (topologyModeFromHints).
func (n *node) topology(all []endpoint) topology {
	nodes, zones := true, true
	nodeHit, zoneHit := false, false
	for i := range all {
		e := &all[i]
		if !e.ready {
			continue
		}
		nodes = nodes && e.hints != nil && len(e.hints.ForNodes) > 0
		zones = zones && e.hints != nil && len(e.hints.ForZones) > 0
		nodeHit = nodeHit || n.hinted(e)
		zoneHit = zoneHit || n.zoneHinted(e)
	}
	switch {
	case nodes && nodeHit:
		return sameNode
	case zones && zoneHit:
		return sameZone
	default:
		return anywhere
	}
}

// hinted reports whether a hint names this node.
func (n *node) hinted(e *endpoint) bool {
	return e.hints != nil && slices.ContainsFunc(e.hints.ForNodes, func(h Hint) bool { return h.Name == n.name })
}

// zoneHinted reports whether a hint names this node's zone.
func (n *node) zoneHinted(e *endpoint) bool {
	return e.hints != nil && slices.ContainsFunc(e.hints.ForZones, func(h Hint) bool { return h.Name == n.zone })
}
