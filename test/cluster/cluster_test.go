//go:build cluster

// Package cluster runs a whole node of Kubernetes, with canaryd as the DaemonSet of
// deploy/kubernetes. The API server takes every manifest, and clients outside measure the cost
// of flushes. The node is drained, updated and freed of canaryd as the documents say.
// hack/cluster.sh builds the programs, and starts the test in namespaces of its own.
package cluster

import (
	"os"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestCluster is one story: each part depends on the parts before.
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

// programs returns the node's flusher.
func (n *node) programs() scenario.Programs { return scenario.Programs{With: n.backend} }
