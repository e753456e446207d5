package e2e

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestWithoutRoot: without root every command explains in one line how to
// proceed.
func TestWithoutRoot(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "setpriv")
		n.Load()
		d := n.Start()
		// Only root can read the folder of the test's own program.
		text, err := os.ReadFile(nodetest.Canaryd())
		n.Must(err)
		n.Must(os.WriteFile("/run/canaryd-of-all", text, 0o755))
		for _, command := range []string{"status", "check", "restore", "pause", "resume"} {
			cmd := exec.CommandContext(n.Context(), "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/run/canaryd-of-all", command)
			code, stdout, stderr := n.Exec(cmd)
			if code != 2 || stdout != "" || !strings.Contains(stderr, "only root, and the user that canaryd runs as, may ask canaryd") || !strings.HasSuffix(stderr, ": sudo canaryd "+command+"\n") {
				n.Errorf("%s: exit code %d, %q, %q", command, code, stdout, stderr)
			}
		}
		d.Stop()
	})
}
