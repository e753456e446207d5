package cgroup

import (
	"math"
	"os"
	"strings"
	"testing"
	"testing/fstest"
)

// TestRoom: the rest of the fullest group counts, and the cache of files is free.
func TestRoom(t *testing.T) {
	const mount2 = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
	const mount1 = "31 1 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
	for name, test := range map[string]struct {
		files map[string]string
		want  int64
		err   string
	}{
		"no control groups": {map[string]string{}, math.MaxInt64, ""},
		"no limit":          {map[string]string{"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": mount2, "sys/fs/cgroup/a/memory.max": "max\n"}, math.MaxInt64, ""},
		"a limit": {map[string]string{"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": mount2, "sys/fs/cgroup/a/memory.max": "1000\n",
			"sys/fs/cgroup/a/memory.current": "900\n", "sys/fs/cgroup/a/memory.stat": "anon 300\nfile 250\nactive_file 200\ninactive_file 50\n"}, 350, ""},
		"the group above is smaller": {map[string]string{"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": mount2,
			"sys/fs/cgroup/a/memory.max": "1000\n", "sys/fs/cgroup/a/memory.current": "990\n", "sys/fs/cgroup/a/memory.stat": "anon 990\n",
			"sys/fs/cgroup/a/b/memory.max": "500\n", "sys/fs/cgroup/a/b/memory.current": "100\n", "sys/fs/cgroup/a/b/memory.stat": "anon 100\n"}, 10, ""},
		"version 1": {map[string]string{"proc/self/cgroup": "3:memory:/a\n", "proc/self/mountinfo": mount1, "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1000\n",
			"sys/fs/cgroup/memory/a/memory.usage_in_bytes": "700\n", "sys/fs/cgroup/memory/a/memory.stat": "cache 99\ntotal_inactive_file 20\ntotal_active_file 30\n"}, 350, ""},
		"it cannot be read": {map[string]string{"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": mount2, "sys/fs/cgroup/a/memory.max": "1000\n"}, math.MaxInt64, "memory.current"},
	} {
		t.Run(name, func(t *testing.T) {
			root := fstest.MapFS{}
			for file, text := range test.files {
				root[file] = &fstest.MapFile{Data: []byte(text)}
			}
			got, err := Room(root)
			if got != test.want || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("got %d and %v, want %d and %q", got, err, test.want, test.err)
			}
		})
	}
	if _, err := Room(os.DirFS("/")); err != nil {
		t.Errorf("of this machine: %v", err)
	}
}
