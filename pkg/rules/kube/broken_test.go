package kube

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

// TestSkipped: objects and fields that Generate skips because kube-proxy skips them.
func TestSkipped(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Objects)
		want   []string // an exclamation mark marks a broken object
	}{
		{"nothing", nil, nil},
		{"headless", func(o *Objects) { o.Services[0].Spec.ClusterIP = "None" }, []string{"Service ns/svc: is headless"}},
		{"no address yet", func(o *Objects) { o.Services[0].Spec.ClusterIP = "" }, []string{"Service ns/svc: has no cluster IP"}},
		{"ExternalName with an address", func(o *Objects) { o.Services[0].Spec.Type = TypeExternalName },
			[]string{"Service ns/svc: is an ExternalName"}},
		{"another proxy's", func(o *Objects) { o.Services[0].Labels = map[string]string{labelProxyName: ""} },
			[]string{"Service ns/svc: belongs to another proxy by its label service.kubernetes.io/service-proxy-name"}},
		{"a headless service's slice", func(o *Objects) { o.Slices[0].Labels[labelHeadless] = "" },
			[]string{"EndpointSlice ns/svc-1: belongs to a headless service"}},
		{"names", func(o *Objects) { o.Slices[0].AddressType = FQDN },
			[]string{`EndpointSlice ns/svc-1: addressType: is "FQDN", which kube-proxy does not know`}},
		{"no label", func(o *Objects) { delete(o.Slices[0].Labels, LabelServiceName) },
			[]string{"! EndpointSlice ns/svc-1: metadata.labels: has no label kubernetes.io/service-name"}},
		{"no namespace", func(o *Objects) { o.Slices[0].Namespace = "" },
			[]string{"! EndpointSlice svc-1: metadata: has no name or no namespace"}},
		{"port without name", func(o *Objects) { o.Slices[0].Ports[0].Name = nil },
			[]string{"! EndpointSlice ns/svc-1: ports[0]: has no name or no port"}},
		{"port 0", func(o *Objects) { o.Slices[0].Ports[0].Port = ptr[int32](0) },
			[]string{"! EndpointSlice ns/svc-1: ports[0]: has no name or no port"}},
		{"endpoint without addresses", func(o *Objects) { o.Slices[0].Endpoints[0].Addresses = nil },
			[]string{"! EndpointSlice ns/svc-1: endpoints[0].addresses: is empty"}},
		{"external IPs", func(o *Objects) {
			o.Services[0].Spec.ExternalIPs = []string{" ", "80.0.11", "2001:db8::1", "80.0.11.1"}
		},
			[]string{`! Service ns/svc: spec.externalIPs[1]: "80.0.11" is not an address`}},
		{"ingress", func(o *Objects) {
			o.Services[0].Status.LoadBalancer.Ingress = []LoadBalancerIngress{{Hostname: "x"}, {IP: "x"}}
		}, []string{`! Service ns/svc: status.loadBalancer.ingress[1].ip: "x" is not an address`}},
		{"source ranges", func(o *Objects) {
			o.Services[0].Spec.LoadBalancerSourceRanges = []string{"1.2.3.4", "1.2.3.4/33", "", "fe80::1%eth0/64", "::ffff:1.2.3.4/95"}
		}, []string{
			`! Service ns/svc: spec.loadBalancerSourceRanges[0]: "1.2.3.4" is not a CIDR`,
			`! Service ns/svc: spec.loadBalancerSourceRanges[1]: "1.2.3.4/33" is not a CIDR`,
			`! Service ns/svc: spec.loadBalancerSourceRanges[3]: "fe80::1%eth0/64" is not a CIDR`,
			`! Service ns/svc: spec.loadBalancerSourceRanges[4]: "::ffff:1.2.3.4/95" is not a CIDR`,
		}},
		{"no health check port", func(o *Objects) {
			o.Services[0].Spec.Type = TypeLoadBalancer
			o.Services[0].Spec.ExternalTrafficPolicy = PolicyLocal
		}, []string{"! Service ns/svc: spec.healthCheckNodePort: is missing"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := oneService(nil)
			if c.change != nil {
				c.change(&o)
			}
			g, skips, err := Generate(o, onNodeA(nil))
			if err != nil {
				t.Fatal(err)
			}
			if err := rules.Validate(g); err != nil {
				t.Error(err)
			}
			var got []string
			for _, s := range skips {
				text := s.String()
				if s.Broken {
					text = "! " + text
				}
				got = append(got, text)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestRefused: fields from which no rules can be made.
func TestRefused(t *testing.T) {
	service := func(change func(*Service)) func(*Objects) {
		return func(o *Objects) { change(o.Services[0]) }
	}
	port := func(change func(*ServicePort)) func(*Objects) {
		return service(func(s *Service) { change(&s.Spec.Ports[0]) })
	}
	for _, c := range []struct {
		name   string
		change func(*Objects)
		want   string
	}{
		{"cluster IP of the wrong family", service(func(s *Service) { s.Spec.ClusterIPs = []string{"fd00::1"} }),
			`Service ns/svc: spec.clusterIPs[0]: "fd00::1" is not an IPv4 address`},
		{"no address", service(func(s *Service) { s.Spec.IPFamilies, s.Spec.ClusterIP = nil, "10.96.0" }),
			`Service ns/svc: spec.clusterIP: "10.96.0" is not an IPv4 address`},
		{"port", port(func(p *ServicePort) { p.Port = 65536 }), "Service ns/svc: spec.ports[0].port: 65536 is not a port"},
		{"no port", port(func(p *ServicePort) { p.Port = 0 }), "Service ns/svc: spec.ports[0].port: 0 is not a port"},
		{"node port", port(func(p *ServicePort) { p.NodePort = -1 }), "Service ns/svc: spec.ports[0].nodePort: -1 is not a port"},
		{"protocol", port(func(p *ServicePort) { p.Protocol = "tcp" }), `Service ns/svc: spec.ports[0].protocol: "tcp" is none of TCP, UDP, SCTP`},
		{"port's name", port(func(p *ServicePort) { p.Name = "a\nb" }), `Service ns/svc: spec.ports[0].name: "a\nb" is not a port's name`},
		{"port twice", service(func(s *Service) { s.Spec.Ports = append(s.Spec.Ports, s.Spec.Ports[0]) }),
			`Service ns/svc: spec.ports[1].name: "" is declared twice`},
		{"name", func(o *Objects) { o.Services[0].Name = `a" -j ACCEPT` }, `Service ns/a" -j ACCEPT: metadata.name: "a\" -j ACCEPT" is not a service's name`},
		{"namespace", func(o *Objects) { o.Services[0].Namespace = "" }, `Service svc: metadata.namespace: "" is not a namespace`},
		{"affinity", service(func(s *Service) { s.Spec.SessionAffinity = "Cookie" }),
			`Service ns/svc: spec.sessionAffinity: "Cookie" is neither ClientIP nor None`},
		{"affinity's time", service(func(s *Service) {
			s.Spec.SessionAffinity = AffinityClientIP
			s.Spec.SessionAffinityConfig = &SessionAffinityConfig{ClientIP: &ClientIPConfig{TimeoutSeconds: ptr[int32](86401)}}
		}), "Service ns/svc: spec.sessionAffinityConfig.clientIP.timeoutSeconds: 86401 is not within 1 and 86400"},
		{"health check port", service(func(s *Service) {
			s.Spec.Type, s.Spec.HealthCheckNodePort = TypeLoadBalancer, 70000
			s.Spec.ExternalTrafficPolicy = PolicyLocal
		}), "Service ns/svc: spec.healthCheckNodePort: 70000 is not a port"},
		{"service twice", func(o *Objects) { o.Services = append(o.Services, oneService(nil).Services...) },
			"Service ns/svc: metadata.name: is declared twice"},
		{"slice twice", func(o *Objects) { o.Slices = append(o.Slices, oneService(nil).Slices...) },
			"EndpointSlice ns/svc-1: metadata.name: is declared twice"},
		{"node twice", func(o *Objects) { o.Nodes = append(o.Nodes, o.Nodes[0]) }, "Node node-a: metadata.name: is declared twice"},
		{"endpoint's port", func(o *Objects) { o.Slices[0].Ports[0].Port = ptr[int32](70000) }, "EndpointSlice ns/svc-1: ports[0].port: 70000 is not a port"},
		{"endpoint of the wrong family", func(o *Objects) { o.Slices[0].Endpoints[0].Addresses[0] = "fd00::1" },
			`EndpointSlice ns/svc-1: endpoints[0].addresses[0]: "fd00::1" is not an IPv4 address`},
		{"two at once", func(o *Objects) {
			o.Services[0].Spec.SessionAffinity, o.Slices[0].Endpoints[0].Addresses[0] = "Cookie", "x"
		},
			`EndpointSlice ns/svc-1: endpoints[0].addresses[0]: "x" is not an IPv4 address` + "\n" +
				`Service ns/svc: spec.sessionAffinity: "Cookie" is neither ClientIP nor None`},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := oneService(nil)
			c.change(&o)
			g, _, err := Generate(o, onNodeA(nil))
			var object *ObjectError
			if g != nil || !errors.As(err, &object) {
				t.Fatalf("generation %v, error %v", g != nil, err)
			}
			if diff := cmp.Diff(c.want, err.Error()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestRefusedOptions(t *testing.T) {
	for _, c := range []struct {
		change func(*Options)
		want   string
	}{
		{func(o *Options) { o.IPTablesMasqueradeBit = 32 }, "--iptables-masquerade-bit: 32 is not within 0 and 31"},
		{func(o *Options) { o.MakeIPTablesUtilChains, o.IPTablesDropBit = true, -1 }, "--iptables-drop-bit: -1 is not within 0 and 31"},
		{func(o *Options) { o.MakeIPTablesUtilChains, o.IPTablesDropBit = true, 14 }, "--iptables-drop-bit: 14 is the masquerade bit: choose another"},
		{func(o *Options) { o.IPTablesDropBit = 14 }, ""},
		{func(o *Options) { o.ClusterCIDRs = []string{"10.0.0.0"} }, `--cluster-cidr: "10.0.0.0" is not a CIDR`},
		{func(o *Options) { o.ClusterCIDRs = []string{"fd00::/8", " 10.0.0.5/8"} }, `--cluster-cidr: " 10.0.0.5/8" is not a CIDR`},
		{func(o *Options) { o.ClusterCIDRs = []string{"10.0.0.0/8", "11.0.0.0/8"} },
			"--cluster-cidr: [10.0.0.0/8 11.0.0.0/8]: give at most one CIDR of each family"},
		{func(o *Options) { o.DetectLocalMode = "Magic" },
			`--detect-local-mode: "Magic" is none of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix`},
		{func(o *Options) { o.DetectLocalMode = NodeCIDR }, `--detect-local-mode: NodeCIDR needs a Node object "node-a" with spec.podCIDRs`},
		{func(o *Options) { o.DetectLocalMode = BridgeInterface }, `--pod-bridge-interface: "" is not an interface's name`},
		{func(o *Options) { o.DetectLocalMode, o.PodInterfaceNamePrefix = InterfaceNamePrefix, "a b" },
			`--pod-interface-name-prefix: "a b" is not an interface's name`},
		{func(o *Options) { o.NodePortAddresses = []string{"primary", "10.0.0.0/8"} }, `--nodeport-addresses: "primary" is not a CIDR`},
		{func(o *Options) {
			o.NodeIPs = []netip.Addr{netip.MustParseAddr("1.2.3.4"), netip.MustParseAddr("1.2.3.5")}
		},
			"--node-ip: [1.2.3.4 1.2.3.5]: give at most one address of each family"},
		{func(o *Options) { o.HostnameOverride = " NODE-A " }, ""},
	} {
		_, _, err := Generate(oneService(nil), onNodeA(c.change))
		got := ""
		if err != nil {
			got = err.Error()
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

// TestEndpoints: the endpoints that get traffic, in cases that the corpus does not have.
func TestEndpoints(t *testing.T) {
	endpoint := func(ip string, change ...func(*Endpoint)) Endpoint {
		e := Endpoint{Addresses: []string{ip, "10.9.9.9"}}
		for _, c := range change {
			c(&e)
		}
		return e
	}
	local := func(e *Endpoint) { e.NodeName = ptr("node-a") }
	leaving := func(e *Endpoint) {
		e.Conditions = EndpointConditions{Ready: ptr(false), Serving: ptr(true), Terminating: ptr(true)}
	}
	unready := func(e *Endpoint) { e.Conditions.Ready = ptr(false) }
	zones := func(names ...string) func(*Endpoint) {
		return func(e *Endpoint) {
			e.Hints = &EndpointHints{}
			for _, n := range names {
				e.Hints.ForZones = append(e.Hints.ForZones, Hint{Name: n})
			}
		}
	}
	both := PolicyLocal
	for _, c := range []struct {
		name          string
		policy        string
		first, second []Endpoint // in two slices
		svc, svl, sep []string
	}{
		{"sorted as text", "", []Endpoint{endpoint("10.1.0.9"), endpoint("10.1.0.10")}, nil,
			[]string{"10.1.0.10", "10.1.0.9"}, nil, []string{"10.1.0.10", "10.1.0.9"}},
		{"leading zeros", "", []Endpoint{endpoint("10.001.000.009")}, nil, []string{"10.1.0.9"}, nil, []string{"10.1.0.9"}},
		{"one that runs and one that leaves share an address", "", []Endpoint{endpoint("10.1.0.1")},
			[]Endpoint{endpoint("10.1.0.1", leaving)}, []string{"10.1.0.1"}, nil, []string{"10.1.0.1"}},
		{"the other way round", "", []Endpoint{endpoint("10.1.0.1", leaving), endpoint("10.1.0.2", leaving)},
			[]Endpoint{endpoint("10.1.0.1")}, []string{"10.1.0.1"}, nil, []string{"10.1.0.1"}},
		{"the last slice wins", "", []Endpoint{endpoint("10.1.0.1")},
			[]Endpoint{endpoint("10.1.0.1", unready)}, nil, nil, nil},
		{"all leave", "", []Endpoint{endpoint("10.1.0.1", leaving), endpoint("10.1.0.2", unready)}, nil,
			[]string{"10.1.0.1"}, nil, []string{"10.1.0.1"}},
		{"the local one leaves", both, []Endpoint{endpoint("10.1.0.1", leaving, local), endpoint("10.1.0.2")}, nil,
			[]string{"10.1.0.2"}, []string{"10.1.0.1"}, []string{"10.1.0.1", "10.1.0.2"}},
		{"the local one is meant for another zone", both,
			[]Endpoint{endpoint("10.1.0.1", local, zones("z2")), endpoint("10.1.0.2", zones("z1"))}, nil,
			[]string{"10.1.0.2"}, []string{"10.1.0.1"}, []string{"10.1.0.1", "10.1.0.2"}},
		{"a hint is missing", "", []Endpoint{endpoint("10.1.0.1", zones("z1")), endpoint("10.1.0.2", zones())}, nil,
			[]string{"10.1.0.1", "10.1.0.2"}, nil, []string{"10.1.0.1", "10.1.0.2"}},
		{"no hint for this zone", "", []Endpoint{endpoint("10.1.0.1", zones("z2"))}, nil,
			[]string{"10.1.0.1"}, nil, []string{"10.1.0.1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := oneService(func(s *Service) { s.Spec.ExternalTrafficPolicy = c.policy })
			o.Slices = []*EndpointSlice{newSlice("ns", "svc", "2", ServicePort{Port: 80}, c.second...),
				newSlice("ns", "svc", "1", ServicePort{Port: 80}, c.first...)}
			lines := generate(t, o, onNodeA(nil), rules.IPv4, rules.Nat)
			behind := func(chain, from string) []string {
				var found []string
				for _, l := range about(lines, "-A "+chain) {
					if _, address, ok := strings.Cut(l, from); ok {
						found = append(found, address[:strings.Index(address, ":80")])
					}
				}
				return found
			}
			for what, w := range map[string][2][]string{
				"KUBE-SVC": {c.svc, behind("KUBE-SVC", " -> ")},
				"KUBE-SVL": {c.svl, behind("KUBE-SVL", " -> ")},
				"KUBE-SEP": {c.sep, behind("KUBE-SEP", "--to-destination ")},
			} {
				if diff := cmp.Diff(w[0], w[1]); diff != "" {
					t.Errorf("%s (-want +got):\n%s", what, diff)
				}
			}
		})
	}
}
