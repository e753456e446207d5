package main

import (
	"context"
	"fmt"
	"slices"
	"sort"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// localNode is the node whose rules are loaded. It runs half of the endpoints.
const localNode = "node-a"

// generation returns kube-proxy's rules for the smallest number of services that makes at least
// want rules. The services have IPv4 addresses only, as in most clusters, which makes one table
// as large as possible. IPv6 has the shared chains.
func generation(want int) (rules.Generation, error) {
	options := kube.DefaultOptions()
	options.HostnameOverride = localNode
	options.ClusterCIDRs = []string{"10.0.0.0/8"}
	var failed error
	made := func(services int) rules.Generation {
		g, _, err := kube.Generate(cluster(services), options)
		if err != nil {
			failed = err
		}
		return g
	}
	enough := func(services int) bool {
		count, _ := made(services).Counts()
		return failed != nil || count >= want
	}
	most := 1
	for !enough(most) {
		most *= 2
	}
	return made(sort.Search(most, enough)), failed
}

// cluster returns services like those of real clusters. Every third has a node port, every tenth
// a load balancer with policy Local, every seventh affinity, and each has up to five endpoints.
func cluster(services int) kube.Objects {
	o := kube.Objects{Nodes: []*kube.Node{{ObjectMeta: kube.ObjectMeta{Name: localNode}}}}
	for i := range services {
		name := kube.ObjectMeta{Namespace: fmt.Sprintf("namespace-%d", i%20), Name: fmt.Sprintf("service-%d", i)}
		s := &kube.Service{ObjectMeta: name}
		s.Spec.ClusterIP = fmt.Sprintf("10.%d.%d.%d", 96+i>>16, i>>8&0xff, i&0xff)
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
		s.Spec.IPFamilies = []string{kube.IPv4}
		s.Spec.Type = kube.TypeClusterIP
		s.Spec.Ports = []kube.ServicePort{{Name: "http", Port: 80, Protocol: kube.TCP}}
		if i%3 == 0 {
			s.Spec.Type = kube.TypeNodePort
			s.Spec.Ports[0].NodePort = int32(30000 + i%30000)
		}
		if i%10 == 0 {
			s.Spec.Type = kube.TypeLoadBalancer
			s.Spec.ExternalTrafficPolicy = kube.PolicyLocal
			s.Status.LoadBalancer.Ingress = []kube.LoadBalancerIngress{{IP: fmt.Sprintf("192.0.%d.%d", i>>8&0xff, i&0xff)}}
		}
		if i%7 == 0 {
			s.Spec.SessionAffinity = kube.AffinityClientIP
		}
		o.Services = append(o.Services, s)
		o.Slices = append(o.Slices, endpoints(name, i))
	}
	return o
}

func endpoints(service kube.ObjectMeta, i int) *kube.EndpointSlice {
	name, port, protocol := "http", int32(8080), kube.TCP
	s := &kube.EndpointSlice{
		ObjectMeta:  service,
		AddressType: kube.IPv4,
		Ports:       []kube.EndpointPort{{Name: &name, Port: &port, Protocol: &protocol}},
	}
	s.Labels = map[string]string{kube.LabelServiceName: service.Name}
	for e := range i%5 + 1 {
		node := []string{localNode, "node-b"}[e%2]
		s.Endpoints = append(s.Endpoints, kube.Endpoint{
			Addresses: []string{fmt.Sprintf("10.%d.%d.%d", e, i>>8&0xff, i&0xff)}, NodeName: &node,
		})
	}
	return s
}

// hint is kubelet's chain in mangle, by which canaryd chooses the backend.
const hint = "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n"

// load writes the generation into the empty tables of this namespace.
func load(ctx context.Context, with scenario.Programs, g rules.Generation) error {
	for _, f := range rules.Families() {
		for _, s := range tableid.Of(g, f) {
			// With chains in descending order, iptables-nft-restore takes a third of the time
			// for 20,000 rules: its time is quadratic in the number of chains.
			slices.SortFunc(s.Chains, func(a, b rules.Chain) int {
				if a.Name < b.Name {
					return 1
				}
				return -1
			})
		}
		if err := with.RestoreNoflush(ctx, f, hint+rules.Render(g, f)); err != nil {
			return err
		}
	}
	return nil
}
