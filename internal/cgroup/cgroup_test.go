package cgroup

import (
	"io/fs"
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

const (
	mountV2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
	mountV1 = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n" +
		"33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n" +
		"35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
	groupsV1 = "5:cpu,cpuacct:/elsewhere\n4:memory:/system.slice/canaryd.service\n1:name=systemd:/system.slice/canaryd.service\n"
)

// TestMemoryLimit: the smallest of our limits counts, in both versions of control groups, on a
// node and in a container. A value that means "no limit" is not a limit.
func TestMemoryLimit(t *testing.T) {
	const service, v1 = "sys/fs/cgroup/system.slice/canaryd.service/", "sys/fs/cgroup/memory/system.slice/canaryd.service/"
	for _, c := range []struct {
		name           string
		groups, mounts string
		files          map[string]string
		want           Limit
		trouble        string
	}{
		{"v2, a unit", "0::/system.slice/canaryd.service\n", mountV2,
			map[string]string{service + "memory.max": "469762048\n", service + "memory.high": "max\n"},
			Limit{469762048, "/" + service + "memory.max"}, ""},
		{"v2, memory.high is smaller", "0::/system.slice/canaryd.service\n", mountV2,
			map[string]string{service + "memory.max": "469762048\n", service + "memory.high": "1048576\n"},
			Limit{1048576, "/" + service + "memory.high"}, ""},
		{"v2, an ancestor's is smaller", "0::/system.slice/canaryd.service\n", mountV2,
			map[string]string{service + "memory.max": "469762048\n", "sys/fs/cgroup/system.slice/memory.max": "268435456\n", "sys/fs/cgroup/memory.high": "max\n"},
			Limit{268435456, "/sys/fs/cgroup/system.slice/memory.max"}, ""},
		{"v2, a sibling's is not ours", "0::/system.slice/canaryd.service\n", mountV2,
			map[string]string{service + "memory.max": "max\n", "sys/fs/cgroup/system.slice/canaryd.service.d/memory.max": "1\n", "sys/fs/cgroup/system.slice/other.service/memory.max": "1\n"},
			Limit{}, ""},
		{"v2, a container with a namespace of its own", "0::/\n", mountV2,
			map[string]string{"sys/fs/cgroup/memory.max": "469762048\n"}, Limit{469762048, "/sys/fs/cgroup/memory.max"}, ""},
		{"v2, a container whose own group is mounted", "0::/kubepods/pod 1:2/c\n", "30 23 0:26 /kubepods/pod\\0401:2/c /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n",
			map[string]string{"sys/fs/cgroup/memory.max": "469762048\n"}, Limit{469762048, "/sys/fs/cgroup/memory.max"}, ""},
		{"v2, another group is mounted", "0::/kubepods/pod12\n", "30 23 0:26 /kubepods/pod1 /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n",
			map[string]string{"sys/fs/cgroup/memory.max": "1\n"}, Limit{}, ""},
		{"v2, above the namespace's root", "0::/../other\n", mountV2, map[string]string{"sys/fs/cgroup/memory.max": "1\n", "sys/fs/other/memory.max": "1\n"}, Limit{}, ""},
		{"v2, no limit at all", "0::/system.slice/canaryd.service\n", mountV2, map[string]string{service + "memory.max": "max\n", service + "memory.high": "max\n"}, Limit{}, ""},
		{"v2, the memory of no group is counted", "0::/system.slice/canaryd.service\n", mountV2, nil, Limit{}, ""},
		{"v2, a limit of nothing", "0::/system.slice/canaryd.service\n", mountV2, map[string]string{service + "memory.max": "0\n"}, Limit{1, "/" + service + "memory.max"}, ""},
		{"v2, garbage", "0::/system.slice/canaryd.service\n", mountV2,
			map[string]string{service + "memory.max": "lots\n", service + "memory.high": "-5\n", "sys/fs/cgroup/system.slice/memory.max": "99999999999999999999\n", "sys/fs/cgroup/memory.max": "1048576\n"},
			Limit{1048576, "/sys/fs/cgroup/memory.max"}, `/sys/fs/cgroup/system.slice/canaryd.service/memory.max does not hold a limit of memory: "lots"`},
		{"v2, unreadable", "0::/system.slice/canaryd.service\n", mountV2,
			map[string]string{service + "memory.max": forbidden, service + "memory.high": "1048576\n"},
			Limit{1048576, "/" + service + "memory.high"}, "permission denied"},
		{"v1, a unit", groupsV1, mountV1, map[string]string{v1 + "memory.limit_in_bytes": "469762048\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
			Limit{469762048, "/" + v1 + "memory.limit_in_bytes"}, ""},
		{"v1, an ancestor's is smaller", groupsV1, mountV1, map[string]string{v1 + "memory.limit_in_bytes": "469762048\n", "sys/fs/cgroup/memory/system.slice/memory.limit_in_bytes": "1048576\n"},
			Limit{1048576, "/sys/fs/cgroup/memory/system.slice/memory.limit_in_bytes"}, ""},
		{"v1, no limit", groupsV1, mountV1, map[string]string{v1 + "memory.limit_in_bytes": "9223372036854771712\n"}, Limit{}, ""},
		{"v1, a container of Docker's", "4:memory:/docker/c\n", "35 31 0:32 /docker/c /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
			map[string]string{"sys/fs/cgroup/memory/memory.limit_in_bytes": "469762048\n"}, Limit{469762048, "/sys/fs/cgroup/memory/memory.limit_in_bytes"}, ""},
		{"both, memory in version 1", groupsV1 + "0::/system.slice/canaryd.service\n", mountV1 + "36 31 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
			map[string]string{v1 + "memory.limit_in_bytes": "469762048\n"}, Limit{469762048, "/" + v1 + "memory.limit_in_bytes"}, ""},
		{"nothing is mounted", "0::/\n", "", nil, Limit{}, ""},
		{"mounts that are no mounts", "0::/\nx\n:\n", "\n - \n- cgroup2\n1 2 3 / / rw - cgroup2\n", nil, Limit{}, ""},
		{"unreadable groups", forbidden, mountV2, nil, Limit{}, "reading the control group of this process: open proc/self/cgroup: permission denied"},
		{"unreadable mounts", "0::/\n", forbidden, nil, Limit{}, "reading where control groups are mounted: open proc/self/mountinfo: permission denied"},
	} {
		t.Run(c.name, func(t *testing.T) {
			files := tree{"proc/self/cgroup": c.groups, "proc/self/mountinfo": c.mounts}
			for name, text := range c.files {
				files[name] = text
			}
			got, err := MemoryLimit(files)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if c.trouble == "" && err != nil || c.trouble != "" && (err == nil || !strings.Contains(err.Error(), c.trouble)) {
				t.Errorf("got %v, want trouble %q", err, c.trouble)
			}
		})
	}
	if got, err := MemoryLimit(fstest.MapFS{}); got != (Limit{}) || err != nil {
		t.Errorf("without control groups: %+v, %v", got, err)
	}
}

// TestMemoryLimitHere: this machine's own files are understood, with any content.
func TestMemoryLimitHere(t *testing.T) {
	limit, err := MemoryLimit(os.DirFS("/"))
	if err != nil {
		t.Error(err)
	}
	t.Logf("%+v", limit)
}

// TestHeapLimit: the limit leaves room for the programs that canaryd executes.
func TestHeapLimit(t *testing.T) {
	const MiB = 1 << 20
	for limit, want := range map[int64]int64{448 * MiB: 336 * MiB, 1: 32 * MiB, 40 * MiB: 32 * MiB, unlimited - 1: unlimited/4*3 - 3} {
		if got := (Limit{Bytes: limit}).HeapLimit(); got != want {
			t.Errorf("of %d bytes the heap may have %d, want %d", limit, got, want)
		}
	}
}

// forbidden marks a file that may not be read.
const forbidden = "\x00forbidden"

// A tree maps paths to files.
type tree map[string]string

func (t tree) Open(name string) (fs.File, error) {
	text, ok := t[name]
	if text == forbidden {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	if !ok {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return fstest.MapFS{name: {Data: []byte(text)}}.Open(name)
}
