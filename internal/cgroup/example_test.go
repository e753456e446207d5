package cgroup_test

import (
	"fmt"
	"testing/fstest"

	"github.com/canaryd/canaryd/internal/cgroup"
)

// The smallest limit of a group and its ancestors holds.
func ExampleMemoryLimit() {
	file := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	root := fstest.MapFS{ // os.DirFS("/") on a node
		"proc/self/cgroup":    file("0::/kubepods/canaryd\n"),
		"proc/self/mountinfo": file("30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),

		"sys/fs/cgroup/kubepods/memory.max":         file("1073741824\n"),
		"sys/fs/cgroup/kubepods/canaryd/memory.max": file("134217728\n"),
	}
	limit, err := cgroup.MemoryLimit(root)
	fmt.Println(limit.Bytes>>20, "MiB", limit.File, err)
	// Output:
	// 128 MiB /sys/fs/cgroup/kubepods/canaryd/memory.max <nil>
}
