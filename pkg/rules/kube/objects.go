package kube

import (
	"net/netip"
)

// Objects are the input of Generate. This package does not change them.
type Objects struct {
	Services []*Service
	Slices   []*EndpointSlice
	Nodes    []*Node
	// Skipped are the objects of other kinds that were in the same documents.
	Skipped []Skip

	origin map[any]string // by pointer to the object: file and line
}

// Add appends the objects of o, with their places. A source joins so the objects of several
// files.
func (all *Objects) Add(o Objects) {
	all.Services = append(all.Services, o.Services...)
	all.Slices = append(all.Slices, o.Slices...)
	all.Nodes = append(all.Nodes, o.Nodes...)
	all.Skipped = append(all.Skipped, o.Skipped...)
	for object, where := range o.origin {
		all.from(object, where)
	}
}

// addFrom appends the objects of a document, and records its place (where: FILE:LINE) for
// errors and skips. Decode calls it.
func (all *Objects) addFrom(o Objects, where string) {
	for _, s := range o.Services {
		all.from(s, where)
	}
	for _, s := range o.Slices {
		all.from(s, where)
	}
	for _, n := range o.Nodes {
		all.from(n, where)
	}
	first := len(all.Skipped)
	all.Add(o)
	for i := range all.Skipped[first:] {
		all.Skipped[first+i].Where = where
	}
}

// from records the place of an object, a pointer, for errors and skips.
func (all *Objects) from(object any, where string) {
	if all.origin == nil {
		all.origin = map[any]string{}
	}
	all.origin[object] = where
}

// A Skip is an object, or a field of an object, that has no part in the rules.
type Skip struct {
	Where  string // file and line; empty when the object was not read from a file
	Object string // kind, namespace and name
	Field  string // empty for the whole object
	Reason string
	// Broken says that the object is wrong. Otherwise kube-proxy ignores such objects by
	// design: headless services, services of another proxy, and the like.
	Broken bool
	// Unknown says that the object's kind declares no rules. It is an error, because the kind
	// may be misspelled.
	Unknown bool
}

func (s Skip) String() string { return describe(s.Where, s.Object, s.Field, s.Reason) }

// An ObjectError names a field from which no rules can be made.
type ObjectError struct {
	Where, Object, Field, Reason string
}

func (e *ObjectError) Error() string { return describe(e.Where, e.Object, e.Field, e.Reason) }

// describe returns the text of a Skip or an ObjectError: WHERE: OBJECT: FIELD: REASON,
// without the parts that are "".
func describe(where, object, field, reason string) string {
	text := object
	if where != "" {
		text = where + ": " + text
	}
	if field != "" {
		text += ": " + field
	}
	return text + ": " + reason
}

// node returns the Node object of that name, from which Options.nodes takes addresses and
// CIDRs; nil if there is none.
func (all *Objects) node(name string) *Node {
	for _, n := range all.Nodes {
		if n.Name == name && name != "" {
			return n
		}
	}
	return nil
}

// podCIDRs returns the pod CIDRs of n, by which mode NodeCIDR detects local traffic. It uses
// the older field if the API server has not copied it into the newer one. n may be nil.
func podCIDRs(n *Node) []string {
	switch {
	case n == nil:
		return nil
	case len(n.Spec.PodCIDRs) == 0 && n.Spec.PodCIDR != "":
		return []string{n.Spec.PodCIDR}
	default:
		return n.Spec.PodCIDRs
	}
}

// hostIPs returns the addresses of n, at most one of each family, for nodeIPs. It prefers
// the first internal address, then the first external one (kube-proxy's GetNodeHostIPs). n
// may be nil.
func hostIPs(n *Node) []netip.Addr {
	if n == nil {
		return nil
	}
	var found []netip.Addr
	for _, kind := range []string{InternalIP, ExternalIP} {
		for _, a := range n.Status.Addresses {
			ip, ok := parseIP(a.Address)
			if a.Type != kind || !ok || len(found) == 2 || len(found) == 1 && familyOf(found[0]) == familyOf(ip) {
				continue
			}
			found = append(found, ip)
		}
	}
	return found
}

func serviceKey(s *Service) key {
	return key{s.Namespace, s.Name}
}
