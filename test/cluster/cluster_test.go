//go:build cluster

// Package cluster runs a whole node of Kubernetes, with canaryd as the DaemonSet of
// deploy/kubernetes: the API server takes every manifest, clients outside measure what flushes
// cost them, and the node is drained, updated and left as the documents say. hack/cluster.sh
// builds what it needs and starts it in namespaces of its own.
package cluster

import (
	"os"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestCluster is one story: each part needs what those before it have left.
func TestCluster(t *testing.T) {
	nstest.NeedRoot(t)
	n := newNode(t, iptables.Backend(os.Getenv("CANARYD_TEST_CLUSTER_BACKEND")))
	for _, part := range []struct {
		name string
		do   func(n *node)
	}{
		{"API server", startControlPlane},
		{"manifests", tryManifests},
		{"node", startNode},
		{"DaemonSet", startDaemonSet},
		{"services", startServices},
		{"flushes", tryFlushes},
		{"plugin", tryPlugin},
		{"rollout", tryRollout},
		{"drain", tryDrain},
		{"removal", tryRemoval},
	} {
		ok := t.Run(part.name, func(t *testing.T) {
			inner := *n
			inner.T = t
			part.do(&inner)
		})
		if !ok {
			n.tails()
			t.FailNow()
		}
	}
	n.publish()
}

// programs returns the flusher of the node.
func (n *node) programs() scenario.Programs { return scenario.Programs{With: n.backend} }
