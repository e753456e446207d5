package kube

// The prefixes of chains that belong to one port of a service.
const (
	clusterPrefix  = "KUBE-SVC-" // leads to the endpoints that policy Cluster allows
	localPrefix    = "KUBE-SVL-" // leads to the endpoints that policy Local allows
	externalPrefix = "KUBE-EXT-" // takes traffic to external destinations
	firewallPrefix = "KUBE-FW-"  // checks a load balancer's source ranges
	endpointPrefix = "KUBE-SEP-" // translates to one endpoint
)

// hashLength is the length of the part of a chain's name that identifies a service's port or an
// endpoint (kube-proxy's portProtoHash and servicePortEndpointChainName). The part is the
// beginning of a SHA-256 sum in base32, so that names have at most the 28 characters that
// iptables allows.
const hashLength = 16
