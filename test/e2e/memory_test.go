package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestMemoryOfTheControlGroup: canaryd limits its heap to three quarters of the
// limit of its control group, or of the group above. GOMEMLIMIT and a group
// without a limit disable this.
func TestMemoryOfTheControlGroup(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		nstest.NeedRoot(n.T)
		n.Load()
		outer, file := n.MemoryGroup()
		inner := filepath.Join(outer, "inner")
		n.Must(os.Mkdir(inner, 0o755))
		n.Cleanup(func() { n.Must(os.Remove(inner)) })
		const said = "The control group limits memory"
		n.Under = []string{"sh", "-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, inner}
		for _, c := range []struct {
			limit, env, want string
		}{
			{"469762048", "GOMEMLIMIT=", fmt.Sprintf(`bytes=469762048 of="%s/%s" heap=352321536`, outer, file)},
			{"469762048", "GOMEMLIMIT=off", ""},
			{"-1", "GOMEMLIMIT=", ""},
		} {
			if c.limit == "-1" && file == "memory.max" {
				c.limit = "max"
			}
			n.Must(os.WriteFile(filepath.Join(outer, file), []byte(c.limit), 0o600))
			n.Env = []string{c.env}
			d := n.Start()
			if c.want != "" {
				d.WantLog(said, c.want)
			} else if strings.Contains(d.Log(), said) {
				n.Errorf("limit %s, %s: it says %s:\n%s", c.limit, c.env, said, d.Log())
			}
			n.Flush()
			n.Healed(1)
			d.Stop()
		}
	})
}
