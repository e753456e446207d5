package e2e

import (
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// TestLeastCapabilities: canaryd heals with exactly the capabilities that its
// unit leaves it.
func TestLeastCapabilities(t *testing.T) {
	unit := document(t, "deploy/systemd/canaryd.service")
	found := regexp.MustCompile(`(?m)^CapabilityBoundingSet=(.*)$`).FindStringSubmatch(unit)
	if found == nil {
		t.Fatal("the unit bounds no capabilities")
	}
	bounds := "-all"
	for _, name := range strings.Fields(found[1]) {
		bounds += ",+" + strings.ToLower(strings.TrimPrefix(name, "CAP_"))
	}
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "setpriv")
		n.Load()
		before := n.Protected()
		n.Under = []string{"setpriv", "--bounding-set=" + bounds, "--inh-caps=-all", "--no-new-privs"}
		d := n.Start()
		n.Flush()
		n.Healed(1)
		n.Same("protected rules", before, n.Protected())
		d.Stop()
	})
}

// TestUnitCommand: the unit's command line must be valid.
func TestUnitCommand(t *testing.T) {
	t.Parallel()
	unit := document(t, "deploy/systemd/canaryd.service")
	line := regexp.MustCompile(`(?m)^ExecStart=/usr/local/bin/canaryd (.*)$`).FindStringSubmatch(unit)
	if line == nil {
		t.Fatal("the unit starts no canaryd")
	}
	out, err := exec.Command(nodetest.Canaryd(), append(strings.Fields(line[1]), "--help")...).CombinedOutput()
	if err != nil {
		t.Errorf("canaryd %s --help: %v: %s", line[1], err, out)
	}
}
