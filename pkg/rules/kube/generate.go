// Package kube makes the rules that kube-proxy, in iptables mode, and kubelet write from Services,
// EndpointSlices and a Node. The rules are spelled as iptables-save prints them.
//
// [Decode] reads [Objects] from YAML or JSON, and a [Decoder] reads a set of files again and
// again. [DefaultOptions] are the options of a kube-proxy without flags. [Generate] makes a
// generation from the objects, and lists each object without a part in it as a [Skip].
//
// The error of Generate joins an [*ObjectError] for each wrong field. A headless service or
// another object that kube-proxy ignores is no error. Generate is a pure function that any
// goroutine may call; a Decoder is for one goroutine.
//
// The package follows Kubernetes 1.36: pkg/proxy/iptables/proxier.go for the rules,
// pkg/proxy/serviceport.go, endpointslicecache.go and topology.go for their input, and
// cmd/kube-proxy/app for the options.
package kube

import (
	"cmp"
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// largeCluster is the number of endpoints above which kube-proxy leaves out the comments in the
// chains of endpoints.
const largeCluster = 1000

// Generate returns the rules that a full sync of kube-proxy leaves in nat and filter, and the
// objects and fields that it skipped. The order of the objects has no influence. The error
// joins one *ObjectError for each wrong field.
//
// It does not write rules that only count (nfacct), nor KUBE-IPTABLES-HINT and the canaries of
// kube-proxy and kubelet, by which their owners notice a flush.
func Generate(objects Objects, options Options) (rules.Generation, []Skip, error) {
	nodes, err := options.nodes(objects)
	if err != nil {
		return nil, nil, err
	}
	r := &report{objects: &objects, skips: slices.Clone(objects.Skipped)}
	services := objects.sorted(r)
	g := rules.Generation{}
	for _, n := range nodes {
		tableid.Put(g, n.family, n.sections(n.ports(services, objects.index(n, r), r)))
	}
	if err := r.err(); err != nil {
		return nil, r.skipped(), err
	}
	return g, r.skipped(), nil
}

// sorted returns the services that kube-proxy handles, by namespace and name, for Generate.
// r records the others, and services and nodes that are declared twice.
func (all *Objects) sorted(r *report) []*Service {
	services := slices.SortedStableFunc(slices.Values(all.Services), func(a, b *Service) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	for i, s := range services {
		if i > 0 && serviceKey(s) == serviceKey(services[i-1]) {
			r.service(s).refuse("metadata.name", "is declared twice%s", r.at(services[i-1]))
		}
	}
	byName := slices.SortedFunc(slices.Values(all.Nodes), func(a, b *Node) int { return cmp.Compare(a.Name, b.Name) })
	for i, n := range byName {
		if i > 0 && n.Name == byName[i-1].Name {
			r.node(n).refuse("metadata.name", "is declared twice%s", r.at(byName[i-1]))
		}
	}
	return slices.DeleteFunc(services, func(s *Service) bool {
		return !proxied(s, r.service(s))
	})
}

// ports returns the ports of all services that have an address in the family, with their
// endpoints, for sections. r records faults of services and slices.
func (n node) ports(services []*Service, slicesOf index, r *report) []servicePort {
	count := 0
	for _, s := range services {
		count += len(s.Spec.Ports)
	}
	read := reader{node: n, report: r}
	all := make([]servicePort, 0, count)
	for _, s := range services {
		first := len(all)
		all = read.service(all, s)
		for i := first; i < len(all); i++ {
			all[i].endpoints = read.endpoints(slicesOf[serviceKey(s)], all[i].from)
		}
	}
	return all
}

// A reader reads objects for one node.
type reader struct {
	node
	*report
	text
}

// sections returns the rules of nat and filter for one family, for Generate.
func (n node) sections(ports []servicePort) map[rules.TableName]rules.Section {
	endpoints := 0
	for i := range ports {
		endpoints += len(ports[i].endpoints)
	}
	w := newWriter(n, endpoints > largeCluster, len(ports), endpoints)
	for i := range ports {
		w.servicePort(&ports[i])
	}
	return map[rules.TableName]rules.Section{
		rules.Nat:    {Chains: w.natChains(), Jumps: w.jumps(natJumps)},
		rules.Filter: {Chains: w.filterChains(), Jumps: w.jumps(filterJumps)},
	}
}
