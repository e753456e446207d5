package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/nodetest"
	"github.com/canaryd/canaryd/internal/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestMemoryOfTheControlGroup: canaryd takes three quarters of what its control group, or the
// one above, allows for its heap; GOMEMLIMIT and a group without a limit leave it alone.
func TestMemoryOfTheControlGroup(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		nstest.NeedRoot(n.T)
		n.Load()
		outer, file := memoryGroup(n)
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

// memoryGroup makes a control group that can limit memory, and returns with it the name of the
// limit's file.
func memoryGroup(n *nodetest.Node) (dir, file string) {
	n.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	n.Must(err)
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		switch {
		case f[2] == "cgroup" && strings.Contains(","+f[3]+",", ",memory,"):
			file = "memory.limit_in_bytes"
		case f[2] == "cgroup2":
			// Groups below have the controller where its children are given it.
			if text, err := os.ReadFile(f[1] + "/cgroup.subtree_control"); err != nil || !strings.Contains(" "+string(text), "memory") {
				continue
			}
			file = "memory.max"
		default:
			continue
		}
		dir, err := os.MkdirTemp(f[1], "canaryd-test-")
		n.Must(err)
		n.Cleanup(func() { n.Must(os.Remove(dir)) })
		return dir, file
	}
	n.Fatal("no control group limits memory here, neither of version 1 nor of version 2")
	return "", ""
}
