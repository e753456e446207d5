package kube

import (
	"crypto/sha256"
	"encoding/base32"
)

// The prefixes of chains that belong to one port of a service.
const (
	clusterPrefix  = "KUBE-SVC-" // to the endpoints that policy Cluster allows
	localPrefix    = "KUBE-SVL-" // to the endpoints that policy Local allows
	externalPrefix = "KUBE-EXT-" // what came for an external destination
	firewallPrefix = "KUBE-FW-"  // source ranges of a load balancer
	endpointPrefix = "KUBE-SEP-" // DNAT to one endpoint
)

const hashLength = 16

// hash returns the part of a chain's name by which kube-proxy tells one port
// of a service, or one endpoint of it, from all others (portProtoHash and
// servicePortEndpointChainName): the first 16 characters of the SHA-256 sum in
// base32, so that names stay within iptables' 28 characters.
func hash(scratch []byte, parts ...string) (name [hashLength]byte, grown []byte) {
	scratch = scratch[:0]
	for _, p := range parts {
		scratch = append(scratch, p...)
	}
	sum := sha256.Sum256(scratch)
	base32.StdEncoding.Encode(name[:], sum[:hashLength*5/8])
	return name, scratch
}
