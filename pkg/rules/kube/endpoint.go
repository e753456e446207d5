package kube

import (
	"cmp"
	"net"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// An endpoint is one address and port behind a port of a service.
type endpoint struct {
	ip      string
	address string // with the port, as DNAT wants it
	chain   string // filled in for those that get one

	local, ready, serving, terminating bool
	hints                              *discoveryv1.EndpointHints
}

// An index finds the slices of a service in one family.
type index map[types.NamespacedName][]*discoveryv1.EndpointSlice

// index sorts the slices by the service that they belong to. kube-proxy knows
// none that are labelled headless and none of another family.
func (all *Objects) index(n node, r *report) index {
	found := make(index, len(all.Services))
	for _, s := range all.Slices {
		if string(s.AddressType) != familyName(n.family) {
			if s.AddressType != discoveryv1.AddressTypeIPv4 && s.AddressType != discoveryv1.AddressTypeIPv6 {
				r.on(s, "EndpointSlice", s.Namespace, s.Name).skip("addressType", "is "+strconv.Quote(string(s.AddressType))+", of which kube-proxy knows nothing")
			}
			continue
		}
		_, headless := s.Labels[labelHeadless]
		key := sliceKey(s)
		switch {
		case headless:
			r.on(s, "EndpointSlice", s.Namespace, s.Name).skip("", "belongs to a headless service")
		case key.Name == "":
			r.on(s, "EndpointSlice", s.Namespace, s.Name).broken("metadata.labels", "has no label %s", discoveryv1.LabelServiceName)
		case s.Namespace == "" || s.Name == "":
			r.on(s, "EndpointSlice", s.Namespace, s.Name).broken("metadata", "has no name or no namespace")
		default:
			found[key] = append(found[key], s)
		}
	}
	for _, list := range found {
		slices.SortFunc(list, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
		for i, s := range list[1:] {
			if s.Name == list[i].Name {
				r.on(s, "EndpointSlice", s.Namespace, s.Name).refuse("metadata.name", "stands there twice")
			}
		}
	}
	return found
}

// endpoints returns what stands behind one port of a service, sorted by their
// text as kube-proxy sorts them. Of several with the same address one that is
// not terminating counts, of several such the one in the last slice (kube-proxy
// leaves it to chance).
func (n node) endpoints(list []*discoveryv1.EndpointSlice, port *corev1.ServicePort, r *report) []endpoint {
	var all []endpoint
	for _, s := range list {
		for i := range s.Ports {
			p := &s.Ports[i]
			if p.Name == nil || p.Port == nil || *p.Port == 0 {
				r.on(s, "EndpointSlice", s.Namespace, s.Name).broken("ports["+strconv.Itoa(i)+"]", "has no name or no port")
				continue
			}
			if *p.Name != port.Name || !sameProtocol(p.Protocol, port.Protocol) {
				continue
			}
			if !validPort(*p.Port) {
				r.on(s, "EndpointSlice", s.Namespace, s.Name).refuse("ports["+strconv.Itoa(i)+"].port", "%d is not a port", *p.Port)
				continue
			}
			all = n.addEndpoints(all, s, strconv.Itoa(int(*p.Port)), r)
		}
	}
	slices.SortStableFunc(all, func(a, b endpoint) int { return cmp.Compare(a.address, b.address) })
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

func (n node) addEndpoints(all []endpoint, s *discoveryv1.EndpointSlice, port string, r *report) []endpoint {
	all = slices.Grow(all, len(s.Endpoints))
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		if len(e.Addresses) == 0 {
			r.on(s, "EndpointSlice", s.Namespace, s.Name).broken("endpoints["+strconv.Itoa(i)+"].addresses", "is empty")
			continue
		}
		ip, ok := parseIP(e.Addresses[0]) // the API allows more, which nobody uses
		if !ok || familyOf(ip) != n.family {
			r.on(s, "EndpointSlice", s.Namespace, s.Name).refuse("endpoints["+strconv.Itoa(i)+"].addresses[0]",
				"%q is not an %s address", e.Addresses[0], familyName(n.family))
			continue
		}
		made := endpoint{
			ip:          ip.String(),
			local:       e.NodeName != nil && n.name != "" && *e.NodeName == n.name,
			ready:       isTrue(e.Conditions.Ready, true),
			serving:     isTrue(e.Conditions.Serving, true),
			terminating: isTrue(e.Conditions.Terminating, false),
			hints:       e.Hints,
		}
		made.address = net.JoinHostPort(made.ip, port)
		all = append(all, made)
	}
	return all
}

func isTrue(condition *bool, unset bool) bool {
	if condition == nil {
		return unset
	}
	return *condition
}

func sameProtocol(have *corev1.Protocol, want corev1.Protocol) bool {
	if want == "" {
		want = corev1.ProtocolTCP
	}
	return have == nil && want == corev1.ProtocolTCP || have != nil && *have == want
}

// A choice says which endpoints the rules of one port of a service use. It
// follows kube-proxy's CategorizeEndpoints.
type choice struct {
	cluster, local []endpoint // by traffic policy
	reachable      []endpoint // those of both
	any            bool       // some endpoint anywhere takes traffic
}

func (n node) choose(p *servicePort) choice {
	var c choice
	by := func(keep func(*endpoint) bool) []endpoint {
		var kept []endpoint
		for i := range p.endpoints {
			if keep(&p.endpoints[i]) {
				kept = append(kept, p.endpoints[i])
			}
		}
		return kept
	}
	hinted := func(*endpoint) bool { return true }
	topology := false
	if p.usesCluster() {
		hinted, topology = n.topology(p.endpoints)
		c.cluster = by(func(e *endpoint) bool { return e.ready && hinted(e) })
		if len(c.cluster) == 0 {
			c.cluster = by((*endpoint).leaving)
		}
		c.any = len(c.cluster) > 0
	}
	if !p.usesLocal() {
		c.reachable = c.cluster
		return c
	}
	c.any = c.any || slices.ContainsFunc(p.endpoints, func(e endpoint) bool { return e.ready || e.leaving() })
	c.local = by(func(e *endpoint) bool { return e.local && e.ready })
	leaving := false
	if len(c.local) == 0 {
		c.local = by(func(e *endpoint) bool { return e.local && e.leaving() })
		leaving = len(c.local) > 0
	}
	switch {
	case !p.usesCluster():
		c.reachable = c.local
	case !topology && !leaving:
		c.reachable = c.cluster // which holds every local one
	default:
		c.reachable = union(c.cluster, c.local)
	}
	return c
}

// leaving reports whether the endpoint may be used when nothing better is left.
func (e *endpoint) leaving() bool { return e.serving && e.terminating }

// union merges two sorted lists.
func union(a, b []endpoint) []endpoint {
	all := slices.Concat(a, b)
	slices.SortStableFunc(all, func(x, y endpoint) int { return cmp.Compare(x.address, y.address) })
	return slices.CompactFunc(all, func(x, y endpoint) bool { return x.address == y.address })
}

// topology returns which endpoints the hints leave for this node, and whether
// they say anything: every ready endpoint must have a hint and one must be
// meant for this node, else for its zone (topologyModeFromHints).
func (n node) topology(all []endpoint) (func(*endpoint) bool, bool) {
	forNode := func(e *endpoint) bool { return e.hints != nil && hasNode(e.hints.ForNodes, n.name) }
	forZone := func(e *endpoint) bool { return e.hints != nil && hasZone(e.hints.ForZones, n.zone) }
	nodes, zones := true, true
	nodeHit, zoneHit := false, false
	for i := range all {
		e := &all[i]
		if !e.ready {
			continue
		}
		nodes = nodes && e.hints != nil && len(e.hints.ForNodes) > 0
		zones = zones && e.hints != nil && len(e.hints.ForZones) > 0
		nodeHit = nodeHit || forNode(e)
		zoneHit = zoneHit || forZone(e)
	}
	switch {
	case nodes && nodeHit:
		return forNode, true
	case zones && zoneHit:
		return forZone, true
	default:
		return func(*endpoint) bool { return true }, false
	}
}

func hasNode(hints []discoveryv1.ForNode, name string) bool {
	return slices.ContainsFunc(hints, func(h discoveryv1.ForNode) bool { return h.Name == name })
}

func hasZone(hints []discoveryv1.ForZone, name string) bool {
	return slices.ContainsFunc(hints, func(h discoveryv1.ForZone) bool { return h.Name == name })
}
