package kubeproxy

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

const (
	nodeName  = "node"
	namespace = "town"
	podsIPv4  = "10.244.0.0/16"
	podsIPv6  = "fd00:10:244::/64"
	// pods is the number of addresses for pods. They are so few that a new pod often has a
	// former one's.
	pods = 300
)

// A town is the cluster of a test: services in slots, of each kind that kube-proxy
// distinguishes. One source of random numbers makes its changes, and they reach the API server
// at once.
type town struct {
	api   *api
	rng   *rand.Rand
	slots []slot
}

// A slot is a service, or the place of a removed one.
type slot struct {
	there    bool
	life     int   // a new service in the slot may have another name
	pods     []pod // nil: no endpoints
	affinity bool
	port     int32
}

type pod struct {
	number       int
	local, ready bool
}

// newTown makes the node and n services, and one more that only ring changes. There is no
// ServiceCIDR: kube-proxy 1.36 writes its rule only in a full sync. A kube-proxy that hears of
// it after its first sync lacks the rule for an hour.
func newTown(a *api, rng *rand.Rand, n int) *town {
	node := &kube.Node{
		TypeMeta: kube.TypeMeta{Kind: "Node", APIVersion: "v1"}, ObjectMeta: kube.ObjectMeta{Name: nodeName},
		Status: kube.NodeStatus{Addresses: []kube.NodeAddress{
			{Type: kube.InternalIP, Address: nodeIPv4}, {Type: kube.InternalIP, Address: nodeIPv6},
		}},
	}
	a.set(nodes, object{node, &node.ObjectMeta})
	t := &town{api: a, rng: rng, slots: make([]slot, n+1)}
	for i := range t.slots {
		t.add(i)
	}
	return t
}

// ring makes kube-proxy sync. In nftables mode kube-proxy deletes emptied chains only in a
// later sync.
func (t *town) ring() {
	i := len(t.slots) - 1
	t.slots[i].port = 161 - t.slots[i].port
	t.setService(i)
}

// synced rings, and waits until each of these kube-proxies has synced both families since.
func (t *town) synced(test *testing.T, proxies ...*proxy) {
	test.Helper()
	const syncs = "sync_proxy_rules_duration_seconds_count" // failed syncs included
	before := map[*proxy]samples{}
	for _, p := range proxies {
		m, err := p.metrics()
		if err != nil {
			test.Fatal(err)
		}
		before[p] = m
	}
	t.ring()
	for _, p := range proxies {
		testkit.Until(test, "kube-proxy's syncs in "+p.space.name, func() error {
			m, err := p.metrics()
			for name, at := range before[p] {
				if err == nil && strings.HasPrefix(name, syncs) && m[name] == at {
					err = errors.New("none after the last change")
				}
			}
			return err
		})
	}
}

// change makes one change, mostly to a pod.
func (t *town) change() {
	i := t.rng.IntN(len(t.slots) - 1)
	s := &t.slots[i]
	switch n := t.rng.IntN(100); {
	case !s.there:
		t.add(i)
	case n < 6:
		t.removeService(i)
	case n < 10:
		s.affinity = !s.affinity
		t.setService(i)
	case n < 13:
		s.port = 161 - s.port // 80 or 81
		t.setService(i)
	case n < 20:
		s.pods = nil
		t.setSlices(i)
	default:
		t.movePods(s)
		t.setSlices(i)
	}
}

// movePods adds, removes or replaces a pod, or changes its readiness.
func (t *town) movePods(s *slot) {
	if len(s.pods) == 0 || len(s.pods) < 4 && t.rng.IntN(3) == 0 {
		s.pods = append(s.pods, t.newPod(s))
		return
	}
	i := t.rng.IntN(len(s.pods))
	switch t.rng.IntN(3) {
	case 0:
		s.pods = append(s.pods[:i:i], s.pods[i+1:]...)
	case 1:
		s.pods[i].ready = !s.pods[i].ready
	default:
		s.pods[i] = t.newPod(s)
	}
}

// newPod returns a pod that the service does not have.
func (t *town) newPod(s *slot) pod {
	for {
		p := pod{number: t.rng.IntN(pods), local: t.rng.IntN(2) == 0, ready: t.rng.IntN(8) > 0}
		free := true
		for _, other := range s.pods {
			free = free && other.number != p.number
		}
		if free {
			return p
		}
	}
}

func (t *town) add(i int) {
	s := &t.slots[i]
	*s = slot{there: true, life: s.life + t.rng.IntN(2), port: 80, affinity: i%6 == 5}
	for range t.rng.IntN(4) {
		s.pods = append(s.pods, t.newPod(s))
	}
	t.setService(i)
	t.setSlices(i)
}

func (t *town) removeService(i int) {
	name := t.name(i)
	t.slots[i].there = false
	t.api.remove(services, namespace, name)
	t.api.remove(slicesOf, namespace, name+"-ipv4")
	t.api.remove(slicesOf, namespace, name+"-ipv6")
}

func (t *town) name(i int) string { return fmt.Sprintf("service-%d-%d", i, t.slots[i].life) }

// setService writes a slot's service. Its kind depends on the slot.
func (t *town) setService(i int) {
	s := &t.slots[i]
	ips := []string{fmt.Sprintf("10.96.%d.%d", i/200, 10+i%200), fmt.Sprintf("fd00:10:96::%x", 10+i)}
	spec := kube.ServiceSpec{
		Type: kube.TypeClusterIP, ClusterIP: ips[0], ClusterIPs: ips, SessionAffinity: kube.AffinityNone,
		IPFamilies: []string{kube.IPv4, kube.IPv6},
		Ports:      []kube.ServicePort{{Name: "main", Protocol: kube.TCP, Port: s.port, TargetPort: "8080"}},
	}
	var status kube.ServiceStatus
	if s.affinity {
		seconds := int32(60)
		spec.SessionAffinity, spec.SessionAffinityConfig = kube.AffinityClientIP, &kube.SessionAffinityConfig{ClientIP: &kube.ClientIPConfig{TimeoutSeconds: &seconds}}
	}
	local, cluster := kube.PolicyLocal, kube.PolicyCluster
	spec.InternalTrafficPolicy = &cluster
	switch i % 6 {
	case 1:
		spec.Ports = append(spec.Ports, kube.ServicePort{Name: "dns", Protocol: kube.UDP, Port: 53, TargetPort: "5353"})
	case 2:
		spec.Type, spec.ExternalTrafficPolicy = kube.TypeNodePort, kube.PolicyCluster
	case 3:
		spec.Type, spec.ExternalTrafficPolicy = kube.TypeNodePort, kube.PolicyLocal
		spec.ExternalIPs = []string{fmt.Sprintf("198.18.%d.%d", i/200, 10+i%200)}
	case 4:
		spec.Type, spec.ExternalTrafficPolicy = kube.TypeLoadBalancer, kube.PolicyCluster
		spec.LoadBalancerSourceRanges = []string{"203.0.113.0/24", "2001:db8:113::/64"}
		status.LoadBalancer.Ingress = []kube.LoadBalancerIngress{{IP: fmt.Sprintf("198.19.%d.%d", i/200, 10+i%200)}, {IP: fmt.Sprintf("2001:db8::%x", 100+i)}}
	case 5:
		spec.InternalTrafficPolicy = &local
	}
	if spec.Type != kube.TypeClusterIP {
		spec.Ports[0].NodePort = int32(30000 + i)
	}
	service := &kube.Service{
		TypeMeta: kube.TypeMeta{Kind: "Service", APIVersion: "v1"}, ObjectMeta: kube.ObjectMeta{Name: t.name(i), Namespace: namespace},
		Spec: spec, Status: status,
	}
	t.api.set(services, object{service, &service.ObjectMeta})
}

// setSlices writes the endpoints of a slot's service in both families.
func (t *town) setSlices(i int) {
	for _, family := range []string{kube.IPv4, kube.IPv6} {
		suffix := "-ipv4"
		if family == kube.IPv6 {
			suffix = "-ipv6"
		}
		main, dns, tcp, udp, stream, datagram := "main", "dns", kube.TCP, kube.UDP, int32(8080), int32(5353)
		slice := &kube.EndpointSlice{
			TypeMeta: kube.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"},
			ObjectMeta: kube.ObjectMeta{
				Name: t.name(i) + suffix, Namespace: namespace, Labels: map[string]string{kube.LabelServiceName: t.name(i)},
			},
			AddressType: family,
			Endpoints:   []kube.Endpoint{},
			Ports: []kube.EndpointPort{
				{Name: &main, Protocol: &tcp, Port: &stream}, {Name: &dns, Protocol: &udp, Port: &datagram},
			},
		}
		for _, p := range t.slots[i].pods {
			address, at := fmt.Sprintf("10.244.%d.%d", p.number/200, p.number%200+10), nodeName
			if family == kube.IPv6 {
				address = fmt.Sprintf("fd00:10:244::%x", p.number+10)
			}
			if !p.local {
				at = "another"
			}
			slice.Endpoints = append(slice.Endpoints, kube.Endpoint{
				Addresses: []string{address}, NodeName: &at, Conditions: kube.EndpointConditions{Ready: &p.ready, Serving: &p.ready},
			})
		}
		t.api.set(slicesOf, object{slice, &slice.ObjectMeta})
	}
}
