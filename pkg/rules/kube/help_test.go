package kube

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/rules"
)

func ptr[T any](v T) *T { return &v }

func newNode(name, zone string) *Node {
	return &Node{ObjectMeta: ObjectMeta{Name: name, Labels: map[string]string{LabelZone: zone}}}
}

// newService returns a service without ports. Its addresses, one or two, also determine its
// families.
func newService(namespace, name string, addresses ...string) *Service {
	s := &Service{ObjectMeta: ObjectMeta{Namespace: namespace, Name: name}}
	s.Spec.Type = TypeClusterIP
	s.Spec.ClusterIP = addresses[0]
	s.Spec.ClusterIPs = addresses
	for _, a := range addresses {
		family := IPv4
		if strings.Contains(a, ":") {
			family = IPv6
		}
		s.Spec.IPFamilies = append(s.Spec.IPFamilies, family)
	}
	return s
}

// newSlice returns a slice of the service, in the family of its endpoints.
func newSlice(namespace, service, suffix string, port ServicePort, endpoints ...Endpoint) *EndpointSlice {
	protocol := port.Protocol
	if protocol == "" {
		protocol = TCP
	}
	s := &EndpointSlice{
		ObjectMeta: ObjectMeta{
			Namespace: namespace, Name: service + "-" + suffix,
			Labels: map[string]string{LabelServiceName: service},
		},
		AddressType: IPv4,
		Ports:       []EndpointPort{{Name: &port.Name, Port: &port.Port, Protocol: &protocol}},
		Endpoints:   endpoints,
	}
	if len(endpoints) > 0 && len(endpoints[0].Addresses) > 0 && strings.Contains(endpoints[0].Addresses[0], ":") {
		s.AddressType = IPv6
	}
	return s
}

// generate returns the content of a table of one family: jumps and chains in iptables' words.
// Names of chains of a service end with the number of their appearance, which makes tests
// readable.
func generate(t *testing.T, o Objects, options Options, f rules.Family, table rules.TableName) []string {
	t.Helper()
	g, _, err := Generate(o, options)
	if err != nil {
		t.Fatal(err)
	}
	if err := rules.Validate(g); err != nil {
		t.Error(err)
	}
	var lines []string
	for _, h := range g[f.Table(table)].Jumps {
		lines = append(lines, h.String())
	}
	for _, c := range g[f.Table(table)].Chains {
		for _, r := range c.Rules {
			lines = append(lines, "-A "+c.Name+" "+r.Spec)
		}
	}
	return lines
}

// about returns the lines that hold any of the words.
func about(lines []string, words ...string) []string {
	var found []string
	for _, l := range lines {
		for _, w := range words {
			if strings.Contains(l, w) {
				found = append(found, l)
				break
			}
		}
	}
	return found
}
