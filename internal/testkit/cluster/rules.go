package cluster

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

// Endpoints returns the present pods of a service.
func (c *Cluster) Endpoints(i int) []netip.Addr { return slices.Clone(c.endpoints[i]) }

// Services returns the number of services.
func (c *Cluster) Services() int { return c.services }

// DatagramServices returns how many services also serve UDP. The last service never does.
func (c *Cluster) DatagramServices() int { return min(c.services-1, datagramServices) }

// Swap exchanges one pod between two services, as if both pods had ended and new pods had got
// their addresses.
func (c *Cluster) Swap(i, j int) {
	c.endpoints[i], c.endpoints[j] = slices.Clone(c.endpoints[i]), slices.Clone(c.endpoints[j])
	c.endpoints[i][0], c.endpoints[j][0] = c.endpoints[j][0], c.endpoints[i][0]
}

// Shrink reduces a service to its first pod. If that pod sends a request to the service, it
// reaches itself.
func (c *Cluster) Shrink(i int) { c.endpoints[i] = c.endpoints[i][:1] }

// Rules returns the rules that kube-proxy and the plugin portmap write into the empty tables of
// a node.
func (c *Cluster) Rules() (string, error) {
	g, err := c.generate()
	if err != nil {
		return "", err
	}
	return rules.Render(g, rules.IPv4) + hostPorts(), nil
}

// Sync returns the rules that kube-proxy restores without a flush: all of its chains, without
// its jumps, which exist already. gone are the chains that no service has any more.
func (c *Cluster) Sync(gone []string) (string, error) {
	g, err := c.generate()
	if err != nil {
		return "", err
	}
	var text strings.Builder
	for _, t := range []rules.TableName{rules.Filter, rules.Nat} {
		s := g[rules.IPv4.Table(t)]
		s.Jumps = nil
		one := rules.Render(rules.Generation{rules.IPv4.Table(t): s}, rules.IPv4)
		if t == rules.Nat {
			declared, deleted := "", ""
			for _, name := range gone {
				declared += ":" + name + " - [0:0]\n"
				deleted += "-X " + name + "\n"
			}
			one = strings.Replace(one, "*nat\n", "*nat\n"+declared, 1)
			one = strings.TrimSuffix(one, "COMMIT\n") + deleted + "COMMIT\n"
		}
		text.WriteString(one)
	}
	return text.String(), nil
}

// Chains returns the names of kube-proxy's chains in nat.
func (c *Cluster) Chains() ([]string, error) {
	g, err := c.generate()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, chain := range g[rules.IPv4.Table(rules.Nat)].Chains {
		names = append(names, chain.Name)
	}
	return names, nil
}

func (c *Cluster) generate() (rules.Generation, error) {
	o := kube.DefaultOptions()
	o.HostnameOverride = "node"
	o.ClusterCIDRs = []string{"10.244.0.0/16"}
	g, skips, err := kube.Generate(c.objects(), o)
	if err != nil || len(skips) > 0 {
		return nil, fmt.Errorf("generating the services' rules: %w, skipped %v", err, skips)
	}
	return g, nil
}

func (c *Cluster) objects() kube.Objects {
	objects := kube.Objects{Nodes: []*kube.Node{{
		ObjectMeta: kube.ObjectMeta{Name: "node"},
		Status:     kube.NodeStatus{Addresses: []kube.NodeAddress{{Type: kube.InternalIP, Address: node.String()}}},
	}}}
	add := func(name string, at netip.AddrPort, nodePort uint16, protocol string, pods []netip.Addr) {
		self, ready, port := "node", true, int32(streams)
		if protocol == kube.UDP {
			port, at = datagrams, Datagrams(at)
		}
		service := &kube.Service{
			ObjectMeta: kube.ObjectMeta{Name: name, Namespace: "soak"},
			Spec: kube.ServiceSpec{
				Type: kube.TypeClusterIP, ClusterIP: at.Addr().String(), ClusterIPs: []string{at.Addr().String()},
				IPFamilies: []string{kube.IPv4},
				Ports:      []kube.ServicePort{{Name: "main", Protocol: protocol, Port: int32(at.Port()), NodePort: int32(nodePort)}},
			},
		}
		if nodePort != 0 {
			service.Spec.Type = kube.TypeNodePort
		}
		slice := &kube.EndpointSlice{
			ObjectMeta: kube.ObjectMeta{
				Name: name + "-1", Namespace: "soak", Labels: map[string]string{kube.LabelServiceName: name},
			},
			AddressType: kube.IPv4,
			Ports:       []kube.EndpointPort{{Name: &service.Spec.Ports[0].Name, Protocol: &protocol, Port: &port}},
		}
		for _, a := range pods {
			slice.Endpoints = append(slice.Endpoints, kube.Endpoint{
				Addresses: []string{a.String()}, NodeName: &self, Conditions: kube.EndpointConditions{Ready: &ready},
			})
		}
		objects.Services = append(objects.Services, service)
		objects.Slices = append(objects.Slices, slice)
	}
	for i, pods := range c.endpoints {
		add(fmt.Sprintf("service-%d", i), Service(i), 0, kube.TCP, pods)
	}
	for i := range c.DatagramServices() {
		add(fmt.Sprintf("dns-%d", i), Service(i), 0, kube.UDP, c.endpoints[i])
	}
	for name, protocol := range map[string]string{"streams": kube.TCP, "datagrams": kube.UDP} {
		for i := range NodePorts {
			at := netip.AddrPortFrom(nth("10.97.0.0", i), 80)
			add(fmt.Sprintf("node-port-%s-%d", name, i), at, NodePort(i).Port(), protocol, NodePortPods(i))
		}
		for i := range Hairpins {
			add(fmt.Sprintf("hairpin-%s-%d", name, i), Hairpin(i), 0, protocol, []netip.Addr{HairpinPod(i)})
		}
	}
	return objects
}

// hostPorts returns the rules of portmap 1.6 for the pods with a host port, for TCP and UDP.
func hostPorts() string {
	var chains, dnat, each strings.Builder
	for i := range HostPorts {
		name := fmt.Sprintf("CNI-DN-%021x", i+1)
		fmt.Fprintf(&chains, ":%s - [0:0]\n", name)
		for protocol, port := range map[string]int{"tcp": streams, "udp": datagrams} {
			at := HostPort(i).Port()
			fmt.Fprintf(&dnat, "-A CNI-HOSTPORT-DNAT -p %s -m comment --comment \"dnat name: \\\"soak\\\" id: \\\"%d\\\"\" -m multiport --destination-ports %d -j %s\n",
				protocol, i, at, name)
			for _, from := range []string{HostPod(i).String() + "/16", "127.0.0.1"} {
				fmt.Fprintf(&each, "-A %s -s %s -p %s -m %s --dport %d -j CNI-HOSTPORT-SETMARK\n", name, from, protocol, protocol, at)
			}
			fmt.Fprintf(&each, "-A %s -p %s -m %s --dport %d -j DNAT --to-destination %s:%d\n", name, protocol, protocol, at, HostPod(i), port)
		}
	}
	return "*nat\n:CNI-HOSTPORT-SETMARK - [0:0]\n:CNI-HOSTPORT-MASQ - [0:0]\n:CNI-HOSTPORT-DNAT - [0:0]\n" + chains.String() +
		`-I POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
` + dnat.String() + each.String() + "COMMIT\n"
}

// MissingJumps returns the jumps of kube-proxy that the tables lack, as input of
// iptables-restore.
func (c *Cluster) MissingJumps(now rules.Ruleset) (string, error) {
	g, err := c.generate()
	if err != nil {
		return "", err
	}
	var text strings.Builder
	for _, t := range []rules.TableName{rules.Filter, rules.Nat} {
		fmt.Fprintf(&text, "*%s\n", t)
		for _, h := range g[rules.IPv4.Table(t)].Jumps {
			chain := now[t].Chain(h.Chain)
			if chain == nil || !slices.ContainsFunc(chain.Rules, h.Rule.Equal) {
				fmt.Fprintf(&text, "-I %s %s\n", h.Chain, h.Rule.Spec)
			}
		}
		text.WriteString("COMMIT\n")
	}
	return text.String(), nil
}
