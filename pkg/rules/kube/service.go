package kube

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
)

// The labels of objects that kube-proxy ignores.
const (
	labelProxyName = "service.kubernetes.io/service-proxy-name"
	labelHeadless  = "service.kubernetes.io/headless"
)

// A servicePort is a port of a service in one family, with all input of its rules. It follows
// kube-proxy's newBaseServiceInfo.
type servicePort struct {
	name     string // NAMESPACE/SERVICE or NAMESPACE/SERVICE:PORT
	protocol string // in lower case
	port     string
	nodePort string // empty when there is none

	clusterIP   string
	externalIPs []string
	lbIPs       []string
	ranges      []netip.Prefix // the sources that may use lbIPs; none: all

	affinity   string // seconds; empty without affinity
	healthPort string // empty when there is none

	externalLocal, internalLocal bool

	from      *ServicePort
	endpoints []endpoint
}

// external reports whether there are destinations apart from the cluster IP.
func (p *servicePort) external() bool {
	return p.nodePort != "" || len(p.lbIPs) > 0 || len(p.externalIPs) > 0
}

// usesCluster reports whether some traffic follows policy Cluster. Under policy Local for
// external destinations, traffic to them from the node and its pods still does.
func (p *servicePort) usesCluster() bool { return !p.internalLocal || p.external() }

// usesLocal reports whether some traffic follows policy Local.
func (p *servicePort) usesLocal() bool {
	return p.internalLocal || p.externalLocal && p.external()
}

// proxied reports whether kube-proxy handles the service. Generate leaves the others out; r
// records why.
func proxied(s *Service, r reporter) bool {
	_, foreign := s.Labels[labelProxyName]
	switch {
	case foreign:
		r.skip("", "belongs to another proxy by its label "+labelProxyName)
	case s.Spec.ClusterIP == ClusterIPNone:
		r.skip("", "is headless")
	case s.Spec.Type == TypeExternalName:
		r.skip("", "is an ExternalName")
	case s.Spec.ClusterIP == "":
		r.skip("", "has no cluster IP")
	default:
		return true
	}
	return false
}

// service appends the ports of s to all, for node.ports. There are none if s has no address
// in the node's family. Faults of s are recorded in the report.
func (read *reader) service(all []servicePort, s *Service) []servicePort {
	f, r := read.family, read.report.service(s)
	field, address := clusterIP(s, f)
	if address == "" {
		return all
	}
	if !isDNSLabel(s.Namespace) {
		r.refuse("metadata.namespace", "%q is not a namespace", s.Namespace)
	}
	if !isDNSLabel(s.Name) {
		r.refuse("metadata.name", "%q is not a service's name", s.Name)
	}
	ip, ok := parseIP(address)
	if !ok || familyOf(ip) != f {
		r.refuse(field, "%q is not an %s address", address, familyName(f))
		return all
	}
	common := servicePort{
		clusterIP:     spelled(ip, address),
		externalIPs:   externalIPs(s, f, r),
		lbIPs:         loadBalancerIPs(s, f, r),
		ranges:        sourceRanges(s, f, r),
		affinity:      affinity(s, r),
		externalLocal: externalLocal(s),
		internalLocal: s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == PolicyLocal,
	}
	if s.Spec.Type == TypeLoadBalancer && common.externalLocal {
		switch port := s.Spec.HealthCheckNodePort; {
		case port == 0:
			r.broken("spec.healthCheckNodePort", "is missing")
		case !validPort(port):
			r.refuse("spec.healthCheckNodePort", "%d is not a port", port)
		default:
			common.healthPort = strconv.Itoa(int(port))
		}
	}
	for i := range s.Spec.Ports {
		all = append(all, common)
		if !read.port(&all[len(all)-1], s, i, r) {
			all = all[:len(all)-1]
		}
	}
	return all
}

// port sets the fields of p that belong to port number of the service. It reports whether
// the port is valid; otherwise service leaves it out. r records the faults.
func (read *reader) port(p *servicePort, s *Service, number int, r reporter) bool {
	from := &s.Spec.Ports[number]
	p.from = from
	ok := true
	refuse := func(field, format string, args ...any) {
		r.refuse("spec.ports["+strconv.Itoa(number)+"]."+field, format, args...)
		ok = false
	}
	if from.Name == "" {
		p.name = read.join(s.Namespace, "/", s.Name)
	} else {
		p.name = read.join(s.Namespace, "/", s.Name, ":", from.Name)
		if !isDNSLabel(from.Name) {
			refuse("name", "%q is not a port's name", from.Name)
		}
	}
	var known bool
	if p.protocol, known = protocols[from.Protocol]; !known {
		refuse("protocol", "%q is none of TCP, UDP, SCTP", from.Protocol)
	}
	if !validPort(from.Port) {
		refuse("port", "%d is not a port", from.Port)
	}
	p.port = strconv.Itoa(int(from.Port))
	if from.NodePort != 0 {
		p.nodePort = strconv.Itoa(int(from.NodePort))
		if !validPort(from.NodePort) {
			refuse("nodePort", "%d is not a port", from.NodePort)
		}
	}
	for i := range s.Spec.Ports[:number] {
		if s.Spec.Ports[i].Name == from.Name && protocols[s.Spec.Ports[i].Protocol] == p.protocol {
			refuse("name", "%q is declared twice", from.Name)
		}
	}
	return ok
}

// clusterIP returns the service's address in a family, and the field that holds it, for
// faults. Both are "" if there is none, and the service then has no rules in that family.
// Objects from the time before dual stack have no list of families.
func clusterIP(s *Service, f rules.Family) (field, address string) {
	if len(s.Spec.IPFamilies) == 0 {
		ip, ok := parseIP(s.Spec.ClusterIP)
		if isIPv6 := ok && familyOf(ip) == rules.IPv6; isIPv6 != (f == rules.IPv6) {
			return "", ""
		}
		return "spec.clusterIP", s.Spec.ClusterIP
	}
	for i, family := range s.Spec.IPFamilies {
		if family == familyName(f) && i < len(s.Spec.ClusterIPs) {
			return "spec.clusterIPs[" + strconv.Itoa(i) + "]", s.Spec.ClusterIPs[i]
		}
	}
	return "", ""
}

// externalIPs returns the service's external addresses in a family, for service. An
// unreadable address is left out, as kube-proxy does, and r records it.
func externalIPs(s *Service, f rules.Family, r reporter) []string {
	var all []string
	for i, text := range s.Spec.ExternalIPs {
		switch ip, ok := parseIP(text); {
		case ok && familyOf(ip) == f:
			all = append(all, spelled(ip, text))
		case !ok && strings.TrimSpace(text) != "":
			r.broken("spec.externalIPs["+strconv.Itoa(i)+"]", "%q is not an address", text)
		}
	}
	return all
}

// loadBalancerIPs returns the ingress addresses of a family with which traffic arrives at
// the node. It leaves out the addresses of a load balancer that is a proxy itself, and
// unreadable ones, which r records.
func loadBalancerIPs(s *Service, f rules.Family, r reporter) []string {
	var all []string
	for i, ingress := range s.Status.LoadBalancer.Ingress {
		if ingress.IP == "" || ingress.IPMode != nil && *ingress.IPMode != IPModeVIP {
			continue
		}
		switch ip, ok := parseIP(ingress.IP); {
		case !ok:
			r.broken("status.loadBalancer.ingress["+strconv.Itoa(i)+"].ip", "%q is not an address", ingress.IP)
		case familyOf(ip) == f:
			all = append(all, spelled(ip, ingress.IP))
		}
	}
	return all
}

// sourceRanges returns the sources that may use the load balancer's addresses. If a range
// includes every address, or if no range can be read, it returns nil, which means all sources.
func sourceRanges(s *Service, f rules.Family, r reporter) []netip.Prefix {
	var all []netip.Prefix
	for i, text := range s.Spec.LoadBalancerSourceRanges {
		text = strings.TrimSpace(text)
		switch cidr, ok := parseCIDR(text); {
		case ok && familyOf(cidr.Addr()) == f:
			all = append(all, cidr)
		case !ok && text != "":
			r.broken("spec.loadBalancerSourceRanges["+strconv.Itoa(i)+"]", "%q is not a CIDR", text)
		}
	}
	if slices.ContainsFunc(all, func(c netip.Prefix) bool { return c.Bits() == 0 }) {
		return nil
	}
	return all
}

// The longest affinity that the API server accepts, a day, and its default, in seconds.
const (
	maxAffinity     = 86400
	defaultAffinity = 10800
)

// affinity returns, as text, the number of seconds for which a client keeps its endpoint; ""
// without affinity. r records a wrong value as refused: then Generate makes no rules.
func affinity(s *Service, r reporter) string {
	switch s.Spec.SessionAffinity {
	case AffinityClientIP:
	case AffinityNone, "":
		return ""
	default:
		r.refuse("spec.sessionAffinity", "%q is neither ClientIP nor None", s.Spec.SessionAffinity)
		return ""
	}
	seconds := int32(defaultAffinity)
	if c := s.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
		seconds = *c.ClientIP.TimeoutSeconds
	}
	if seconds < 1 || seconds > maxAffinity {
		r.refuse("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "%d is not within 1 and %d",
			seconds, maxAffinity)
	}
	return strconv.Itoa(int(seconds))
}

// externalLocal reports whether external traffic follows policy Local: only endpoints on
// this node serve it. The field has no effect for types without external destinations.
func externalLocal(s *Service) bool {
	if s.Spec.ExternalTrafficPolicy != PolicyLocal {
		return false
	}
	switch s.Spec.Type {
	case TypeLoadBalancer, TypeNodePort:
		return true
	case TypeClusterIP, "":
		return len(s.Spec.ExternalIPs) > 0
	}
	return false
}

// protocols are iptables' names of the protocols. The API's default is TCP.
var protocols = map[string]string{
	"": "tcp", TCP: "tcp", UDP: "udp", SCTP: "sctp",
}

func validPort(p int32) bool { return p > 0 && p <= 65535 }

// familyName returns Kubernetes' name of an IP family, by which services and slices name
// theirs.
func familyName(f rules.Family) string {
	if f == rules.IPv6 {
		return IPv6
	}
	return IPv4
}

// isDNSLabel reports whether name is a DNS label (RFC 1123). The API server accepts no other
// names. Other names could end a comment or be too long for it.
func isDNSLabel(name string) bool {
	return name != "" && len(name) <= 63 && name[0] != '-' && name[len(name)-1] != '-' &&
		strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}
