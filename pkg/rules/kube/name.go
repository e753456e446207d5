package kube

import (
	"crypto/sha256"
	"encoding/base32"
)

// The prefixes of chains that belong to one port of a service.
const (
	clusterPrefix  = "KUBE-SVC-" // leads to the endpoints that policy Cluster allows
	localPrefix    = "KUBE-SVL-" // leads to the endpoints that policy Local allows
	externalPrefix = "KUBE-EXT-" // takes traffic to external destinations
	firewallPrefix = "KUBE-FW-"  // checks a load balancer's source ranges
	endpointPrefix = "KUBE-SEP-" // translates to one endpoint
)

const hashLength = 16

// hash returns the part of a chain's name that identifies one port of a service, or one endpoint
// of it (kube-proxy's portProtoHash and servicePortEndpointChainName). It is the first 16
// characters of the SHA-256 sum in base32, so that names stay within the 28 characters that
// iptables allows.
func hash(scratch []byte, parts ...string) (name [hashLength]byte, grown []byte) {
	scratch = scratch[:0]
	for _, p := range parts {
		scratch = append(scratch, p...)
	}
	sum := sha256.Sum256(scratch)
	base32.StdEncoding.Encode(name[:], sum[:hashLength*5/8])
	return name, scratch
}
