package nodetest

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// MemoryGroup makes a control group that can limit memory, and returns it with the name of the
// limit's file. It is removed with the test.
func (n *Node) MemoryGroup() (dir, file string) {
	n.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	n.Must(err)
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		switch {
		case f[2] == "cgroup" && strings.Contains(","+f[3]+",", ",memory,"):
			file = "memory.limit_in_bytes"
		case f[2] == "cgroup2":
			// Groups below have the controller only if their parent passes it on.
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

// MemoryUsed returns how many bytes the processes of such a control group use, including the
// kernel's memory for them.
func (n *Node) MemoryUsed(dir string) int64 {
	n.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "memory.usage_in_bytes"))
	if os.IsNotExist(err) {
		text, err = os.ReadFile(filepath.Join(dir, "memory.current"))
	}
	n.Must(err)
	used, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	n.Must(err)
	return used
}
